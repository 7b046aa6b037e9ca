"""Rotation and KV write: equal to the textbook form; page slot -1 writes nothing."""

from __future__ import annotations

import torch

from paceline.kernels.elementwise.reference import rotate_, write_kv
from paceline.layers.rope import interleave_pairs, inverse_frequencies, rotation_table


def test_interleaved_rotation_keeps_the_products_of_the_split_half_form() -> None:
    torch.manual_seed(0)
    positions = torch.tensor([0, 3, 17])
    query, key = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    freq = inverse_frequencies(8, 10000.0)
    angle = torch.outer(positions.float(), freq)
    cos, sin = torch.cat([angle.cos()] * 2, -1)[:, None], torch.cat([angle.sin()] * 2, -1)[:, None]

    def split_half(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def interleaved(x: torch.Tensor) -> torch.Tensor:
        mixed = torch.stack([interleave_pairs(head, 1) for head in x.flatten(0, 1)]).view_as(x)
        return rotate_(mixed.contiguous(), rotation_table(freq, 32)[positions])

    expected = torch.einsum("inh,jnh->nij", split_half(query), split_half(key))
    found = torch.einsum("inh,jnh->nij", interleaved(query), interleaved(key))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_page_slot_minus_one_writes_nothing() -> None:
    key, value = torch.zeros(2, 8, 4), torch.zeros(2, 8, 4)
    new = torch.ones(3, 2, 4)
    write_kv(key, value, new, new * 2, torch.tensor([5, -1, 0]))
    assert key[:, [0, 5]].eq(1).all()
    assert value[:, [0, 5]].eq(2).all()
    assert not key[:, [1, 2, 3, 4, 6, 7]].any(), "torch reads -1 as the last row"
