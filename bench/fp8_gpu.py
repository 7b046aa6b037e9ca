"""Kernels of e4m3 weights on a GPU, inside CUDA graphs: products, rows, experts, beside bf16's.

Run as `python -m bench.fp8_gpu`: prints µs and TB/s of every product by row count and tile, then
whole calls with the tiles of the table. `--write` writes the best tiles to the table first: for up
to 128 rows one cut per product, so that a row has the same bits in any number of them, or with
`--apart` the best one of each bucket. `--seconds` bounds the search; whole calls come after it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.experts_gpu import MODELS as EXPERTS
from bench.gemm_gpu import short, table_text, timed
from bench.gemm_tiles import CompileOnly
from bench.kernels_gpu import Cell, measure, show
from paceline.kernels.e4m3 import DTYPE
from paceline.kernels.elementwise.triton import add_rms_norm, silu_and_mul
from paceline.kernels.experts.reference import ExpertWeights
from paceline.kernels.experts.triton.products import apply_experts
from paceline.kernels.fp8 import reference
from paceline.kernels.fp8.reference import Fp8Rows, Fp8Weight, quantise_weight
from paceline.kernels.fp8.triton.products import fp8_linear
from paceline.kernels.fp8.triton.rows import norm_rows, quantise_rows, silu_rows
from paceline.kernels.linear import tiles
from paceline.kernels.linear.tiles import Tile, bucket_of

# Outputs and inputs of the products of l8, and of attention of q30.
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (5120, 2048), (2048, 4096))
FEW, MANY = (1, 8, 16, 32, 64, 128), (256, 2048)
CALLS = (1, 8, 64, 256, 2048, 16384)
TOLERANCE = 6e-3  # bf16 results
WORKING_SET_BYTES = 400e6  # more than the caches hold
DEVICE = "cuda"


class Found(NamedTuple):
    shape: tuple[int, int]
    is_blocked: bool
    rows: int
    tile: Tile | None  # None: torch
    took_us: float


def name_of(shape: tuple[int, int], is_blocked: bool) -> str:
    """The key of the table."""
    return f"{'fp8-blocks' if is_blocked else 'fp8'} {shape[0]}x{shape[1]}"


def label_of(tile: Tile | None) -> str:
    return "torch" if tile is None else short(tile)


def tries(shape: tuple[int, int], rows: int, is_blocked: bool) -> Iterator[Tile]:
    n, k = shape
    bucket = bucket_of(rows) or 256
    if rows > 128:
        for block_t, block_n, warps, depth in ((128, 128, 8, 3), (128, 128, 8, 4), (64, 128, 4, 4)):
            yield Tile("tma", block_t, block_n, 128, warps, depth)
        return
    height = max(bucket, 16)
    wanted = [x for x in (1, 2, 4, 8) if 128 <= n // 64 * x <= 1024 and k % (x * 256) == 0]
    for splits in wanted[:2]:
        for depth, ahead in ((4, 512), (6, 512), (6, 0)):
            yield Tile("tma", height, 64, 128, 4, depth, splits, ahead)
            if rows >= 64 and splits > 1:
                yield Tile("tma", height, 64, 128, 4, depth, splits, ahead, is_apart=True)
    if n // 128 >= 64 and rows <= 64:
        yield Tile("tma", height, 128, 128, 4, 4, 1 if n > 8192 else 2, 512)
    if not is_blocked:
        for block_n, warps, depth in ((16, 4, 4), (16, 8, 4), (16, 8, 2), (32, 4, 4)):
            if rows <= 16 and k % (64 * warps) == 0:
                yield Tile("mma", max(bucket, 8), block_n, 64, warps, depth)


def cut_of(tile: Tile) -> Tile:
    """What a row's bits depend on."""
    return tile._replace(block_t=0, depth=0, is_apart=False)


def make(shape: tuple[int, int], is_blocked: bool, count: int) -> list[Fp8Weight]:
    """Weights of several layers."""
    sizes = (-(-shape[0] // 128), -(-shape[1] // 128)) if is_blocked else (shape[0], 1)
    codes = (torch.randn(shape, device=DEVICE) * 32).clamp(-448, 448).to(DTYPE)
    scales = [torch.rand(sizes, device=DEVICE) / 448 / shape[1] ** 0.5 for _ in range(count)]
    return [Fp8Weight(codes.clone(), scale, is_blocked) for scale in scales]


def rows_of(shape: tuple[int, int], rows: int, is_blocked: bool) -> Fp8Rows:
    return reference.quantise_rows(torch.randn(rows, shape[1], device=DEVICE), is_blocked)


def search(shape: tuple[int, int], is_blocked: bool) -> Iterator[Found]:
    """Every try at every row count, and torch's product."""
    count = int(max(2, min(64, WORKING_SET_BYTES // (shape[0] * shape[1]))))
    weights = make(shape, is_blocked, count)
    calls = count * max(1, round(24 / count))
    for rows in FEW + MANY:
        x = rows_of(shape, rows, is_blocked)
        wanted = reference.fp8_linear(x, weights[0], None, torch.float32)

        def call(i: int, tile: Tile | None) -> Tensor:
            weight = weights[i % len(weights)]
            if tile is not None:
                return fp8_linear(x, weight, None, torch.bfloat16, tile)  # noqa: B023
            scales = x.scale_TG, weight.scale.t()  # noqa: B023
            return torch._scaled_mm(
                *(x.codes_TK, weight.codes_NK.t(), *scales),  # noqa: B023
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )

        all_tiles: list[Tile | None] = [*tries(shape, rows, is_blocked)]
        for tile in all_tiles if is_blocked else [None, *all_tiles]:
            title = (
                f"{name_of(shape, is_blocked)} {rows} {'torch' if tile is None else short(tile)}"
            )
            try:
                wrong = float((call(0, tile).float() - wanted).norm() / wanted.norm())
                if not wrong < TOLERANCE:
                    print(f"WRONG {title}: relative error {wrong:.2g}")
                    continue
                yield Found(shape, is_blocked, rows, tile, timed(partial(call, tile=tile), calls))
            except Exception as error:
                print(f"{title}: {type(error).__name__} {str(error)[:90]}")


def report(found: list[Found]) -> None:
    groups: dict[tuple[Any, ...], list[Found]] = defaultdict(list)
    for x in found:
        groups[x[:3]].append(x)
    for (shape, is_blocked, rows), own in groups.items():
        line = f"{name_of(shape, is_blocked):24} {rows:4}"
        for x in sorted(own, key=lambda x: x.took_us)[:4]:
            rate = shape[0] * shape[1] / x.took_us / 1e6
            line += (
                f" | {x.took_us:7.2f} {rate:4.2f} {'torch' if x.tile is None else short(x.tile)}"
            )
        print(line)


def best(found: list[Found], is_apart: bool) -> dict[str, dict[str, Any]]:
    """By product and bucket. Not apart: the cut that loses least over all few row counts."""
    table: dict[str, dict[str, Any]] = {}
    for shape, is_blocked in dict.fromkeys(x[:2] for x in found):
        own = [x for x in found if x[:2] == (shape, is_blocked)]
        fastest = {x.rows: x for x in sorted(own, key=lambda x: -x.took_us)}
        cuts: dict[Tile, dict[int, Found]] = defaultdict(dict)
        for x in sorted(own, key=lambda x: -x.took_us):
            if x.rows in FEW and x.tile is not None:
                cuts[cut_of(x.tile)][x.rows] = x
        lost = {
            cut: sum(x.took_us / fastest[rows].took_us for rows, x in each.items())
            for cut, each in cuts.items()
            if len(each) == len(FEW)
        }
        if lost and not is_apart:
            fastest |= cuts[min(lost, key=lambda x: lost[x])]
        entry = {
            str(rows): "cublas" if x.tile is None else list(x.tile)
            for rows, x in sorted(fastest.items())
            if rows in tiles.BUCKETS
        }
        table[name_of(shape, is_blocked)] = entry
    return table


def compile_all(workers: int) -> None:
    """Fill Triton's cache from many processes that do not use the GPU."""
    jobs = dict.fromkeys(
        (shape, is_blocked, tile)
        for shape in SHAPES
        for is_blocked in (False, True)
        for rows in FEW + MANY
        for tile in tries(shape, rows, is_blocked)
    )
    begin = time.monotonic()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        failed = [x for x in pool.map(compile_one, jobs, chunksize=2) if x]
    print(f"compiled {len(jobs)} tiles in {time.monotonic() - begin:.1f} s; {failed[:4]}")


def compile_one(job: tuple[tuple[int, int], bool, Tile]) -> str | None:
    shape, is_blocked, tile = job
    sizes = (-(-shape[0] // 128), -(-shape[1] // 128)) if is_blocked else (shape[0], 1)
    weight = Fp8Weight(torch.empty(shape, dtype=DTYPE), torch.empty(sizes), is_blocked)
    try:
        with CompileOnly():
            rows = Fp8Rows(torch.empty(8, shape[1], dtype=DTYPE), torch.empty(8, sizes[1]))
            fp8_linear(rows, weight, None, torch.bfloat16, tile)
    except Exception as error:
        return f"{name_of(shape, is_blocked)} {short(tile)}: {type(error).__name__} {error!s:.120}"
    return None


# ---- whole calls, as layers make them


def cells() -> Iterator[Cell]:
    for is_blocked in (False, True):
        for shape in SHAPES[:4]:
            for rows in CALLS:
                yield product_cell(shape, rows, is_blocked)
    for rows in CALLS:
        yield from rows_cells(4096, 14336, rows)
    for rows in (1, 8, 32, 64, 300, 2048):
        for kind in ("bfloat16", "channels", "blocks"):
            yield experts_cell(kind, rows)


def product_cell(shape: tuple[int, int], rows: int, is_blocked: bool) -> Cell:
    (n, k), kind = shape, "blocks" if is_blocked else "channels"

    def calls(num_sets: int) -> list[Callable[[], Any]]:
        x = rows_of(shape, rows, is_blocked)
        weights = make(shape, is_blocked, num_sets)
        return [partial(fp8_linear, x, weight, None, torch.bfloat16) for weight in weights]

    num_operations = 2.0 * rows * n * k if rows > 256 else 0.0
    label = f"{n}x{k} {rows} rows, {kind}"
    return Cell("fp8_linear", label, calls, n * k + rows * (k + 2 * n), num_operations)


def rows_cells(width: int, inner: int, rows: int) -> Iterator[Cell]:
    """Kernels that give e4m3 rows, and the bf16 kernels that they replace."""

    def numbers(*size: int) -> Tensor:
        return torch.empty(size, device=DEVICE, dtype=torch.bfloat16).normal_()

    def each(function: Callable[..., Any], *sizes: int) -> Callable[[int], list[Any]]:
        return lambda num_sets: [partial(function, x) for x in numbers(num_sets, rows, *sizes)]

    def norm(x: Tensor, function: Callable[..., Any], *rest: Any) -> Any:
        return function(x, x, x[0], 1e-5, torch.bfloat16, *rest)

    for is_blocked, kind in ((False, "channels"), (True, "blocks")):
        name = f"{rows} rows, {kind}"
        rounds = partial(quantise_rows, is_blocked=is_blocked)
        gates = partial(silu_rows, is_blocked=is_blocked)
        yield Cell("quantise_rows", name, each(rounds, width), 3 * rows * width)
        yield Cell("silu_rows", name, each(gates, 2 * inner), 5 * rows * inner)
        norms = each(lambda x, b=is_blocked: norm(x, norm_rows, b), width)
        yield Cell("norm_rows", name, norms, 7 * rows * width)
    name = f"{rows} rows, bf16"
    yield Cell("silu_and_mul", name, each(silu_and_mul, 2 * inner), 6 * rows * inner)
    yield Cell(
        "add_rms_norm", name, each(partial(norm, function=add_rms_norm), width), 8 * rows * width
    )


def experts_cell(kind: str, rows: int) -> Cell:
    """The experts of q30; every set has other choices."""
    model = EXPERTS["q30"]
    num_used = len(model.choices(rows, "spread", 0, "cpu").unique())
    size = 2 if kind == "bfloat16" else 1
    num_bytes = num_used * (model.matrix_bytes(True) + model.matrix_bytes(False)) // 2 * size

    def calls(num_sets: int) -> list[Callable[[], Any]]:
        x = torch.randn(rows, model.width, device=DEVICE).bfloat16()
        weight = torch.rand(rows, model.num_taken, device=DEVICE)
        gate_up = torch.randn(model.num_experts, 2 * model.inner, model.width, device=DEVICE) / 45
        down = torch.randn(model.num_experts, model.width, model.inner, device=DEVICE) / 28
        experts = ExpertWeights(gate_up.bfloat16(), down.bfloat16())
        if kind != "bfloat16":
            experts = ExpertWeights(*in_e4m3(gate_up, down, kind == "blocks"))
        chosen = [model.choices(rows, "spread", i, DEVICE) for i in range(num_sets)]
        return [partial(apply_experts, x, c, weight, experts) for c in chosen]

    return Cell("apply_experts", f"q30 {rows} rows, {kind}", calls, num_bytes)


def in_e4m3(gate_up: Tensor, down: Tensor, is_blocked: bool) -> tuple[Tensor, ...]:
    pairs = [[quantise_weight(x, is_blocked) for x in matrix] for matrix in (gate_up, down)]
    codes = (torch.stack([x.codes_NK for x in pair]) for pair in pairs)
    scales = (torch.stack([x.scale for x in pair]) for pair in pairs)
    return (*codes, *scales)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=200, help="of the search for tiles")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="update the table of the repository")
    parser.add_argument("--table", type=Path, help="with --write: another file for the table")
    parser.add_argument("--apart", action="store_true", help="other cuts for other row counts")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    begin = time.monotonic()
    compile_all(options.workers)
    found: list[Found] = []
    for is_blocked in (False, True):
        for shape in SHAPES:
            if time.monotonic() - begin < options.seconds:
                found += search(shape, is_blocked)
    report(found)
    print(f"{time.monotonic() - begin:.1f} s for {len(found)} timings")
    if options.write:
        tiles._table().setdefault(torch.cuda.get_device_name(), {}).update(
            best(found, options.apart)
        )
        tiles.pick_tile.cache_clear()
        (options.table or tiles.FILE).write_text(table_text())
    for cell in cells():
        show(measure(cell))
    print(f"{time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
