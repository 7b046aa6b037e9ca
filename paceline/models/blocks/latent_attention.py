"""Multi-head latent attention (DeepSeek): tensors, and the KV projection absorbed at load time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.kernels.mla.reference import LatentNorm
from paceline.kernels.table import Kernels, pick_latent_kernels
from paceline.layers.mla import LatentAttention, QueryRank
from paceline.layers.rope import interleave_pairs
from paceline.models.kv_scales import read_kv_scales
from paceline.models.matrix import Order
from paceline.models.reader import Reader
from paceline.models.sharding import Cuts, even_cut, share_of
from paceline.models.weight_source import NamedShape
from paceline.parallel.groups import Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """The cache holds one latent vector and one rotary key per token: one KV head."""

    hidden_size: int
    num_heads: int
    query_rank: int | None  # None: queries are projected in one step
    latent_size: int
    nope_size: int  # the part of a head's query and key without positions
    rope_size: int
    value_size: int
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    norm_eps: float = 1e-6  # of both narrow vectors; other norms may have another one
    is_interleaved: bool = True  # rotary pairs are neighbours in the checkpoint
    softmax_factor: float = 1.0  # DeepSeek's yarn scales the softmax

    num_kv_heads = 1
    has_pages = True
    sizes = None

    @property
    def head_size(self) -> int:
        """Numbers of a token in the cache."""
        return self.latent_size + self.rope_size

    @property
    def query_size(self) -> int:
        return self.nope_size + self.rope_size

    @property
    def num_parameters(self) -> int:
        width, heads = self.hidden_size, self.num_heads
        query = width * heads * self.query_size
        if self.query_rank is not None:
            query = self.query_rank * (width + heads * self.query_size)
        kv = width * self.head_size + heads * (self.nope_size + self.value_size) * self.latent_size
        return query + kv + heads * self.value_size * width

    def shapes(self, at: str, names: set[str] | None) -> list[NamedShape]:
        at += "self_attn."
        width, heads, rank = self.hidden_size, self.num_heads, self.query_rank
        matrices = [
            ("kv_a_proj_with_mqa", self.head_size, width, self.has_qkv_bias),
            ("kv_b_proj", heads * (self.nope_size + self.value_size), self.latent_size, False),
            ("o_proj", width, heads * self.value_size, self.has_o_bias),
        ]
        shapes: list[NamedShape] = [(at + "kv_a_layernorm.weight", (self.latent_size,))]
        if rank is None:
            matrices.append(("q_proj", heads * self.query_size, width, False))
        else:
            matrices.append(("q_a_proj", rank, width, self.has_qkv_bias))
            matrices.append(("q_b_proj", heads * self.query_size, rank, False))
            shapes.append((at + "q_a_layernorm.weight", (rank,)))
        for name, rows, columns, has_bias in matrices:
            shapes.append((f"{at}{name}.weight", (rows, columns)))
            if has_bias:
                shapes.append((f"{at}{name}.bias", (rows,)))
        return shapes

    def cuts(self, at: str, names: set[str], groups: Groups) -> Cuts:
        """Ranks share out the heads; latents, and so the cache, are whole on every rank."""
        tp, heads = groups.tp, self.num_heads
        if tp.size == 1:
            return {}
        at += "self_attn."
        queries = even_cut(0, heads * self.query_size, tp)
        return {
            at + "q_proj.weight": queries,
            at + "q_b_proj.weight": queries,
            at + "kv_b_proj.weight": even_cut(0, heads * (self.nope_size + self.value_size), tp),
            at + "o_proj.weight": even_cut(1, heads * self.value_size, tp),
        }

    def local(self, groups: Groups) -> LatentSpec:
        return replace(self, num_heads=share_of(self.num_heads, "attention heads", groups.tp.size))

    def load(self, read: Reader, at: str, kernels: Kernels) -> LatentAttention:
        at += "self_attn."
        heads, formats = self.num_heads, read.formats
        query: QueryRank | None = None
        first = at + "q_proj"
        first_rows: Order | None = self._query_rows
        if self.query_rank is not None:
            norm_Q = read.norm(at + "q_a_layernorm.weight")
            second = read.linear([at + "q_b_proj"], [self._query_rows])
            query = QueryRank(norm_Q, self.norm_eps, second)
            first, first_rows = at + "q_a_proj", None
        absorbed = read.tensor(at + "kv_b_proj.weight").to(formats.device, formats.compute)
        absorbed = absorbed.view(heads, self.nope_size + self.value_size, self.latent_size)
        key_NQL, value_NVL = absorbed.split((self.nope_size, self.value_size), dim=1)
        return LatentAttention(
            down=read.linear([first, at + "kv_a_proj_with_mqa"], [first_rows, self._kv_rows]),
            query=query,
            key_NQL=key_NQL.contiguous(),
            value_NLV=value_NVL.transpose(1, 2).contiguous(),
            norm=LatentNorm(read.norm(at + "kv_a_layernorm.weight"), self.norm_eps),
            o=read.reduced(at + "o_proj"),
            kernels=pick_latent_kernels(formats.device),
            scale=self.query_size**-0.5 * self.softmax_factor,
            kv_scales=read_kv_scales(read, at, 1, is_latent=True),
        )

    def _query_rows(self, rows: Tensor) -> Tensor:
        return self._paired(rows, self.num_heads)

    def _kv_rows(self, rows: Tensor) -> Tensor:
        return self._paired(rows, 1)

    def _paired(self, rows: Tensor, num_heads: int) -> Tensor:
        """Rotary pairs as neighbours, which the kernels need; some checkpoints store halves."""
        if self.is_interleaved:
            return rows
        by_head = rows.unflatten(0, (num_heads, -1))
        rope = by_head[:, -self.rope_size :].flatten(0, 1)
        paired = interleave_pairs(rope, num_heads).unflatten(0, (num_heads, -1))
        return torch.cat((by_head[:, : -self.rope_size], paired), dim=1).flatten(0, 1)
