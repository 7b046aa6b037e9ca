"""The decoder of all families: layers over a residual stream, for a varlen batch.

Computes one rank's part; models/loading builds it. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.kernels.attention.reference import AttentionBatch
from paceline.kernels.table import Kernels
from paceline.layers.attention import Attention, ForwardInputs, GroupedAttention
from paceline.layers.delta_net import GatedDeltaNet
from paceline.layers.linear import Linear
from paceline.layers.mlp import GatedMlp, Mlp
from paceline.layers.vocab import Embedding, VocabShards
from paceline.models.spec import ModelSpec
from paceline.state.recurrent import LayerStorage


@dataclass(slots=True)
class DecoderLayer:
    """Attention and MLP, each behind its norm."""

    input_norm: Tensor | None  # None: the layer reads its input without a norm
    attention: Attention
    post_norm: Tensor
    mlp: Mlp


class DenseLayer(NamedTuple):
    """A layer of four products, as its parts: the kind that can be fused."""

    input_norm: Tensor | None
    attention: GroupedAttention | GatedDeltaNet
    qkv: Linear  # the product in front of `attention.mix`
    o: Linear  # and the one behind it
    post_norm: Tensor
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, layer: DecoderLayer) -> DenseLayer | None:
        attention, mlp = layer.attention, layer.mlp
        if not isinstance(mlp, GatedMlp):
            return None
        if isinstance(attention, GroupedAttention):
            ends = attention.qkv, attention.o
        elif isinstance(attention, GatedDeltaNet):
            ends = attention.input, attention.output
        else:
            return None
        inner = (mlp.gate_up, mlp.down)
        return cls(layer.input_norm, attention, *ends, layer.post_norm, *inner)

    @property
    def plain(self) -> GroupedAttention | None:
        """Attention without gates: its heads are all that the first product gives."""
        attention = self.attention
        if isinstance(attention, GroupedAttention) and attention.gate is None:
            return attention
        return None


@dataclass(frozen=True, slots=True)
class Taps:
    """Copies of the residual stream for a draft head: id k is the stream after k layers."""

    ids: tuple[int, ...]
    out_TD: Tensor  # [T, len(ids) * D]: the copies side by side in the order of `ids`

    def take(self, num_layers: int, residual_TD: Tensor) -> None:
        """Copy the stream after `num_layers` layers, if it is a tap. `ids` are fixed before a CUDA
        graph is captured."""
        if num_layers in self.ids:
            width = residual_TD.shape[1]
            at = self.ids.index(num_layers) * width
            self.out_TD[:, at : at + width].copy_(residual_TD)


class Stream(NamedTuple):
    """The residual stream before the last MLP's output is added, and that output. Of all entries,
    or only of `ForwardInputs.wanted`."""

    residual_TD: Tensor
    delta_TD: Tensor


class LayerPass(NamedTuple):
    """The input of all layers of a stack."""

    residual_TD: Tensor
    rotation_TH: Tensor  # complex64: the rotations of the step's positions
    inputs: ForwardInputs
    pages: Sequence[LayerStorage]
    unnormed_TD: Tensor | None = None
    taps: Taps | None = None


class FusedLayers(Protocol):
    """All layers of a stack in one call. On the CPU it gives the same bits as `_run_layers`."""

    @property
    def computes_all(self) -> bool:
        """It knows nothing of wanted entries."""

    def __call__(self, given: LayerPass) -> Stream: ...


@dataclass(slots=True, kw_only=True)
class LayerStack:
    """Decoder layers over a residual stream, of a causal LM or of a draft head."""

    spec: ModelSpec
    layers: list[DecoderLayer]
    rotation: Tensor  # complex64 [max_model_len, head_size / 2]
    kernels: Kernels
    fused: FusedLayers | None = None  # replaces `_run_layers` if there is one

    def run(
        self,
        residual_TD: Tensor,
        inputs: ForwardInputs,
        pages: Sequence[LayerStorage],
        unnormed_TD: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Stream:
        """`residual_TD` is updated in place, unless the last layer computes only wanted entries.

        `unnormed_TD` is the input of a first layer without a norm, in the type of activations: the
        residual, or for EAGLE-3 another tensor. `taps` get the stream between layers; the caller
        copies the stream before the first and after the last layer.
        """
        self._prepare(inputs.attention, len(residual_TD))
        if inputs.wanted is not None:
            self._prepare(inputs.wanted.attention, len(inputs.wanted.entry_N))
        rotation_TH = self.rotation.index_select(0, inputs.position_T)
        run = self.fused or self._run_layers
        if inputs.wanted is not None and self.fused is not None and self.fused.computes_all:
            run = self._run_layers
        return run(LayerPass(residual_TD, rotation_TH, inputs, pages, unnormed_TD, taps))

    def _prepare(self, batch: AttentionBatch, num_entries: int) -> None:
        batch.window = self.spec.sliding_window
        if self.kernels.prepare_attention is not None and self.spec.attention.latent_size is None:
            self.kernels.prepare_attention(batch, num_entries, self.spec.num_kv_heads)

    def _run_layers(self, given: LayerPass) -> Stream:
        residual_TD, rotation_TH, inputs, pages, x_TD, taps = given
        eps = self.spec.norm_eps
        rms_norm, add_rms_norm = self.kernels.rms_norm, self.kernels.add_rms_norm
        delta_TD: Tensor | None = None
        for i, (layer, kv) in enumerate(zip(self.layers, pages, strict=True)):
            inputs.check_wanted()
            if delta_TD is not None:
                assert layer.input_norm is not None, "only the first layer may lack a norm"
                x_TD = add_rms_norm(residual_TD, delta_TD, layer.input_norm, eps)
                if taps is not None:
                    taps.take(i, residual_TD)
            elif layer.input_norm is not None:
                x_TD = rms_norm(residual_TD, layer.input_norm, eps)
            assert x_TD is not None
            wanted = inputs.wanted if i + 1 == len(self.layers) else None
            if wanted is not None and not len(wanted.entry_N):
                layer.attention.store(x_TD, rotation_TH, inputs, kv)
                return Stream(residual_TD[:0], residual_TD[:0])
            delta_TD = layer.attention(x_TD, rotation_TH, inputs, kv, wanted)
            if wanted is not None:
                residual_TD = residual_TD.index_select(0, wanted.entry_N)
            x_TD = add_rms_norm(residual_TD, delta_TD, layer.post_norm, eps)
            delta_TD = layer.mlp(x_TD, inputs)
        assert delta_TD is not None
        return Stream(residual_TD, delta_TD)


@dataclass(slots=True, kw_only=True)
class Decoder(LayerStack):
    """A whole causal LM: tokens in, final hidden states out; `logits` is a separate call."""

    embedding: Embedding
    final_norm: Tensor
    lm_head: Linear
    vocab: VocabShards  # the part that this rank's lm_head covers

    def forward(self, inputs: ForwardInputs, pages: Sequence[LayerStorage]) -> Tensor:
        """Hidden states after the final norm, of all entries or of `inputs.wanted`. Writes the KV
        of every token to its page slot."""
        return self._forward(inputs, pages, None)

    def forward_with_features(
        self, inputs: ForwardInputs, pages: Sequence[LayerStorage], tap_ids: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Hidden states, and the features for a draft head: the hidden states themselves, or with
        `tap_ids` the taps of all entries, side by side.

        Tap k is the residual stream after k layers, before any norm.
        """
        if not tap_ids:
            hidden_TD = self._forward(inputs, pages, None)
            return hidden_TD, hidden_TD
        shape = (len(inputs.token_T), len(tap_ids) * self.spec.hidden_size)
        taps = Taps(tap_ids, self.final_norm.new_empty(shape))
        return self._forward(inputs, pages, taps), taps.out_TD

    def _forward(
        self, inputs: ForwardInputs, pages: Sequence[LayerStorage], taps: Taps | None
    ) -> Tensor:
        residual_TD = self.embedding(inputs.token_T).float()
        if taps is not None:
            taps.take(0, residual_TD)
        stream = self.run(residual_TD, inputs, pages, taps=taps)
        eps, norm_D = self.spec.norm_eps, self.final_norm
        hidden_TD = self.kernels.add_rms_norm(*stream, norm_D, eps)
        if taps is not None:
            assert inputs.wanted is None or len(self.layers) not in taps.ids
            taps.take(len(self.layers), stream.residual_TD)
        return hidden_TD

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """fp32 logits [N, V]; V is this rank's part of the vocabulary."""
        return self.lm_head(hidden_ND).float()

    @property
    def nbytes(self) -> int:
        layers = sum(x.attention.nbytes + x.mlp.nbytes for x in self.layers)
        return layers + self.embedding.nbytes + self.lm_head.nbytes
