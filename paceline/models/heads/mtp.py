"""MTP: the target's own next-token layer.

DeepSeek and its relatives store it as `model.layers.{L}` behind the last layer, Qwen as `mtp.`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.layers.attention import ForwardInputs
from paceline.layers.linear import Linear
from paceline.layers.vocab import Embedding, VocabShards, all_agree
from paceline.models.config_json import Config, value_of
from paceline.models.decoder import Decoder, LayerStack
from paceline.models.heads.base import for_norm, pick_embedding
from paceline.models.loading import (
    LayerNames,
    check_names,
    layer_shapes,
    load_stack,
    open_reader,
)
from paceline.models.reader import WeightFormats
from paceline.models.sharding import vocab_rows
from paceline.models.spec import LayerSpec, ModelSpec
from paceline.models.weight_source import NamedShape, RenamedWeights, WeightSource
from paceline.parallel.groups import ALONE, Groups
from paceline.speculation import SpeculativeConfig
from paceline.state.recurrent import LayerStorage


class MtpNames(NamedTuple):
    """Where the head's tensors are."""

    root: str  # prefix of all
    layers: LayerNames
    token_norm: str
    feature_norm: str
    projection: str
    final_norm: str
    table: str
    lm_head: str

    @classmethod
    def behind(cls, num_layers: int) -> MtpNames:
        at = f"model.layers.{num_layers}."
        parts = (
            "enorm",
            "hnorm",
            "eh_proj",
            "shared_head.norm",
            "embed_tokens",
            "shared_head.head",
        )
        return cls(at, LayerNames(first=num_layers), *(at + x for x in parts))

    @classmethod
    def qwen(cls) -> MtpNames:
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")
        parts = (*norms, "fc", "norm", "embed_tokens", "lm_head")
        return cls("mtp.", LayerNames("mtp.layers."), *(f"mtp.{x}" for x in parts))


# Families that store the head under `mtp.`, with the default of the count: Qwen3-Next's
# config.json does not mention it.
_QWEN = {"qwen3_5": 0, "qwen3_5_moe": 0, "qwen3_next": 1}
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def read_mtp(name: str, config: Config, target: ModelSpec, options: SpeculativeConfig) -> MtpSpec:
    is_qwen = target.family in _QWEN
    key = next((x for x in _COUNTS if config.get(x)), _COUNTS[is_qwen])
    count = value_of(config, key, int, _QWEN.get(target.family, 0))
    if not count:
        raise CheckpointError(
            f"{name!r} has no MTP layer: its config.json says {key} {config.get(key)}. "
            'Method "mtp" needs one; use "ngram", or another method with its own "model".'
        )
    if count > 1:
        raise CheckpointError(f"{name!r} has {count} MTP layers ({key}), {_ONE_ONLY}")
    # The MTP layer of a model with experts has experts, even if some of its layers are dense.
    mlps = [x.mlp for x in target.layers]
    mlp = next((x for x in mlps if x.has_experts), mlps[-1])
    layers = replace(target, layers=(LayerSpec(target.attention, mlp),))
    names = MtpNames.qwen() if is_qwen else MtpNames.behind(target.num_layers)
    return MtpSpec(name, layers, names)


_ONE_ONLY = (
    "one for each draft; only checkpoints with a single one, which makes all drafts, are supported."
)


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """See HeadSpec."""

    name: str
    layers: ModelSpec
    names: MtpNames

    def shapes(self, target: ModelSpec, names: set[str] | None = None) -> list[NamedShape]:
        """Without embedding and lm_head, which may be the target's."""
        own, width = self.names, self.layers.hidden_size
        norms = (own.token_norm, own.feature_norm, own.final_norm)
        return [
            *layer_shapes(self.layers, names, own.layers),
            *((f"{x}.weight", (width,)) for x in norms),
            (f"{own.projection}.weight", (width, 2 * width)),
        ]

    def load(
        self, source: WeightSource, formats: WeightFormats, target: Decoder, groups: Groups = ALONE
    ) -> MtpModel:
        """`source` is the target's checkpoint."""
        own = self.names
        layer = RenamedWeights(source, {n: n for n in source.names() if n.startswith(own.root)})
        self._check_layer(source.names(), layer.names())
        table, head = f"{own.table}.weight", f"{own.lm_head}.weight"
        tables = {table, head} & layer.names()
        vocabulary = (target.spec.vocab_size, self.layers.hidden_size)
        shapes = self.shapes(target.spec, layer.names())
        check_names(self.layers, layer, [*shapes, *((n, vocabulary) for n in sorted(tables))])
        vocab = VocabShards(target.spec.vocab_size, groups.tp)
        sharded = dict.fromkeys(tables, vocab)
        read = open_reader(self.layers, layer, formats, groups, sharded, own.layers)
        brings_head = head in tables and not _is_targets(source, head, target)
        return MtpModel(
            stack=load_stack(self.layers, read, target.rotation, where=own.layers),
            embedding=pick_embedding(read, table, vocab if table in tables else None, target),
            token_norm=read.norm(f"{own.token_norm}.weight"),
            feature_norm=read.norm(f"{own.feature_norm}.weight"),
            projection=read.linear([own.projection]),
            final_norm=read.norm(f"{own.final_norm}.weight"),
            lm_head=read.head(own.lm_head) if brings_head else target.lm_head,
            vocab=vocab if brings_head else target.vocab,
        )

    def _check_layer(self, names: set[str], own: set[str]) -> None:
        root, projection = self.names.root, f"{self.names.projection}.weight"
        if projection not in own:
            found = f"{len(own)} tensors" if own else "no tensor"
            raise CheckpointError(
                f"{self.name!r} has {found} under '{root}' and no '{projection}': config.json "
                "announces an MTP layer, but the conversion of these weights dropped it; use the "
                'original checkpoint, or another method than "mtp".'
            )
        at, after = (self.names.layers.prefix(i) for i in (0, 1))
        if any(n.startswith(after) for n in names):
            raise CheckpointError(
                f"{self.name!r} has several MTP layers ('{at}' and '{after}'), {_ONE_ONLY}"
            )


def _is_targets(source: WeightSource, name: str, target: Decoder) -> bool:
    """Whether a stored lm_head equals the target's; it usually does. All ranks must call this."""
    names, vocab = source.names(), target.vocab
    shared = "lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight"
    cut = vocab_rows(vocab)
    is_same = torch.equal(source.load(name, cut), source.load(shared, cut))
    return all_agree(vocab.group, is_same, target.final_norm.device)


@dataclass(slots=True)
class MtpModel:
    """projection([normed embedding; normed feature]), one layer, a final norm, the lm_head.

    Features are hidden states after a final norm: the target's, then this layer's own.
    """

    stack: LayerStack
    embedding: Embedding
    token_norm: Tensor
    feature_norm: Tensor
    projection: Linear
    final_norm: Tensor
    lm_head: Linear
    vocab: VocabShards

    tap_ids = ()
    draft_to_target_ids = None

    def read(self, target_TD: Tensor) -> Tensor:
        return target_TD

    def forward(
        self, inputs: ForwardInputs, feature_TD: Tensor, pages: Sequence[LayerStorage]
    ) -> Tensor:
        stack, eps = self.stack, self.stack.spec.norm_eps
        rms_norm = stack.kernels.rms_norm
        token_TD = rms_norm(for_norm(self.embedding(inputs.token_T)), self.token_norm, eps)
        feature_TD = rms_norm(for_norm(feature_TD), self.feature_norm, eps)
        residual_TD = self.projection(torch.cat((token_TD, feature_TD), dim=1)).float()
        stream = stack.run(residual_TD, inputs, pages)
        return stack.kernels.add_rms_norm(*stream, self.final_norm, eps)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """fp32 logits [B, V]."""
        return self.lm_head(hidden_BD).float()
