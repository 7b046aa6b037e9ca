"""Grouped-query attention of Llama and its relatives: q, k, v and o projections."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.errors import ConfigError
from paceline.kernels.elementwise.reference import HeadNorms
from paceline.kernels.table import Kernels
from paceline.layers.attention import GroupedAttention
from paceline.layers.rope import interleave_pairs
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
    input_size: int = 0  # what q, k and v read; 0: hidden_size

    latent_size = None

    @property
    def rope_size(self) -> int:
        return self.head_size

    @property
    def num_parameters(self) -> int:
        return self.hidden_size * self.head_size * (2 * self.num_heads + 2 * self.num_kv_heads)

    def shapes(self, at: str, names: set[str] | None) -> list[NamedShape]:
        at += "self_attn."
        width = self.input_size or self.hidden_size
        q_rows, kv_rows = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        shapes: list[NamedShape] = []
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            shapes.append((f"{at}{name}_proj.weight", (rows, width)))
            if self.has_qkv_bias:
                shapes.append((f"{at}{name}_proj.bias", (rows,)))
        shapes.append((at + "o_proj.weight", (self.hidden_size, q_rows)))
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
        for name, rows in (("q", heads), ("k", kv), ("v", kv)):
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
            norms = HeadNorms(interleave_pairs(query, 1), interleave_pairs(key, 1), self.norm_eps)
        projections = [f"{at}{x}_proj" for x in "qkv"]
        return GroupedAttention(
            qkv=read.linear(projections, [self.num_heads, self.num_kv_heads, 0]),
            o=read.reduced(at + "o_proj"),
            kernels=kernels,
            scale=self.head_size**-0.5,
            head_norms=norms,
        )
