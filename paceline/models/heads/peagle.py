"""P-EAGLE: an EAGLE-3 head that drafts a block. Masks have a learned feature in place of the
target's, and follow the committed entries; attention is causal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.kernels.step_rows import BlockLayout
from paceline.layers.attention import BlockPass
from paceline.layers.vocab import VocabShards
from paceline.models.config_json import Config, value_of
from paceline.models.decoder import Decoder, LayerStack
from paceline.models.heads.base import TABLE, renamed
from paceline.models.heads.block_config import mask_id
from paceline.models.heads.eagle3 import Eagle3Model, Eagle3Spec, read_eagle3
from paceline.models.reader import WeightFormats
from paceline.models.spec import ModelSpec
from paceline.models.weight_source import NamedShape, RenamedWeights, WeightSource
from paceline.parallel.groups import ALONE, Groups
from paceline.speculation import SpeculativeConfig
from paceline.state.recurrent import LayerStorage

_MASK = "model.mask_hidden"


def is_peagle(config: Config) -> bool:
    named = str((config.get("speculators_model_type"), config.get("architectures"))).lower()
    return "peagle" in named or config.get("ptd_token_id") is not None


def read_peagle(
    name: str, config: Config, target: ModelSpec, options: SpeculativeConfig
) -> PEagleSpec:
    """Refuses heads that cannot work with this target, from the two configs alone."""
    kind = {"speculators_model_type": "eagle3"} if "speculators_model_type" in config else {}
    eagle = read_eagle3(name, {**config, **kind}, target, options)
    nested = value_of(config, "transformer_layer_config", dict, {})
    mask = mask_id(name, [config, nested], eagle.layers.vocab_size)
    return PEagleSpec(eagle, BlockLayout(options.num_speculative_tokens, mask, first_output=-1))


@dataclass(frozen=True, slots=True)
class PEagleSpec:
    """See HeadSpec."""

    eagle: Eagle3Spec
    layout: BlockLayout

    @property
    def layers(self) -> ModelSpec:
        return self.eagle.layers

    @property
    def _mask_width(self) -> int:
        return max(len(self.eagle.tap_ids), 1) * self.eagle.target_size

    def shapes(self, target: ModelSpec) -> list[NamedShape]:
        return [*self.eagle.shapes(target), (_MASK, (1, self._mask_width))]

    def load(
        self, source: WeightSource, formats: WeightFormats, target: Decoder, groups: Groups = ALONE
    ) -> PEagleModel:
        source, name = renamed(source), self.eagle.name
        names = source.names()
        if _MASK not in names:
            raise CheckpointError(
                f"{name!r} has no tensor 'mask_hidden', so it is no P-EAGLE head; for an EAGLE-3 "
                'head give "method": "eagle3".'
            )
        stored = source.load(_MASK)
        if stored.numel() != self._mask_width:
            raise CheckpointError(
                f"the P-EAGLE head {name!r} has a mask_hidden of {stored.numel()} numbers; it must "
                f"have {self._mask_width}: {len(self.eagle.tap_ids)} layers of the target, "
                f"{self.eagle.target_size} wide."
            )
        if TABLE in names:
            mask_id(name, [{"mask_token_id": self.layout.mask_id}], source.shape(TABLE)[0])
        others = RenamedWeights(source, {n: n for n in names if n != _MASK})
        eagle = self.eagle.load(others, formats, target, groups)
        mask_1D = stored.reshape(1, -1).to(formats.device, formats.compute)
        return PEagleModel(eagle, self.layout, eagle.read(mask_1D))


@dataclass(slots=True)
class PEagleModel:
    """See BlockModel. All masks have the same feature."""

    eagle: Eagle3Model
    layout: BlockLayout
    mask_1D: Tensor

    chain = None

    @property
    def stack(self) -> LayerStack:
        return self.eagle.stack

    @property
    def tap_ids(self) -> tuple[int, ...]:
        return self.eagle.tap_ids

    @property
    def draft_to_target_ids(self) -> Tensor | None:
        return self.eagle.draft_to_target_ids

    @property
    def vocab(self) -> VocabShards:
        return self.eagle.vocab

    def forward(self, batch: BlockPass, target_TD: Tensor, pages: Sequence[LayerStorage]) -> Tensor:
        feature_TD = self.eagle.read(batch.of_target(target_TD))
        mask_ED = self.mask_1D.to(feature_TD.dtype).expand(len(batch.offset_E), -1)
        both_TD = torch.cat((feature_TD, mask_ED))
        return batch.of_outputs(self.eagle.forward(batch.inputs, both_TD, pages))

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self.eagle.logits(hidden_ND)
