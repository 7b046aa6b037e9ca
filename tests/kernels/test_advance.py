"""Advance moves exactly the emitted tokens and lengths, by slot, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.kernels.advance import advance, advance_reference
from paceline.request import Done


@pytest.mark.parametrize("advance", [advance, advance_reference])
def test_emitted_tokens_land_at_each_slots_own_length(advance: Callable[..., None]) -> None:
    tokens_SL = torch.zeros(4, 10, dtype=torch.int32)
    num_tokens_S = torch.tensor([5, 3, 7, 0], dtype=torch.int32)
    num_computed_S = num_tokens_S - 1
    done_S = torch.zeros(4, dtype=torch.int32)
    advance(
        tokens_SL,
        num_tokens_S,
        num_computed_S,
        done_S,
        torch.tensor([2, 0]),
        torch.tensor([[11, 12, 13], [21, -1, -1]], dtype=torch.int32),
        torch.tensor([3, 1], dtype=torch.int32),
        torch.tensor([Done.LENGTH, Done.RUNNING], dtype=torch.int32),
    )
    assert num_tokens_S.tolist() == [6, 3, 10, 0]
    assert num_computed_S.tolist() == [5, 2, 9, -1]
    assert done_S.tolist() == [0, 0, Done.LENGTH, 0]
    assert tokens_SL[2].tolist() == [0] * 7 + [11, 12, 13]
    assert tokens_SL[0].tolist() == [0] * 5 + [21] + [0] * 4
    assert not tokens_SL[[1, 3]].any()
