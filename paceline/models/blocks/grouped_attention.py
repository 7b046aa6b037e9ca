"""Grouped-query attention of Llama and its relatives: q, k, v and o projections."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from paceline.errors import ConfigError
from paceline.kernels.elementwise.reference import HeadNorms
from paceline.kernels.table import Kernels, sigmoid_mul
from paceline.layers.attention import GroupedAttention, HeadGate
from paceline.layers.rope import interleave_pairs
from paceline.models.kv_scales import read_kv_scales
from paceline.models.matrix import Order
from paceline.models.reader import Reader
from paceline.models.sharding import Cut, Cuts, divisors, either, even_cut, share_of
from paceline.models.weight_source import NamedShape
from paceline.parallel.groups import Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSpec:
    """Query heads in groups that share a KV head."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_qk_norm: bool = False  # each head of q and k is normed before its rotation
    has_gate: bool = False  # q_proj gives each head a query and a gate of its output
    rotated: int = 0  # numbers at the beginning of a head that are rotated; 0: all
    input_size: int = 0  # what q, k and v read; 0: hidden_size

    latent_size = None
    has_pages = True
    sizes = None

    @property
    def rope_size(self) -> int:
        return self.rotated or self.head_size

    @property
    def _q_rows(self) -> int:
        return self.num_heads * self.head_size * (2 if self.has_gate else 1)

    @property
    def num_parameters(self) -> int:
        heads = self.num_heads + 2 * self.num_kv_heads
        return self.hidden_size * (self._q_rows + heads * self.head_size)

    def shapes(self, at: str, names: set[str] | None) -> list[NamedShape]:
        at += "self_attn."
        width = self.input_size or self.hidden_size
        heads, kv_rows = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        shapes: list[NamedShape] = []
        for name, rows in (("q", self._q_rows), ("k", kv_rows), ("v", kv_rows)):
            shapes.append((f"{at}{name}_proj.weight", (rows, width)))
            if self.has_qkv_bias:
                shapes.append((f"{at}{name}_proj.bias", (rows,)))
        shapes.append((at + "o_proj.weight", (self.hidden_size, heads)))
        if self.has_o_bias:
            shapes.append((at + "o_proj.bias", (self.hidden_size,)))
        if self.has_qk_norm:
            shapes += [(f"{at}{x}_norm.weight", (self.head_size,)) for x in "qk"]
        return shapes

    def cuts(self, at: str, names: set[str], groups: Groups) -> Cuts:
        """Ranks share out the heads. With fewer KV heads than ranks, neighbours hold the same."""
        tp = groups.tp
        if tp.size == 1:
            return {}
        heads = even_cut(0, self.num_heads * self.head_size, tp)
        count = max(1, self.num_kv_heads // tp.size)
        first = tp.rank * self.num_kv_heads // tp.size
        kv = Cut(0, ((first * self.head_size, (first + count) * self.head_size),))
        cuts: Cuts = {f"{at}self_attn.o_proj.weight": replace(heads, dim=1)}
        queries = even_cut(0, self._q_rows, tp)
        for name, rows in (("q", queries), ("k", kv), ("v", kv)):
            cuts[f"{at}self_attn.{name}_proj.weight"] = rows
            cuts[f"{at}self_attn.{name}_proj.bias"] = rows
        return cuts

    def local(self, groups: Groups) -> GroupedSpec:
        size, kv_heads = groups.tp.size, self.num_kv_heads
        num_heads = share_of(self.num_heads, "attention heads", size)
        if kv_heads % size and size % kv_heads:
            sizes = [x for x in divisors(self.num_heads) if not kv_heads % x or not x % kv_heads]
            raise ConfigError(
                f"{kv_heads} KV heads neither divide over tensor_parallel_size {size} nor divide "
                f"it; use {either(sizes)}."
            )
        return replace(self, num_heads=num_heads, num_kv_heads=max(1, kv_heads // size))

    def load(self, read: Reader, at: str, kernels: Kernels) -> GroupedAttention:
        at += "self_attn."
        norms = None
        if self.has_qk_norm:
            query, key = (read.norm(f"{at}{x}_norm.weight") for x in "qk")
            norms = HeadNorms(self._paired(query, 1), self._paired(key, 1), self.norm_eps)
        names = [f"{at}{x}_proj" for x in "qkv"]
        orders: list[Order | None] = [self._queries, self._keys, None]
        gate = None
        if self.has_gate:
            # Behind q, k and v, which attention reads side by side.
            names, orders = [*names, at + "q_proj"], [*orders, self._gates]
            width = (self.num_heads + 2 * self.num_kv_heads) * self.head_size
            gate = HeadGate(width, read.formats.pick(sigmoid_mul))
        return GroupedAttention(
            qkv=read.linear(names, orders),
            o=read.reduced(at + "o_proj"),
            kernels=kernels,
            scale=self.head_size**-0.5,
            head_norms=norms,
            gate=gate,
            kv_scales=read_kv_scales(read, at, self.num_kv_heads, is_latent=False),
        )

    def _paired(self, rows: Tensor, num_heads: int) -> Tensor:
        return interleave_pairs(rows, num_heads, self.rope_size)

    def _queries(self, rows: Tensor) -> Tensor:
        return self._paired(self._part(rows, 0) if self.has_gate else rows, self.num_heads)

    def _keys(self, rows: Tensor) -> Tensor:
        return self._paired(rows, self.num_kv_heads)

    def _gates(self, rows: Tensor) -> Tensor:
        return self._part(rows, 1)

    def _part(self, rows: Tensor, index: int) -> Tensor:
        """Of each head's rows, the query's (0) or the gate's (1)."""
        by_head: Tensor = rows.unflatten(0, (self.num_heads, 2, -1))
        return by_head[:, index].flatten(0, 1)
