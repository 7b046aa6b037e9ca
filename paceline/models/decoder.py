"""The common decoder body: Llama and its relatives, one rank of it, over a varlen batch.

Computes; never loads (models/loading) and never looks at requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.kernels.attention import AttentionBatch
from paceline.kernels.dispatch import Kernels
from paceline.kernels.rope import HeadNorms
from paceline.layers.attention import Attention, ForwardInputs, GroupedAttention
from paceline.layers.linear import Linear
from paceline.layers.mlp import GatedMlp, Mlp
from paceline.layers.vocab import Embedding, VocabShards
from paceline.models.spec import ModelSpec
from paceline.state.pages import LayerPages


@dataclass(slots=True)
class DecoderLayer:
    """One block: attention and MLP, each behind its norm."""

    input_norm: Tensor | None  # None: the layer reads the residual stream as it is
    attention: Attention
    post_norm: Tensor
    mlp: Mlp


class DenseLayer(NamedTuple):
    """The parts of a block that has grouped attention and one gated MLP: what can be fused."""

    input_norm: Tensor | None
    qkv: Linear
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    head_norms: HeadNorms | None = None

    @classmethod
    def of(cls, layer: DecoderLayer) -> DenseLayer | None:
        attention, mlp = layer.attention, layer.mlp
        if not isinstance(attention, GroupedAttention) or not isinstance(mlp, GatedMlp):
            return None
        first, second = (attention.qkv, attention.o), (mlp.gate_up, mlp.down)
        return cls(layer.input_norm, *first, layer.post_norm, *second, attention.head_norms)


@dataclass(frozen=True, slots=True)
class Taps:
    """Copies of the residual stream after so many layers, side by side in the order of `ids`."""

    ids: tuple[int, ...]
    out_TD: Tensor  # [T, len(ids) * D]

    def take(self, num_layers: int, residual_TD: Tensor) -> None:
        """Copies the stream if somebody wants it here. `ids` are known before any capture."""
        if num_layers in self.ids:
            width = residual_TD.shape[1]
            at = self.ids.index(num_layers) * width
            self.out_TD[:, at : at + width].copy_(residual_TD)


class Stream(NamedTuple):
    """The residual stream, and what the last layer adds to it: of all entries, or of those that
    `ForwardInputs.wanted` names."""

    residual_TD: Tensor
    delta_TD: Tensor


class FusedLayers(Protocol):
    """All layers of a stack as one call: `LayerStack._run_layers`, on the CPU to the bit."""

    def __call__(
        self,
        residual_TD: Tensor,
        rotation_TH: Tensor,
        inputs: ForwardInputs,
        pages: list[LayerPages],
        unnormed_TD: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Stream: ...


@dataclass(slots=True, kw_only=True)
class LayerStack:
    """Decoder layers over a residual stream: what a causal LM and a draft head have in common."""

    spec: ModelSpec
    layers: list[DecoderLayer]
    rotation: Tensor  # complex64 [max_model_len, head_size / 2]
    kernels: Kernels
    fused: FusedLayers | None = None  # the loop of `_run_layers` in one call, where there is one

    def run(
        self,
        residual_TD: Tensor,
        inputs: ForwardInputs,
        pages: list[LayerPages],
        unnormed_TD: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Stream:
        """The residual is updated in place, until a last layer leaves entries out.

        `unnormed_TD` is what a first layer without a norm reads, in the type of activations: the
        residual, or what stands in its place (EAGLE-3). `taps` get the stream between layers; its
        two ends are the caller's.
        """
        self._prepare(inputs.attention, len(residual_TD))
        if inputs.wanted is not None:
            self._prepare(inputs.wanted.attention, len(inputs.wanted.entry_N))
        rotation_TH = self.rotation.index_select(0, inputs.position_T)
        if self.fused is not None:
            return self.fused(residual_TD, rotation_TH, inputs, pages, unnormed_TD, taps)
        return self._run_layers(residual_TD, rotation_TH, inputs, pages, unnormed_TD, taps)

    def _prepare(self, batch: AttentionBatch, num_entries: int) -> None:
        batch.window = self.spec.sliding_window
        if self.kernels.prepare_attention is not None and self.spec.mla is None:
            self.kernels.prepare_attention(batch, num_entries, self.spec.num_kv_heads)

    def _run_layers(
        self,
        residual_TD: Tensor,
        rotation_TH: Tensor,
        inputs: ForwardInputs,
        pages: list[LayerPages],
        x_TD: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Stream:
        eps = self.spec.norm_eps
        rms_norm, add_rms_norm = self.kernels.rms_norm, self.kernels.add_rms_norm
        delta_TD: Tensor | None = None
        for i, (layer, kv) in enumerate(zip(self.layers, pages, strict=True)):
            if delta_TD is not None:
                assert layer.input_norm is not None, "only a first layer goes without a norm"
                x_TD = add_rms_norm(residual_TD, delta_TD, layer.input_norm, eps)
                if taps is not None:
                    taps.take(i, residual_TD)
            elif layer.input_norm is not None:
                x_TD = rms_norm(residual_TD, layer.input_norm, eps)
            assert x_TD is not None
            wanted = inputs.wanted if i + 1 == len(self.layers) else None
            delta_TD = layer.attention(x_TD, rotation_TH, inputs, kv, wanted)
            if wanted is not None:
                residual_TD = residual_TD.index_select(0, wanted.entry_N)
            x_TD = add_rms_norm(residual_TD, delta_TD, layer.post_norm, eps)
            delta_TD = layer.mlp(x_TD, inputs)
        assert delta_TD is not None
        return Stream(residual_TD, delta_TD)

    @property
    def layer_bytes(self) -> int:
        return sum(x.attention.nbytes + x.mlp.nbytes for x in self.layers)


@dataclass(slots=True, kw_only=True)
class Decoder(LayerStack):
    """A whole causal LM: tokens in, final hidden states out; logits on request."""

    embedding: Embedding
    final_norm: Tensor
    lm_head: Linear
    vocab: VocabShards  # what the lm_head has of it

    def forward(self, inputs: ForwardInputs, pages: list[LayerPages]) -> Tensor:
        """Hidden states after the final norm, of `inputs.wanted` or [T, D]; KV of every token lands
        in its page slot."""
        return self._forward(inputs, pages, None)

    def forward_with_features(
        self, inputs: ForwardInputs, pages: list[LayerPages], tap_ids: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Hidden states, and what a draft head reads of them: themselves, or the taps it names,
        which are of all entries.

        Tap k is the residual stream after k layers, before any norm; taps lie side by side.
        """
        if not tap_ids:
            hidden_TD = self._forward(inputs, pages, None)
            return hidden_TD, hidden_TD
        shape = (len(inputs.token_T), len(tap_ids) * self.spec.hidden_size)
        taps = Taps(tap_ids, self.final_norm.new_empty(shape))
        return self._forward(inputs, pages, taps), taps.out_TD

    def _forward(self, inputs: ForwardInputs, pages: list[LayerPages], taps: Taps | None) -> Tensor:
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
        """fp32 logits [N, V] of the rows that sample, V this rank's part of the vocabulary."""
        return self.lm_head(hidden_ND).float()

    @property
    def nbytes(self) -> int:
        return self.layer_bytes + self.embedding.nbytes + self.lm_head.nbytes
