"""What all draft heads have in common: small models that read the target's hidden states.

Each kind of head is one file: its spec, its loading and its forward. heads/registry lists them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.kernels.step_rows import BlockLayout
from paceline.layers.attention import BlockPass, ForwardInputs
from paceline.layers.vocab import Embedding, VocabShards
from paceline.models.blocks.dense_mlp import DenseSpec
from paceline.models.blocks.grouped_attention import GroupedSpec
from paceline.models.config_json import Config
from paceline.models.decoder import Decoder, LayerStack
from paceline.models.families import FAMILIES
from paceline.models.reader import Reader, WeightFormats
from paceline.models.spec import LayerSpec, ModelSpec
from paceline.models.weight_source import NamedShapes, RenamedWeights, WeightSource
from paceline.parallel.groups import ALONE, Groups
from paceline.state.recurrent import LayerStorage

logger = logging.getLogger(__name__)

TABLE = "model.embed_tokens.weight"


class HeadModel(Protocol):
    """A loaded head. Entry i of a pass holds token i + 1 and the feature at position i.

    Features of committed positions are the target's; after them a head reads its own outputs.
    """

    stack: LayerStack

    @property
    def vocab(self) -> VocabShards:
        """The part of the head's vocabulary that this rank's logits cover."""

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """Target layers that the head reads: id k is the residual stream after k layers. Empty:
        the head reads the hidden states after the target's final norm."""

    @property
    def draft_to_target_ids(self) -> Tensor | None:
        """For a head with a smaller vocabulary: the target's id of each draft id, int64."""

    def read(self, target_TD: Tensor) -> Tensor:
        """The features of this head from what it reads of the target."""

    def forward(
        self, inputs: ForwardInputs, feature_TD: Tensor, pages: Sequence[LayerStorage]
    ) -> Tensor:
        """The next features, of all entries or of `inputs.wanted`. Logits come from them too."""

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """fp32 logits over this rank's part of the head's vocabulary."""


class Chain(Protocol):
    """Corrects the logits of a draft by the draft before it."""

    @property
    def vocab(self) -> VocabShards:
        """The part of the vocabulary that corrected logits cover."""

    def __call__(self, logits_BV: Tensor, hidden_BD: Tensor, previous_B: Tensor) -> Tensor:
        """`previous_B` are ids of the target: drafts, or the newest tokens."""


@runtime_checkable
class BlockModel(Protocol):
    """A loaded model that drafts a block in one pass."""

    @property
    def stack(self) -> LayerStack: ...

    @property
    def layout(self) -> BlockLayout: ...

    @property
    def tap_ids(self) -> tuple[int, ...]: ...

    @property
    def draft_to_target_ids(self) -> Tensor | None: ...

    @property
    def vocab(self) -> VocabShards:
        """The part of the model's vocabulary that this rank's logits cover."""

    @property
    def chain(self) -> Chain | None:
        """None: no draft depends on another."""

    def forward(self, batch: BlockPass, target_TD: Tensor, pages: Sequence[LayerStorage]) -> Tensor:
        """What logits are made of, at `batch.output_N`. Writes the KV of committed entries."""

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """fp32 logits over this rank's part of the model's vocabulary."""


class HeadSpec(Protocol):
    """A head before its weights are read."""

    @property
    def layers(self) -> ModelSpec:
        """The head's layers, as a decoder."""

    def shapes(self, target: ModelSpec) -> NamedShapes:
        """Every tensor that the head must have."""

    def load(
        self, source: WeightSource, formats: WeightFormats, target: Decoder, groups: Groups = ALONE
    ) -> HeadModel | BlockModel:
        """Build this rank's part of the head. Tables that it does not bring are the target's."""


def read_layers(config: Config) -> ModelSpec:
    """The layers of an EAGLE head: Llama's or Qwen3's, although it may be named otherwise."""
    # Heads state the length that they were trained with; it does not limit them.
    values = {"num_hidden_layers": 1, "max_position_embeddings": 2048, **config}
    is_qwen3 = config.get("model_type") == "qwen3"
    return FAMILIES["Qwen3ForCausalLM" if is_qwen3 else "LlamaForCausalLM"](values)


def with_attention(layer: LayerSpec, **changes: Any) -> LayerSpec:
    assert isinstance(layer.attention, GroupedSpec)
    return replace(layer, attention=replace(layer.attention, **changes))


def as_stored(spec: ModelSpec, names: set[str]) -> ModelSpec:
    """Configs of heads often omit biases and norms; the tensors show which there are."""
    at = "model.layers.0."
    layers = []
    for layer in spec.layers:
        assert isinstance(layer.mlp, DenseSpec)
        mlp = replace(layer.mlp, has_bias=at + "mlp.gate_proj.bias" in names)
        layer = with_attention(
            replace(layer, mlp=mlp),
            has_qkv_bias=at + "self_attn.q_proj.bias" in names,
            has_o_bias=at + "self_attn.o_proj.bias" in names,
            has_qk_norm=at + "self_attn.q_norm.weight" in names,
        )
        layers.append(layer)
    return replace(spec, layers=tuple(layers))


def renamed(source: WeightSource) -> RenamedWeights:
    """A head's tensors with the prefix `model.`, and `layers.0` for `midlayer`."""
    plain = {name: "." + name.removeprefix("model.") for name in source.names()}
    stored = {"model" + x.replace(".midlayer.", ".layers.0."): name for name, x in plain.items()}
    return RenamedWeights(source, stored)


def warn_of_vocabulary(title: str, name: str, head: ModelSpec, target: ModelSpec) -> None:
    if head.vocab_size != target.vocab_size:
        logger.warning(
            "the %s head %r was made for a vocabulary of %d tokens, the target has %d: it "
            "runs, but few of its drafts will be accepted",
            title,
            name,
            head.vocab_size,
            target.vocab_size,
        )


def check_embedding(name: str, num_rows: int, target: ModelSpec) -> None:
    if num_rows < target.vocab_size:
        raise CheckpointError(
            f"the EAGLE head {name!r} embeds {num_rows} tokens, the target has "
            f"{target.vocab_size}; it cannot read all of the target's tokens."
        )


def pick_embedding(
    read: Reader, name: str, vocab: VocabShards | None, target: Decoder
) -> Embedding:
    """The head's embedding, or the target's if the head has none or an equal one."""
    if vocab is None:
        return target.embedding
    own = Embedding(read.table(name), vocab)
    return target.embedding if own.is_same(target.embedding) else own


def draft_to_target_ids(title: str, name: str, read: Reader, vocab_size: int) -> Tensor | None:
    """The target's id of each draft id. The file holds the differences (d2t)."""
    if "model.d2t" not in read.source.names():
        return None
    offset_V = read.source.load("model.d2t").to(torch.int64).cpu()
    token_V = torch.arange(len(offset_V)) + offset_V
    low, high = int(token_V.min()), int(token_V.max())
    if low < 0 or high >= vocab_size:
        raise CheckpointError(
            f"the {title} head {name!r} drafts tokens {low} to {high} (d2t), the target has "
            f"{vocab_size}; the head belongs to another model."
        )
    num_distinct = len(token_V.unique())
    if num_distinct < len(token_V):
        raise CheckpointError(
            f"the {title} head {name!r} has {len(token_V)} tokens, but d2t gives them only "
            f"{num_distinct} of the target's; it must hold offsets: target id - draft id."
        )
    return token_V.to(read.formats.device)


def check_draft_model(
    name: str, spec: ModelSpec, target: ModelSpec, *, may_differ: bool = False
) -> None:
    """Refuses whole models that cannot draft for this target. `may_differ`: the vocabularies."""
    if spec.recurrent is not None:
        raise CheckpointError(
            f"the draft model {name!r} ({spec.family}) has recurrent layers, which a draft model "
            "cannot have: its first pass computes a position again, and a recurrent state cannot "
            'go back. Use "mtp", "ngram" or another model.'
        )
    if spec.vocab_size != target.vocab_size and not may_differ:
        raise CheckpointError(
            f"the draft model {name!r} has a vocabulary of {spec.vocab_size} tokens, the target "
            f"has {target.vocab_size}; a draft model needs the target's vocabulary. Give "
            '"use_heterogeneous_vocab": true if their tokens are partly the same.'
        )


def for_norm(x_TD: Tensor) -> Tensor:
    """The CPU's norm kernels need contiguous fp32 rows; CUDA's convert what they read."""
    return x_TD if x_TD.is_cuda else x_TD.float().contiguous()
