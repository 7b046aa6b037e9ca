"""Checkpoints in fp8 with one scale per block of a matrix, dequantised when they are read.

DeepSeek's format: `x.weight` in float8_e4m3fn, and `x.weight_scale_inv` with one scale for each
block of `size` rows and columns. Nothing is computed in fp8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.models.sharding import Cut

if TYPE_CHECKING:
    from paceline.models.weights import Weights

_SCALE = "_scale_inv"


@dataclass(slots=True)
class BlockFp8Weights:
    """Dequantises tensors that have scales; others are passed through."""

    source: Weights
    size: tuple[int, int]

    def names(self) -> set[str]:
        return {n for n in self.source.names() if not n.endswith(_SCALE)}

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def load(self, name: str, cut: Cut | None = None) -> Tensor:
        value = self.source.load(name, cut)
        if name + _SCALE not in self.source.names():
            return value
        scale = self.source.load(name + _SCALE).float()
        shape = self.source.shape(name)
        sizes = (1,) * (len(shape) - 2) + self.size  # fused experts: each has its own blocks
        wanted = tuple(-(-n // size) for n, size in zip(shape, sizes, strict=True))
        if tuple(scale.shape) != wanted:
            raise CheckpointError(
                f"tensor {name + _SCALE!r} has shape {list(scale.shape)}; blocks of "
                f"{self.size[0]} by {self.size[1]} of {name!r} ask for {list(wanted)}."
            )
        for dim, size in enumerate(sizes):
            index = torch.arange(shape[dim])
            if cut is not None and cut.dim == dim:
                index = replace(cut, dim=0).of(index)
            scale = scale.index_select(dim, index // size)
        return value.float().mul_(scale)

    def blocks(self, name: str, cut: Cut | None = None) -> tuple[str, Tensor] | None:
        return None

    def close(self) -> None:
        self.source.close()
