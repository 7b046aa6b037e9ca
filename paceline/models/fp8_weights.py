"""Checkpoints in e4m3 with scales: handed out as they are, or dequantised.

A matrix `x` has its scales in `x_scale_inv` (DeepSeek, Qwen) or `x_scale` (compressed-tensors,
modelopt): one for all, one for each output, or one for each block.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.kernels.e4m3 import DTYPE
from paceline.kernels.fp8.reference import Fp8Weight
from paceline.models.quantised_config import Fp8Scheme
from paceline.models.sharding import Cut

if TYPE_CHECKING:
    from paceline.models.weights import Weights

logger = logging.getLogger(__name__)

_SCALES = ("_scale_inv", "_scale")  # also of inputs, which are not read
_OF_PAGES = (".k_scale", ".v_scale")  # models/kv_scales reads them


@dataclass(slots=True)
class Fp8Weights:
    """Tensors without scales are passed through."""

    source: Weights
    scheme: Fp8Scheme
    _is_noted: bool = False

    def names(self) -> set[str]:
        names = self.source.names()
        return {n for n in names if n.endswith(_OF_PAGES) or not n.endswith(_SCALES)}

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def load(self, name: str, cut: Cut | None = None) -> Tensor:
        scale = self._scale(name)
        if scale is None:
            return self.source.load(name, cut)
        for dim, size in enumerate(self._sizes(name)):
            index = torch.arange(self.shape(name)[dim])
            if cut is not None and cut.dim == dim:
                index = replace(cut, dim=0).of(index)
            scale = scale.index_select(dim, index // size)
        return self._codes(name, cut).float().mul_(scale)

    def blocks(self, name: str, cut: Cut | None = None) -> Fp8Weight | None:
        if not self.scheme.is_served_as_stored:
            return None
        scale = self._scale(name)
        if scale is None:
            return None
        if cut is not None:
            size = self._sizes(name)[cut.dim]
            ends = {x for ends in cut.ranges for x in ends} - {self.shape(name)[cut.dim]}
            if self.scheme.block is not None and any(x % size for x in ends):
                self._note_cut(name, cut, size)
                return None
            if self.scheme.block is not None or scale.shape[cut.dim] > 1:
                ranges = tuple((a // size, -(-b // size)) for a, b in cut.ranges)
                scale = replace(cut, ranges=ranges).of(scale)
        return Fp8Weight(self._codes(name, cut), scale.contiguous(), self.scheme.block is not None)

    def close(self) -> None:
        self.source.close()

    def _codes(self, name: str, cut: Cut | None) -> Tensor:
        codes = self.source.load(name, cut)
        if codes.dtype != DTYPE:
            raise CheckpointError(
                f"tensor {name!r} has scales and is stored in {codes.dtype}; config.json asks for "
                f"{DTYPE}."
            )
        return codes

    def _note_cut(self, name: str, cut: Cut, size: int) -> None:
        if not self._is_noted:
            self._is_noted = True
            logger.warning(
                "a rank's part of %s, %s, divides blocks of %d: such matrices are dequantised",
                *(name, cut.ranges, size),
            )

    def _sizes(self, name: str) -> tuple[int, ...]:
        """Numbers along each axis that share a scale. Fused experts: each has its own."""
        shape = self.shape(name)
        return (1,) * (len(shape) - 2) + (self.scheme.block or (1, shape[-1]))

    def _scale(self, name: str) -> Tensor | None:
        """With as many axes as the matrix: [N, 1], or by block; None: it is not quantised."""
        found = [name + x for x in _SCALES if name + x in self.source.names()]
        if not found:
            return None
        shape, scale = self.shape(name), self.source.load(found[0]).float()
        wanted = tuple(-(-n // size) for n, size in zip(shape, self._sizes(name), strict=True))
        if self.scheme.block is None:
            experts = shape[:-2]
            if scale.numel() == torch.Size(experts).numel():  # one for the whole matrix
                return scale.reshape(*experts, 1, 1).expand(wanted)
            if scale.shape in (wanted, wanted[:-1]):
                return scale.reshape(wanted)
        elif tuple(scale.shape) == wanted:
            return scale
        raise CheckpointError(
            f"tensor {found[0]!r} has shape {list(scale.shape)}; {self.scheme.what} of {name!r} "
            f"ask for {list(wanted)}."
        )
