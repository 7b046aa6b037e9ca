"""What the benchmark of products tries: for every row count something, and what the table holds."""

from __future__ import annotations

import json

import pytest

from paceline.kernels.linear.tiles import FILE, Tile

pytest.importorskip("triton")
from bench.gemm_gpu import MODELS, ROWS, Shape, square_counts
from bench.gemm_tiles import candidates, variants

SHAPES = [shape for model in MODELS.values() for shape in model]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_product_has_tiles_to_try_and_squares_in_front(shape: Shape, rows: int) -> None:
    assert list(candidates(shape.n, shape.k, rows))
    assert square_counts(shape, rows)


def test_a_second_run_can_find_the_tiles_of_the_first() -> None:
    """Otherwise --write would put something slower in their place."""
    (table,) = json.loads(FILE.read_text()).values()
    for shape in SHAPES:
        for bucket, found in table[str(shape)].items():
            if found != "cublas" and found[0] == "tma":
                tried = candidates(shape.n, shape.k, int(bucket))
                assert Tile(*found) in [x for tile in tried for x in variants(tile)], (shape, found)
