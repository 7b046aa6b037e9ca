"""Checkpoints in fp8 with a scale per block of a matrix, read as the numbers that they stand for.

DeepSeek's format: `x.weight` in float8_e4m3fn and `x.weight_scale_inv`, whose entries scale blocks
of so many rows and columns. Never computes in fp8.
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
    """Dequantises a tensor when it is loaded; all else is the checkpoint's own."""

    source: Weights
    size: tuple[int, int]

    def names(self) -> set[str]:
        return {n for n in self.source.names() if not n.endswith(_SCALE)}

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def load(self, name: str, cut: Cut | None = None) -> Tensor:
        value = self.source.load(name, cut)
        if name + _SCALE not in self.source.names():
            if value.dtype.itemsize == 1:
                raise CheckpointError(
                    f"tensor {name!r} is stored in {value.dtype} and has no {name + _SCALE!r}; "
                    "take the original weights."
                )
            return value
        scale = self.source.load(name + _SCALE).float()
        rows, columns = self.size
        shape = self.source.shape(name)
        wanted = (-(-shape[0] // rows), -(-shape[1] // columns))
        if tuple(scale.shape) != wanted:
            raise CheckpointError(
                f"tensor {name + _SCALE!r} has shape {list(scale.shape)}; blocks of {rows} by "
                f"{columns} of {name!r} ask for {list(wanted)}."
            )
        for dim, size in enumerate(self.size):
            index = torch.arange(shape[dim])
            if cut is not None and cut.dim == dim:
                index = replace(cut, dim=0).of(index)
            scale = scale.index_select(dim, index // size)
        return value.float().mul_(scale)

    def blocks(self, name: str, cut: Cut | None = None) -> tuple[str, Tensor] | None:
        return None

    def close(self) -> None:
        self.source.close()
