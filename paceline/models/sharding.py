"""How a tensor is divided over ranks: which ranges of an axis one rank reads.

Numbers and slices only; which tensor is cut how is decided by models/blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.layers.vocab import VocabShards
from paceline.parallel.collectives import Group


@dataclass(frozen=True, slots=True)
class Cut:
    """Ranges of one axis of a tensor, joined in order."""

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
        """One index per range."""
        before = (slice(None),) * self.dim
        return [(*before, slice(a, b)) for a, b in self.ranges]

    def joined(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


Cuts = dict[str, Cut]


def even_cut(dim: int, size: int, group: Group) -> Cut:
    """This rank's share of an axis whose size the group divides."""
    share = size // group.size
    return Cut(dim, ((group.rank * share, (group.rank + 1) * share),))


def vocab_rows(vocab: VocabShards) -> Cut:
    return Cut(0, ((vocab.start, vocab.stop),))


def share_of(count: int, what: str, size: int) -> int:
    """What one of `size` ranks has of `count`; refused if it does not divide."""
    if count % size:
        raise ConfigError(
            f"{count} {what} do not divide over tensor_parallel_size {size}; use "
            f"{either(divisors(count))}."
        )
    return count // size


def divisors(count: int) -> list[int]:
    return [x for x in range(1, count + 1) if count % x == 0]


def either(sizes: list[int]) -> str:
    """ "1, 2 or 4", at most six of them."""
    shown = [str(x) for x in sizes[:6]]
    if len(shown) < 2:
        return shown[0]
    return f"{', '.join(shown[:-1])} or {shown[-1]}"
