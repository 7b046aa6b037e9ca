"""PARD: a draft model that was trained to fill in masks behind its tokens, all in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.kernels.step_rows import BlockLayout
from paceline.layers.attention import BlockPass
from paceline.layers.vocab import VocabShards
from paceline.models.config_json import Config
from paceline.models.decoder import Decoder
from paceline.models.families import read_spec
from paceline.models.heads.base import check_draft_model
from paceline.models.heads.block_config import mask_id
from paceline.models.loading import expected_shapes, load_decoder
from paceline.models.reader import WeightFormats
from paceline.models.spec import ModelSpec
from paceline.models.weight_source import NamedShape, WeightSource
from paceline.parallel.groups import ALONE, Groups
from paceline.speculation import SpeculativeConfig
from paceline.state.recurrent import LayerStorage


def is_pard(config: Config) -> bool:
    return config.get("pard_token") is not None or config.get("spd_type") == "pard"


def read_pard(name: str, config: Config, target: ModelSpec, options: SpeculativeConfig) -> PardSpec:
    """A whole model; it reads nothing of the target."""
    spec = read_spec(config)
    check_draft_model(name, spec, target)
    mask = mask_id(name, [config], spec.vocab_size)
    return PardSpec(spec, BlockLayout(options.num_speculative_tokens, mask, first_output=0))


@dataclass(frozen=True, slots=True)
class PardSpec:
    """See HeadSpec."""

    layers: ModelSpec
    layout: BlockLayout

    def shapes(self, target: ModelSpec) -> list[NamedShape]:
        return expected_shapes(self.layers)

    def load(
        self, source: WeightSource, formats: WeightFormats, target: Decoder, groups: Groups = ALONE
    ) -> PardModel:
        length = len(target.rotation)
        decoder = load_decoder(self.layers, source, formats, max_model_len=length, groups=groups)
        return PardModel(decoder, self.layout)


@dataclass(slots=True)
class PardModel:
    """See BlockModel. Committed tokens are computed again where masks had been before."""

    stack: Decoder
    layout: BlockLayout

    tap_ids = ()
    draft_to_target_ids = None
    chain = None

    @property
    def vocab(self) -> VocabShards:
        return self.stack.vocab

    def forward(self, batch: BlockPass, target_TD: Tensor, pages: Sequence[LayerStorage]) -> Tensor:
        return batch.of_outputs(self.stack.forward(batch.inputs, pages))

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self.stack.logits(hidden_ND)
