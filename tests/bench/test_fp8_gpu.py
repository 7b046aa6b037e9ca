"""What the benchmark of e4m3 kernels tries, chooses and times; without a GPU nothing is timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.kernels.linear.tiles import Tile, bucket_of
from tests.kernels.interpreted import run_interpreted

pytest.importorskip("triton")
from bench import fp8_gpu
from bench.experts_gpu import Model
from bench.fp8_gpu import FEW, MANY, SHAPES, Found, best, cells, cut_of, name_of, report, tries

SHAPE = SHAPES[1]


@pytest.mark.parametrize("is_blocked", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_try_can_be_launched(shape: tuple[int, int], is_blocked: bool) -> None:
    alike = [{cut_of(x) for x in tries(shape, rows, is_blocked)} for rows in FEW]
    assert set.intersection(*alike), "a cut that all few row counts can have"
    for rows in FEW + MANY:
        for tile in tries(shape, rows, is_blocked):
            assert tile.depth * tile.block_k * (tile.block_t + tile.block_n) < 227 << 10
            assert tile.kind == "tma" or not is_blocked
            assert shape[1] % (tile.splits * tile.block_k) == 0
            assert tile.block_t >= min(bucket_of(rows) or 64, 64)
            assert rows > 128 or tile.warps == 4 or tile.kind == "mma", "rows are columns"


def timings() -> list[Found]:
    """The narrow tile is the best for one row, the wide one for all; the deeper of both is."""
    took = {64: (1.0, 4.0, 4.0, 6.0, 9.0, 9.0), 128: (1.5, 3.0, 3.0, 4.0, 5.0, 6.0)}
    found = [
        Found(
            SHAPE, False, rows, Tile("tma", max(rows, 16), block_n, 128, 4, depth), us - depth / 9
        )
        for block_n, times in took.items()
        for depth in (2, 4)
        for rows, us in zip(FEW, times, strict=True)
    ]
    return [*found, Found(SHAPE, False, 256, None, 7.0), Found(SHAPE, False, 2048, None, 9.0)]


def test_one_cut_serves_all_few_row_counts_unless_told_otherwise() -> None:
    table = best(timings(), False)[name_of(SHAPE, False)]
    few = {int(rows): Tile(*tile) for rows, tile in table.items() if rows != "256"}
    assert set(few) == set(FEW)
    assert {(x.block_n, x.depth) for x in few.values()} == {(128, 4)}
    assert {rows: x.block_t for rows, x in few.items()} == {rows: max(rows, 16) for rows in FEW}
    assert table["256"] == "cublas"
    apart = best(timings(), True)[name_of(SHAPE, False)]
    assert [Tile(*apart[x]).block_n for x in ("1", "8", "64")] == [64, 128, 128]


def test_the_report_names_the_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    report(timings())
    first = capsys.readouterr().out.splitlines()[0]
    assert first.index("tma16.64") < first.index("tma16.128")


def rehearse() -> None:
    """The search and every kind of call on small tensors, interpreted; nothing is timed."""
    bench: Any = fp8_gpu
    bench.DEVICE, bench.FEW, bench.MANY, bench.TOLERANCE = "cpu", (3,), (), 0.02
    bench.tries = lambda *_: [Tile("tma", 16, 64, 128, 4, 2, 2), Tile("dot", 16, 64, 128)]
    bench.timed = lambda call, _: float(call(1).isfinite().all())
    bench.EXPERTS = {"q30": Model("small", 64, 32, 4, 2)}
    # The interpreter knows no bf16.
    torch.bfloat16 = torch.float16
    torch.Tensor.bfloat16 = torch.Tensor.half  # type: ignore[method-assign]
    for is_blocked in (False, True):
        found = [x for x in fp8_gpu.search((128, 256), is_blocked) if x.tile is not None]
        assert [x.took_us for x in found] == [1.0, 1.0]
        assert best(found, False)
    made = [fp8_gpu.product_cell((64, 256), 3, True), *fp8_gpu.rows_cells(128, 64, 2)]
    made += [fp8_gpu.experts_cell(kind, 3) for kind in ("bfloat16", "channels", "blocks")]
    for cell in made:
        for call in cell.make(2):
            call()


def test_the_benchmark_runs_without_a_gpu() -> None:
    run_interpreted(f"{__name__}:rehearse")


def test_every_kernel_of_e4m3_has_a_whole_call() -> None:
    kernels = {cell.kernel for cell in cells()}
    assert {"fp8_linear", "quantise_rows", "norm_rows", "silu_rows", "apply_experts"} <= kernels
