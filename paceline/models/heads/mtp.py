"""MTP: the target's own next-token layer, stored as `model.layers.{L}` behind its last layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.config import SpeculativeConfig
from paceline.errors import CheckpointError
from paceline.layers.attention import ForwardInputs
from paceline.layers.linear import Linear
from paceline.layers.vocab import Embedding, VocabShards, all_agree
from paceline.models.config_json import Config, value_of
from paceline.models.decoder import Decoder, LayerStack
from paceline.models.heads.base import for_norm, pick_embedding
from paceline.models.loading import check_names, layer_shapes, load_stack, open_reader
from paceline.models.reader import WeightFormats
from paceline.models.sharding import vocab_rows
from paceline.models.spec import LayerSpec, ModelSpec
from paceline.models.weight_source import NamedShape, RenamedWeights, WeightSource
from paceline.parallel.groups import ALONE, Groups
from paceline.state.pages import LayerPages

_COUNT = "num_nextn_predict_layers"


def read_mtp(name: str, config: Config, target: ModelSpec, options: SpeculativeConfig) -> MtpSpec:
    count = value_of(config, _COUNT, int, 0) or value_of(config, "num_mtp_layers", int, 0)
    if not count:
        raise CheckpointError(
            f"{name!r} has no MTP layer: its config.json says {_COUNT} {config.get(_COUNT)}. "
            'Method "mtp" needs one; use "ngram", or another method with its own "model".'
        )
    if count > 1:
        raise CheckpointError(f"{name!r} has {count} MTP layers ({_COUNT}), {_ONE_ONLY}")
    # The MTP layer of a model with experts has experts, even if some of its layers are dense.
    mlps = [x.mlp for x in target.layers]
    mlp = next((x for x in mlps if x.has_experts), mlps[-1])
    layers = replace(target, layers=(LayerSpec(target.attention, mlp),))
    return MtpSpec(name, layers, target.num_layers)


_ONE_ONLY = (
    "one for each draft; only checkpoints with a single one, which makes all drafts, are supported."
)


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """See HeadSpec. `index` is the layer's number in the checkpoint."""

    name: str
    layers: ModelSpec
    index: int

    @property
    def _at(self) -> str:
        return f"model.layers.{self.index}."

    def shapes(self, target: ModelSpec, names: set[str] | None = None) -> list[NamedShape]:
        """Without embedding and lm_head, which may be the target's."""
        at, width = self._at, self.layers.hidden_size
        return [
            *layer_shapes(self.layers, names, self.index),
            (at + "enorm.weight", (width,)),
            (at + "hnorm.weight", (width,)),
            (at + "eh_proj.weight", (width, 2 * width)),
            (at + "shared_head.norm.weight", (width,)),
        ]

    def load(
        self, source: WeightSource, formats: WeightFormats, target: Decoder, groups: Groups = ALONE
    ) -> MtpModel:
        """`source` is the target's checkpoint."""
        at = self._at
        layer = RenamedWeights(source, {n: n for n in source.names() if n.startswith(at)})
        self._check_layer(source.names(), layer.names())
        table, head = at + "embed_tokens.weight", at + "shared_head.head.weight"
        tables = {table, head} & layer.names()
        vocabulary = (target.spec.vocab_size, self.layers.hidden_size)
        shapes = self.shapes(target.spec, layer.names())
        check_names(self.layers, layer, [*shapes, *((n, vocabulary) for n in sorted(tables))])
        vocab = VocabShards(target.spec.vocab_size, groups.tp)
        sharded = dict.fromkeys(tables, vocab)
        read = open_reader(self.layers, layer, formats, groups, sharded, self.index)
        brings_head = head in tables and not _is_targets(source, head, target)
        return MtpModel(
            stack=load_stack(self.layers, read, target.rotation, first=self.index),
            embedding=pick_embedding(read, table, vocab if table in tables else None, target),
            token_norm=read.norm(at + "enorm.weight"),
            feature_norm=read.norm(at + "hnorm.weight"),
            projection=read.linear([at + "eh_proj"]),
            final_norm=read.norm(at + "shared_head.norm.weight"),
            lm_head=read.head(head.removesuffix(".weight")) if brings_head else target.lm_head,
            vocab=vocab if brings_head else target.vocab,
        )

    def _check_layer(self, names: set[str], own: set[str]) -> None:
        at, after = self._at, f"model.layers.{self.index + 1}."
        if at + "eh_proj.weight" not in own:
            found = f"{len(own)} tensors" if own else "no tensor"
            raise CheckpointError(
                f"{self.name!r} has {found} under '{at}' and no '{at}eh_proj.weight': config.json "
                "announces an MTP layer, but the conversion of these weights dropped it; use the "
                'original checkpoint, or another method than "mtp".'
            )
        if after + "eh_proj.weight" in names:
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
    """eh_proj([normed embedding; normed feature]), one layer, a final norm, the lm_head.

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

    def forward(self, inputs: ForwardInputs, feature_TD: Tensor, pages: list[LayerPages]) -> Tensor:
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
