"""Tiles that the benchmark of experts tries compute what the reference computes."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreted import run_interpreted

pytest.importorskip("triton")
from bench.experts_gpu import MODELS, tries


def check_tiny() -> None:
    from bench.experts_gpu import main

    assert main(["--tiny"]) == 0


@pytest.mark.more
def test_every_size_of_blocks_agrees_with_the_reference() -> None:
    run_interpreted(f"{__name__}:check_tiny")


@pytest.mark.parametrize("name", MODELS)
def test_rows_spread_as_the_regime_says(name: str) -> None:
    """A row chooses an expert once; the most popular one has more rows the less they spread."""
    model, most = MODELS[name], []
    for regime in ("spread", "zipf", "fixed"):
        chosen = model.choices(512, regime, 3, "cpu")[:, : model.num_chosen]
        assert (chosen.sort(1).values.diff(dim=1) > 0).all()
        most.append(int(torch.bincount(chosen.flatten().long()).max()))
    assert most[0] < most[1] < most[2] == 512


def test_many_rows_have_blocks_of_every_size_to_try() -> None:
    assert {x.tile.rows for x in tries(256, True) if not x.is_few} == {16, 32, 64, 128, 256}
