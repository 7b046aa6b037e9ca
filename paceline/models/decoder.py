"""The common decoder body: Llama and its relatives, on one device, over a varlen batch.

Computes; never loads (models/loading) and never looks at requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.activation import silu_and_mul
from paceline.kernels.attention import AttentionBatch, paged_attention
from paceline.kernels.norm import add_rms_norm, rms_norm
from paceline.kernels.rope import rotate_, write_kv
from paceline.layers.linear import Linear
from paceline.models.spec import ModelSpec
from paceline.state.pages import LayerPages


@dataclass(slots=True)
class DecoderLayer:
    """Weights of one block. q and k rows hold interleaved rotary pairs."""

    input_norm: Tensor
    qkv: Linear
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(slots=True)
class ForwardInputs:
    """What a forward needs of the step: one entry per token of the varlen batch."""

    token_T: Tensor  # int64 ids, all valid
    position_T: Tensor  # int64, clamped to the rotary table
    page_slot_T: Tensor  # int64 flat slot to write KV to; -1 writes nothing
    attention: AttentionBatch


@dataclass(slots=True)
class Decoder:
    """A whole causal LM: tokens in, final hidden states out; logits on request."""

    spec: ModelSpec
    embedding_VD: Tensor
    layers: list[DecoderLayer]
    final_norm: Tensor
    lm_head: Linear
    rotation: Tensor  # complex64 [max_model_len, head_size / 2]

    def forward(self, inputs: ForwardInputs, pages: list[LayerPages]) -> Tensor:
        """Hidden states after the final norm, [T, D]; KV of every token lands in its page slot."""
        eps = self.spec.norm_eps
        residual_TD = self.embedding_VD.index_select(0, inputs.token_T).float()
        rotation_TH = self.rotation.index_select(0, inputs.position_T)
        delta_TD: Tensor | None = None
        for layer, layer_pages in zip(self.layers, pages, strict=True):
            if delta_TD is None:
                x_TD = rms_norm(residual_TD, layer.input_norm, eps)
            else:
                x_TD = add_rms_norm(residual_TD, delta_TD, layer.input_norm, eps)
            delta_TD = self._attention(layer, x_TD, rotation_TH, inputs, layer_pages)
            x_TD = add_rms_norm(residual_TD, delta_TD, layer.post_norm, eps)
            delta_TD = layer.down(silu_and_mul(layer.gate_up(x_TD)))
        assert delta_TD is not None
        return add_rms_norm(residual_TD, delta_TD, self.final_norm, eps)

    def _attention(
        self,
        layer: DecoderLayer,
        x_TD: Tensor,
        rotation_TH: Tensor,
        inputs: ForwardInputs,
        pages: LayerPages,
    ) -> Tensor:
        spec = self.spec
        num_q, num_kv = spec.num_heads, spec.num_kv_heads
        qkv_TNH = layer.qkv(x_TD).view(-1, num_q + 2 * num_kv, spec.head_size)
        qk_TNH = qkv_TNH[:, : num_q + num_kv]
        if layer.q_norm is not None and layer.k_norm is not None:
            query = rms_norm(qkv_TNH[:, :num_q], layer.q_norm, spec.norm_eps)
            key = rms_norm(qkv_TNH[:, num_q : num_q + num_kv], layer.k_norm, spec.norm_eps)
            qk_TNH = torch.cat((query, key), dim=1)
        rotate_(qk_TNH, rotation_TH)
        write_kv(
            pages.key_NSH,
            pages.value_NSH,
            qk_TNH[:, num_q:],
            qkv_TNH[:, num_q + num_kv :],
            inputs.page_slot_T,
        )
        out_TD = paged_attention(
            qk_TNH[:, :num_q],
            pages.key_NSH,
            pages.value_NSH,
            inputs.attention,
            spec.head_size**-0.5,
        )
        return layer.o(out_TD)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """fp32 logits [N, V] of the rows that sample."""
        return self.lm_head(hidden_ND).float()

    @property
    def nbytes(self) -> int:
        linears = [x for y in self.layers for x in (y.qkv, y.o, y.gate_up, y.down)]
        return self.embedding_VD.nbytes + sum(x.nbytes for x in [*linears, self.lm_head])
