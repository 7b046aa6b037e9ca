"""Tensors by their Hugging Face names: the protocol, and views that rename, cut or invent them.

The files themselves are opened by models/weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels.fp8.reference import Fp8Weight
from paceline.models.sharding import Cut

# A quantised matrix as stored: the type of GGUF blocks and rows of their bytes, or e4m3 and scales.
Stored = tuple[str, Tensor] | Fp8Weight
NamedShape = tuple[str, tuple[int, ...]]  # a tensor's name and its shape
NamedShapes = Iterable[NamedShape]


class WeightSource(Protocol):
    """`load` gives a tensor as it is stored; quantised ones come out as float32.

    With a `cut` only its bytes are read, if the file's layout allows that.
    """

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def load(self, name: str, cut: Cut | None = None) -> Tensor: ...

    def blocks(self, name: str, cut: Cut | None = None) -> Stored | None:
        """A quantised matrix as stored.

        None for plain numbers, and for a cut through the middle of quantisation blocks.
        """


@dataclass(frozen=True, slots=True)
class RenamedWeights:
    """Some of a checkpoint's tensors, under other names."""

    source: WeightSource
    stored: Mapping[str, str]  # new name -> name in the checkpoint

    def names(self) -> set[str]:
        return set(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(self.stored[name])

    def load(self, name: str, cut: Cut | None = None) -> Tensor:
        return self.source.load(self.stored[name], cut)

    def blocks(self, name: str, cut: Cut | None = None) -> Stored | None:
        return self.source.blocks(self.stored[name], cut)


@dataclass(slots=True)
class SlicedWeights:
    """One rank's slices: nothing else is read.

    `first_only` names tensors that only the first rank has, such as biases added after a sum over
    ranks.
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

    def blocks(self, name: str, cut: Cut | None = None) -> Stored | None:
        return self.source.blocks(name, self._cut(name, cut))

    def _cut(self, name: str, asked: Cut | None) -> Cut | None:
        own = self.cuts.get(name)
        assert asked is None or own is None, f"{name} is cut already"
        return own or asked


class DummyWeights:
    """Random weights of the right shapes, for --load-format dummy: no file is read.

    A large `router_bias` decides the choice of experts alone, as with random weights in other
    engines: all rows choose the same, so that benchmarks measure the same work. With 0 they spread.
    """

    def __init__(
        self, shapes: NamedShapes, seed: int, device: torch.device, router_bias: float = 10.0
    ) -> None:
        self._shapes = dict(shapes)
        self._seed = seed
        self._device = device
        self._router_bias = router_bias

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def load(self, name: str, cut: Cut | None = None) -> Tensor:
        """The whole tensor is made and then cut, so that all ranks hold parts of one model."""
        whole = self._make(name)
        return whole if cut is None else cut.of(whole).clone()

    def blocks(self, name: str, cut: Cut | None = None) -> Stored | None:
        return None

    def _make(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        # Seeded by name, so that a tensor does not depend on the order of loading.
        seed = self._seed * 1_000_003 + sum(ord(c) * 31**i % 2**31 for i, c in enumerate(name))
        generator = torch.Generator(self._device).manual_seed(seed % 2**63)
        scale = self._router_bias if name.endswith("correction_bias") else 0.02
        return torch.randn(shape, generator=generator, device=self._device).mul_(scale)
