"""One rank's part of a model: its sizes, and which slices of each tensor it reads.

Numbers and slices only; what is computed with them reads as on one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.layers.vocab import VocabShards
from paceline.models.spec import ModelSpec, MoeSpec
from paceline.parallel.collectives import Group
from paceline.parallel.groups import Groups

if TYPE_CHECKING:
    from paceline.models.loading import WeightSource


@dataclass(frozen=True, slots=True)
class Cut:
    """Ranges of one axis of a tensor, one after the other."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def of(self, x: Tensor) -> Tensor:
        return self.joined([x.narrow(self.dim, a, b - a) for a, b in self.ranges])

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])

    def slices(self) -> list[tuple[slice, ...]]:
        """What to index a tensor with, range by range."""
        before = (slice(None),) * self.dim
        return [(*before, slice(a, b)) for a, b in self.ranges]

    def joined(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


Cuts = dict[str, Cut]


def even_cut(dim: int, size: int, group: Group) -> Cut:
    """This rank's share of an axis that divides."""
    share = size // group.size
    return Cut(dim, ((group.rank * share, (group.rank + 1) * share),))


def kv_rows(spec: ModelSpec, group: Group) -> Cut:
    """Rows of this rank's KV heads; where there are fewer than ranks, neighbours hold the same."""
    count = max(1, spec.num_kv_heads // group.size)
    first = group.rank * spec.num_kv_heads // group.size
    return Cut(0, ((first * spec.head_size, (first + count) * spec.head_size),))


def vocab_rows(vocab: VocabShards) -> Cut:
    return Cut(0, ((vocab.start, vocab.stop),))


@dataclass(slots=True)
class SlicedSource:
    """A `WeightSource` of one rank's slices: nothing else is read.

    `first_only` names tensors that are added once for all ranks, by the first of them.
    """

    source: WeightSource
    cuts: Mapping[str, Cut]
    first_only: frozenset[str] = frozenset()
    is_first: bool = True
    _names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        left_out = frozenset() if self.is_first else self.first_only
        self._names = self.source.names() - left_out

    def names(self) -> set[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        whole, cut = self.source.shape(name), self.cuts.get(name)
        return whole if cut is None else cut.shape(whole)

    def load(self, name: str, cut: Cut | None = None) -> Tensor:
        return self.source.load(name, self._cut(name, cut))

    def blocks(self, name: str, cut: Cut | None = None) -> tuple[str, Tensor] | None:
        return self.source.blocks(name, self._cut(name, cut))

    def _cut(self, name: str, asked: Cut | None) -> Cut | None:
        own = self.cuts.get(name)
        assert asked is None or own is None, f"{name} is cut already"
        return own or asked


def local_spec(spec: ModelSpec, groups: Groups) -> ModelSpec:
    """The sizes of one rank's part. The vocabulary stays whole: see layers/vocab."""
    size = groups.tp.size
    if size == 1:
        return spec
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    num_heads = _share(heads, "attention heads", size)
    if kv_heads % size and size % kv_heads:
        sizes = [x for x in _divisors(heads) if not kv_heads % x or not x % kv_heads]
        raise ConfigError(
            f"{kv_heads} KV heads neither divide over tensor_parallel_size {size} nor divide it; "
            f"use {_listed(sizes)}."
        )
    VocabShards(spec.vocab_size, groups.tp)  # refuses what does not go round
    inner, moe = spec.intermediate_size, spec.moe
    if any(spec.experts_of(i) is None for i in range(spec.num_layers)):
        inner = _share(inner, "inner values of an MLP (intermediate_size)", size)
    return replace(
        spec,
        num_heads=num_heads,
        num_kv_heads=max(1, kv_heads // size),
        intermediate_size=inner,
        moe=None if moe is None else _local_experts(moe, groups),
    )


def _local_experts(moe: MoeSpec, groups: Groups) -> MoeSpec:
    inner, shared, size = moe.inner_size, moe.shared_inner_size, groups.tp.size
    if groups.exchange is None:
        inner = _share(inner, "inner values of an expert (moe_intermediate_size)", size)
    if shared:
        shared = _share(shared, "inner values of the shared experts", size)
    return replace(moe, inner_size=inner, shared_inner_size=shared)


def _share(count: int, what: str, size: int) -> int:
    if count % size:
        raise ConfigError(
            f"{count} {what} do not divide over tensor_parallel_size {size}; use "
            f"{_listed(_divisors(count))}."
        )
    return count // size


def _divisors(count: int) -> list[int]:
    return [x for x in range(1, count + 1) if count % x == 0]


def _listed(sizes: list[int]) -> str:
    """Few of them: nobody has more ranks."""
    shown = [str(x) for x in sizes[:6]]
    if len(shown) < 2:
        return shown[0]
    return f"{', '.join(shown[:-1])} or {shown[-1]}"
