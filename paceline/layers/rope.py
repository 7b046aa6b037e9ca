"""Rotary tables for each kind of scaling. A table is built once per model."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def inverse_frequencies(head_size: int, theta: float) -> Tensor:
    exponent = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    return 1.0 / theta**exponent


def llama3_frequencies(freq: Tensor, factor: float, low: float, high: float, old: int) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / freq
    blend = (old / wavelength - low) / (high - low)
    smooth = (1 - blend) * freq / factor + blend * freq
    stretched = torch.where(wavelength > old / low, freq / factor, freq)
    is_between = (wavelength <= old / low) & (wavelength >= old / high)
    return torch.where(is_between, smooth, stretched)


def yarn_frequencies(
    freq: Tensor,
    theta: float,
    factor: float,
    turns: tuple[float, float],
    old: int,
    is_truncated: bool,
) -> Tensor:
    """`turns` (fast, slow) count full turns within `old` positions. Frequencies with more turns
    than `fast` are kept, those with fewer than `slow` stretched; between them is a linear ramp.
    """
    head_size = 2 * len(freq)

    def pair_that_turns(count: float) -> float:
        return head_size * math.log(old / (count * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (pair_that_turns(count) for count in turns)
    if is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001
    stretch = ((torch.arange(len(freq), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return freq / factor * stretch + freq * (1 - stretch)


def rotation_table(freq: Tensor, num_positions: int) -> Tensor:
    """complex64 [positions, head_size / 2]: cos + i sin of position * frequency."""
    angle = torch.outer(torch.arange(num_positions, dtype=torch.float32), freq)
    return torch.complex(angle.cos(), angle.sin())


def padded_table(rotation: Tensor, num_pairs: int) -> Tensor:
    """For heads that are rotated in part: the pairs behind are left as they are."""
    num_positions, rotated = rotation.shape
    return torch.cat((rotation, rotation.new_ones(num_positions, num_pairs - rotated)), dim=1)


def interleave_pairs(rows: Tensor, num_heads: int, rope_size: int | None = None) -> Tensor:
    """Reorder the rows of each head from halves (i, i + H/2) to neighbours (2i, 2i + 1).

    With `rope_size`, only the first rows of a head are reordered.
    """
    by_head = rows.unflatten(0, (num_heads, -1))
    halves = by_head[:, :rope_size].unflatten(1, (2, -1))
    paired = halves.transpose(1, 2).flatten(1, 2)
    return torch.cat((paired, by_head[:, paired.shape[1] :]), dim=1).flatten(0, 1)
