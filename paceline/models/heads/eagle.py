"""EAGLE-1 heads: one or more layers over [embedding of the next token; target's hidden state]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.layers.attention import ForwardInputs
from paceline.layers.linear import Linear
from paceline.layers.vocab import Embedding, VocabShards
from paceline.models.config_json import Config
from paceline.models.decoder import Decoder, LayerStack
from paceline.models.heads.base import (
    TABLE,
    as_stored,
    check_embedding,
    pick_embedding,
    read_layers,
    renamed,
    warn_of_vocabulary,
)
from paceline.models.loading import check_names, layer_shapes, load_stack, open_reader
from paceline.models.quantised_config import refuse_quantised
from paceline.models.reader import WeightFormats
from paceline.models.spec import ModelSpec
from paceline.models.weight_source import NamedShape, WeightSource
from paceline.parallel.groups import ALONE, Groups
from paceline.speculation import SpeculativeConfig
from paceline.state.recurrent import LayerStorage


def read_eagle(
    name: str, config: Config, target: ModelSpec, options: SpeculativeConfig
) -> EagleSpec:
    """Refuses heads that cannot work with this target, from the two configs alone."""
    refuse_quantised(config)
    if "transformer_layer_config" in config:
        raise CheckpointError(
            "this is an EAGLE-1 head in the form of speculators "
            f"({config.get('speculators_model_type')!r}), which is not supported; use the head as "
            "it was published, or an EAGLE-3 head of either form."
        )
    layers = replace(
        read_layers(config),
        family="eagle",
        has_first_norm=False,
        max_position=target.max_position,
    )
    if layers.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"the EAGLE head {name!r} has a hidden size of {layers.hidden_size}, the target has "
            f"{target.hidden_size}; a head reads the hidden states of the target it was trained "
            "for."
        )
    check_embedding(name, layers.vocab_size, target)
    warn_of_vocabulary("EAGLE", name, layers, target)
    return EagleSpec(name, layers)


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """See HeadSpec."""

    name: str
    layers: ModelSpec

    def shapes(self, target: ModelSpec) -> list[NamedShape]:
        """Without the embedding, which may be the target's."""
        width = self.layers.hidden_size
        return [("model.fc.weight", (width, 2 * width)), *layer_shapes(self.layers)]

    def load(
        self, source: WeightSource, formats: WeightFormats, target: Decoder, groups: Groups = ALONE
    ) -> EagleModel:
        source = renamed(source)
        names = source.names()
        if names & {"model.d2t", "model.layers.0.hidden_norm.weight"}:
            raise CheckpointError(
                f'{self.name!r} is an EAGLE-3 head: give "method": "eagle3"; "eagle" takes EAGLE-1 '
                "heads."
            )
        if "model.fc.weight" not in names:
            raise CheckpointError(
                f"{self.name!r} has no tensor 'fc.weight', so it is no EAGLE-1 head; for a whole "
                'model with the target\'s vocabulary give "method": "draft_model".'
            )
        head = replace(self, layers=as_stored(self.layers, names))
        width, shapes = head.layers.hidden_size, head.shapes(target.spec)
        tables: dict[str, VocabShards] = {}
        if "model.fc.bias" in names:
            shapes.append(("model.fc.bias", (width,)))
        if TABLE in names:
            num_rows = source.shape(TABLE)[0]
            check_embedding(self.name, num_rows, target.spec)
            shapes.append((TABLE, (num_rows, width)))
            tables[TABLE] = VocabShards(num_rows, groups.tp)
        check_names(head.layers, source, shapes)
        read = open_reader(head.layers, source, formats, groups, tables)
        rope, size = head.layers.rope, head.layers.attention.rope_size
        return EagleModel(
            stack=load_stack(head.layers, read, rope.table(size, len(target.rotation), source)),
            embedding=pick_embedding(read, TABLE, tables.get(TABLE), target),
            fc=read.linear(["model.fc"]),
            lm_head=target.lm_head,
            vocab=target.vocab,
        )


@dataclass(slots=True)
class EagleModel:
    """x = fc([embedding of the next token; feature]), layers, the target's lm_head.

    The feature at i is the target's hidden state after its final norm, or for drafts this head's
    own output at i. There is no norm before the first layer and none after the last.
    """

    stack: LayerStack
    embedding: Embedding
    fc: Linear
    lm_head: Linear
    vocab: VocabShards

    tap_ids = ()
    draft_to_target_ids = None

    def read(self, target_TD: Tensor) -> Tensor:
        return target_TD

    def forward(
        self, inputs: ForwardInputs, feature_TD: Tensor, pages: Sequence[LayerStorage]
    ) -> Tensor:
        """The output of the last layer."""
        token_TD = self.embedding(inputs.token_T).to(feature_TD.dtype)
        x_TD = self.fc(torch.cat((token_TD, feature_TD), dim=1))
        stream = self.stack.run(x_TD.float(), inputs, pages, x_TD)
        # One kernel adds in fp32 and rounds to the type of activations.
        return torch.add(*stream, out=x_TD.new_empty(stream.residual_TD.shape))

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """fp32 logits [B, V]."""
        return self.lm_head(hidden_BD).float()
