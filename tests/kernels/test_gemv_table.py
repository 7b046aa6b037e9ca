"""The table of tiles: what it holds can be launched, and what was not measured stays torch's."""

from __future__ import annotations

import json

import pytest
import torch

from paceline.kernels.linear import tiles
from paceline.kernels.linear.tiles import BUCKETS, FILE, Tile, bucket_of, pick_tile

CPU = torch.device("cpu")


def measured() -> list[tuple[str, int, Tile]]:
    return [
        (shape, int(bucket), Tile(*tile))
        for shapes in json.loads(FILE.read_text()).values()
        for shape, buckets in shapes.items()
        for bucket, tile in buckets.items()
        if tile != "cublas"
    ]


@pytest.mark.parametrize(("shape", "bucket", "tile"), measured())
def test_a_measured_tile_can_be_launched(shape: str, bucket: int, tile: Tile) -> None:
    assert bucket in BUCKETS
    assert tile.kind in ("fma", "mma", "dot", "tma")
    assert tile.kind != "fma" or tile.block_t >= bucket
    assert tile.kind == "tma" or not tile.is_apart
    if tile.kind in ("dot", "tma"):
        size = 1 if shape.startswith("fp8") else 2
        num_bytes = size * tile.depth * tile.block_k * (tile.block_t + tile.block_n)
        assert num_bytes < 227 * 1024, f"{shape}: more shared memory than there is"


def test_row_counts_share_the_bucket_above_them() -> None:
    assert [bucket_of(x) for x in (1, 2, 64, 65, 129, 256)] == [1, 8, 64, 128, 256, 256]
    assert bucket_of(257) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("end", ["plain", "gated", "heads", "added"])
def test_many_rows_of_an_unknown_shape_are_torchs(end: str, dtype: torch.dtype) -> None:
    assert pick_tile(end, 96, 72, tiles.MOST_ROWS_BY_DEFAULT, dtype, CPU) is not None
    for num_rows in (65, 128, 129, 256, 257):
        assert pick_tile(end, 96, 72, num_rows, dtype, CPU) is None


def test_many_rows_of_a_measured_shape_have_its_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = Tile("tma", 128, 128, 64, 8, 6, 4, 512, is_apart=True)
    table = {"A GPU": {"added 96x72": {"128": list(tile), "256": "cublas"}}}
    monkeypatch.setattr(tiles, "_table", lambda: table)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A GPU")
    device = torch.device("cuda", 7)  # no other test asks for it: answers are kept
    assert pick_tile("added", 96, 72, 100, torch.float16, device) == tile
    assert pick_tile("added", 96, 72, 100, torch.float32, device) is None
    assert pick_tile("added", 96, 72, 200, torch.float16, device) is None
