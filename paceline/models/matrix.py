"""The matrix of a projection, wide or in e4m3 with scales: reordered, joined and divided.

What would divide a block of scales gives None: the caller takes the wide numbers then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.kernels.fp8.reference import BLOCK, Fp8Weight, dequantised

Matrix = Tensor | Fp8Weight
Order = Callable[[Tensor], Tensor]  # rows of a projection to those of a product


def kind_of(matrix: Matrix) -> bool | None:
    """Whether it has blocks; None: it is wide."""
    return matrix.is_blocked if isinstance(matrix, Fp8Weight) else None


def num_rows(matrix: Matrix) -> int:
    return len(matrix if isinstance(matrix, Tensor) else matrix.codes_NK)


def ordered(matrix: Fp8Weight, order: Order | None) -> Fp8Weight | None:
    """All rows of a block must come from the same block."""
    if order is None:
        return matrix
    row_N = order(torch.arange(len(matrix.codes_NK)))
    scale_row = row_N
    if matrix.is_blocked:
        from_N = row_N // BLOCK
        scale_row = from_N[::BLOCK]
        if not torch.equal(from_N, scale_row.repeat_interleave(BLOCK)[: len(row_N)]):
            return None
    codes = matrix.codes_NK.view(torch.uint8)[row_N].view(matrix.codes_NK.dtype)
    return Fp8Weight(codes, matrix.scale[scale_row], matrix.is_blocked)


def joined(first: Matrix, second: Matrix) -> Matrix | None:
    """Rows of both. None if they are of two kinds, or if a block would have rows of both."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.cat((first, second))
    if not isinstance(first, Fp8Weight) or not isinstance(second, Fp8Weight):
        return None
    is_blocked = first.is_blocked
    if is_blocked != second.is_blocked or (is_blocked and len(first.codes_NK) % BLOCK):
        return None
    codes = torch.cat([x.codes_NK.view(torch.uint8) for x in (first, second)])
    scale = torch.cat((first.scale, second.scale))
    return Fp8Weight(codes.view(first.codes_NK.dtype), scale, is_blocked)


def one_matrix(parts: Sequence[Matrix]) -> Matrix:
    """Rows of all parts; dequantised where they cannot be joined."""
    found: Matrix | None = parts[0]
    for part in parts[1:]:
        found = None if found is None else joined(found, part)
    if found is not None:
        return found
    return torch.cat([x if isinstance(x, Tensor) else dequantised(x) for x in parts])


def divided(matrix: Matrix, count: int, dim: int) -> list[Matrix] | None:
    """`count` equal parts of the outputs (0) or inputs (1)."""
    if isinstance(matrix, Tensor):
        return list(matrix.chunk(count, dim))
    codes, scale, is_blocked = matrix
    if is_blocked and codes.shape[dim] // count % BLOCK:
        return None
    scales = scale.chunk(count, dim) if is_blocked or dim == 0 else [scale] * count
    pairs = zip(codes.chunk(count, dim), scales, strict=True)
    return [Fp8Weight(c.contiguous(), s.contiguous(), is_blocked) for c, s in pairs]


def stacked(
    matrices: Iterable[Matrix], count: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """One tensor, filled one by one, and one of scales. `dtype`: of wide matrices."""
    stack: Tensor | None = None
    scale: Tensor | None = None
    for index, matrix in enumerate(matrices):
        is_fp8 = isinstance(matrix, Fp8Weight)
        codes = matrix.codes_NK if isinstance(matrix, Fp8Weight) else matrix
        if stack is None:
            kind = codes.dtype if is_fp8 else dtype
            stack = torch.empty((count, *codes.shape), dtype=kind, device=device)
            if isinstance(matrix, Fp8Weight):
                scale = torch.empty((count, *matrix.scale.shape), device=device)
        if is_fp8 != (scale is not None):
            raise CheckpointError(
                "some experts of a layer are in fp8 and others are not; use weights where all are."
            )
        stack[index].copy_(codes)
        if scale is not None and isinstance(matrix, Fp8Weight):
            scale[index].copy_(matrix.scale)
    assert stack is not None, "a layer has experts"
    return stack, scale


def as_wide(stack: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return stack
    return dequantised(Fp8Weight(stack, scale, scale.shape[1] != stack.shape[1]))
