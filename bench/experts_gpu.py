"""Compares tiles for the products of experts on a GPU, inside CUDA graphs.

Run as `python -m bench.experts_gpu`: prints µs and TB/s of both products by row count, the best
tile of each bucket, and whole calls. "fixed": all rows choose the same experts; "spread": random.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.gemm_gpu import timed
from bench.gemm_tiles import NoGpu
from paceline.kernels.experts.reference import ExpertWeights
from paceline.kernels.experts.triton import products
from paceline.kernels.experts.triton.layout import lay_out
from paceline.kernels.experts.triton.products import ExpertTile, apply_experts, multiply_rows

ROWS = (1, 8, 32, 64, 128, 256)
REGIMES = ("fixed", "spread")
NUM_LAYERS = 4  # each call uses the next set and other experts, so that no cache holds them
TOLERANCE = 6e-3


@dataclass(frozen=True)
class Model:
    """Experts of a layer; shared ones are stacked behind the others."""

    name: str
    width: int
    inner: int
    num_experts: int
    num_chosen: int
    num_shared: int = 0

    @property
    def num_taken(self) -> int:
        return self.num_chosen + self.num_shared

    @property
    def num_stacked(self) -> int:
        return self.num_experts + self.num_shared

    def choices(self, rows: int, regime: str, index: int, device: str) -> Tensor:
        """int32 [rows, taken] of call number `index`."""
        random = torch.Generator().manual_seed(index)
        if regime == "fixed":
            chosen = torch.arange(self.num_chosen) + index // NUM_LAYERS * self.num_chosen
            chosen = (chosen % self.num_experts).expand(rows, -1)
        else:
            chosen = torch.rand(rows, self.num_experts, generator=random).argsort(1)
            chosen = chosen[:, : self.num_chosen]
        shared = torch.arange(self.num_experts, self.num_stacked).expand(rows, -1)
        return torch.cat((chosen, shared), 1).int().to(device)

    def matrix_bytes(self, is_gated: bool) -> int:
        return 2 * self.width * self.inner * (1 + is_gated)


MODELS = {
    "glm": Model("glm", 2048, 1536, 64, 4, 1),
    "q30": Model("q30", 2048, 768, 128, 8),
}


class Try(NamedTuple):
    """A tile, for rows as they are or laid out in blocks."""

    tile: ExpertTile
    is_few: bool

    def __str__(self) -> str:
        t = self.tile
        kind = "few" if self.is_few else "many"
        cut = f"{t.rows}.{t.outputs}.{t.inputs}.w{t.num_warps}s{t.num_stages}"
        return f"{kind}{cut}p{t.per_sm}a{t.ahead}"


def cut(outputs: int, inputs: int, warps: int, stages: int, per_sm: int) -> ExpertTile:
    """A tile for any number of rows."""
    return ExpertTile(0, outputs, inputs, warps, stages, per_sm)


# By the rows of a tile. None spills, and the named number of programs fits.
FEW = {
    16: [
        cut(64, 128, 4, 4, 2),
        cut(64, 128, 4, 5, 2),
        cut(64, 128, 4, 3, 3),
        cut(64, 64, 4, 5, 4),
        cut(64, 64, 4, 10, 2),
        cut(64, 128, 4, 9, 1),
        cut(64, 256, 4, 5, 1),
        cut(128, 128, 8, 3, 2),
        cut(128, 128, 8, 6, 1),
    ],
    32: [
        cut(64, 128, 4, 4, 2),
        cut(64, 128, 4, 3, 3),
        cut(64, 64, 4, 8, 2),
        cut(64, 128, 4, 8, 1),
        cut(128, 64, 8, 5, 2),
        cut(128, 128, 8, 5, 1),
    ],
    64: [
        cut(64, 128, 4, 3, 2),
        cut(64, 64, 4, 6, 2),
        cut(64, 64, 4, 4, 3),
        cut(128, 64, 8, 4, 2),
        cut(128, 64, 4, 4, 2),
        cut(128, 64, 8, 8, 1),
        cut(128, 128, 8, 4, 1),
    ],
    128: [
        cut(64, 64, 4, 4, 2),
        cut(128, 64, 8, 6, 1),
        cut(128, 128, 8, 3, 1),
    ],
}
MANY = [
    cut(64, 64, 4, 6, 2)._replace(rows=64),
    cut(128, 64, 4, 4, 2)._replace(rows=64),
    cut(128, 64, 8, 4, 2)._replace(rows=64),
    cut(128, 128, 8, 4, 1)._replace(rows=64),
    cut(256, 64, 8, 5, 1)._replace(rows=64),
    cut(64, 64, 4, 4, 2)._replace(rows=128),
    cut(128, 64, 8, 6, 1)._replace(rows=128),
]


def tries(rows: int, is_gated: bool) -> Iterator[Try]:
    """Tiles to try for this number of rows."""
    bucket = max(16, 1 << (rows - 1).bit_length())
    ahead = 0 if is_gated else 512
    for number, tile in enumerate(FEW.get(bucket, [])):
        each = tile._replace(rows=bucket, ahead=ahead)
        yield Try(each, True)
        if number == 0 and not is_gated:
            yield Try(each._replace(ahead=0), True)
            yield Try(each._replace(ahead=256), True)
    if bucket > 64:
        for tile in MANY:
            yield Try(tile._replace(ahead=ahead), False)


# ---- operands


class Operands:
    """One product at one row count: `calls` choices, and weights of several layers."""

    def __init__(self, model: Model, rows: int, is_gated: bool, matrices: list[Tensor]) -> None:
        torch.manual_seed(rows)
        device, dtype = matrices[0].device, matrices[0].dtype
        self.model, self.rows, self.is_gated, self.matrices = model, rows, is_gated, matrices
        num_entries = rows * model.num_taken
        shape = (rows, model.width) if is_gated else (num_entries, model.inner)
        self.x = torch.randn(shape, device=device).to(dtype)
        self.weight = torch.rand(rows, model.num_taken, device=device) + 0.5
        out = (num_entries, model.inner if is_gated else model.width)
        self.out = torch.zeros(out, device=device, dtype=dtype if is_gated else torch.float32)

    def run(self, chosen: Any, tile: ExpertTile, index: int) -> None:
        """`chosen` may be laid out in blocks."""
        matrix = self.matrices[index % len(self.matrices)]
        weight = None if self.is_gated else self.weight
        multiply_rows(self.x, chosen, self.model.num_taken, weight, matrix, self.out, tile)

    def wanted(self, chosen: Tensor, index: int) -> Tensor:
        """The same from fp32 sums, expert by expert."""
        out = torch.zeros_like(self.out, dtype=torch.float32)
        flat, matrix = chosen.flatten(), self.matrices[index % len(self.matrices)]
        for expert in flat.unique().tolist():
            entry = (flat == expert).nonzero()[:, 0]
            row = entry // self.model.num_taken if self.is_gated else entry
            made = linear(self.x[row].float(), matrix[expert].float())
            if self.is_gated:
                gate, up = made.chunk(2, dim=1)
                out[entry] = silu(gate) * up
            else:
                out[entry] = made * self.weight.flatten()[entry, None]
        return out

    def laid_out(self, chosen: Tensor, each: Try) -> Any:
        if each.is_few:
            return chosen
        return lay_out(chosen, self.model.num_stacked, each.tile.rows)


# ---- compiling without a GPU


@contextmanager
def compiling_only() -> Iterator[None]:
    launch = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    driver.set_active(NoGpu())
    with mock.patch.object(JITFunction, "run", only_compile):
        yield


def compile_all(models: list[Model], rows_list: list[int], workers: int) -> None:
    """Fill Triton's cache from many processes that do not use the GPU."""
    jobs = {
        (model, each, is_gated)
        for model in models
        for rows in rows_list
        for is_gated in (True, False)
        for each in tries(rows, is_gated)
    }
    begin = time.monotonic()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        failed = [x for x in pool.map(_compile, jobs, chunksize=2) if x]
    print(f"compiled {len(jobs)} tiles in {time.monotonic() - begin:.1f} s; {failed[:4]}")


def _compile(job: tuple[Model, Try, bool]) -> str | None:
    model, each, is_gated = job
    outputs, inputs = model.width, model.inner
    shape = (2 * inputs, outputs) if is_gated else (outputs, inputs)
    matrix = torch.empty(model.num_stacked, *shape, dtype=torch.bfloat16)
    try:
        with compiling_only():
            operands = Operands(model, 8, is_gated, [matrix])
            chosen = torch.zeros(8, model.num_taken, dtype=torch.int32)
            operands.run(operands.laid_out(chosen, each), each.tile, 0)
    except Exception as error:
        return f"{model.name} {each}: {type(error).__name__} {str(error)[:120]}"
    return None


# ---- timing


class Timing(NamedTuple):
    model: str
    regime: str
    rows: int
    is_gated: bool
    each: Try
    took_us: float
    terabytes_s: float


def make_layers(model: Model) -> list[ExpertWeights]:
    def normal(rows: int, columns: int) -> Tensor:
        shape = (model.num_stacked, rows, columns)
        made = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        return made.normal_(0, columns**-0.5)

    return [
        ExpertWeights(normal(2 * model.inner, model.width), normal(model.width, model.inner))
        for _ in range(NUM_LAYERS)
    ]


def time_products(
    model: Model, layers: list[ExpertWeights], rows: int, is_gated: bool
) -> Iterator[Timing]:
    """Every try at one row count, in both regimes."""
    matrices = [layer.gate_up_EIH if is_gated else layer.down_EHI for layer in layers]
    operands = Operands(model, rows, is_gated, matrices)
    wanted = operands.wanted(model.choices(rows, "spread", 1, "cuda"), 1)
    wrong = {each: error_of(operands, each, wanted) for each in tries(rows, is_gated)}
    for regime in REGIMES:
        calls = 32 if regime == "fixed" else 12
        choices = [model.choices(rows, regime, i, "cuda") for i in range(calls)]
        num_used = sum(len(x.unique()) for x in choices) / calls
        size = num_used * model.matrix_bytes(is_gated)
        for each in tries(rows, is_gated):
            if not wrong[each] < TOLERANCE:
                continue
            chosen = [operands.laid_out(x, each) for x in choices]
            took = timed(lambda i: operands.run(chosen[i], each.tile, i), calls)  # noqa: B023
            yield Timing(model.name, regime, rows, is_gated, each, took, size / took / 1e6)


def error_of(operands: Operands, each: Try, wanted: Tensor) -> float:
    """Largest relative error against the reference; infinite if a tile does not run."""
    chosen = operands.model.choices(operands.rows, "spread", 1, "cuda")
    operands.out.fill_(float("nan"))
    title = f"{operands.model.name} {operands.rows} {each}"
    try:
        operands.run(operands.laid_out(chosen, each), each.tile, 1)
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{title}: {type(error).__name__} {str(error)[:80]}")
        return float("inf")
    wrong = float((operands.out.float() - wanted).norm() / wanted.norm())
    if not wrong < TOLERANCE:
        print(f"WRONG {title}: relative error {wrong:.2g}")
    return wrong


@contextmanager
def tiles_in_use(gated: Try, plain: Try) -> Iterator[None]:
    def chosen(dtype: torch.dtype, num_rows: int, *, is_gated: bool) -> ExpertTile:
        return gated.tile if is_gated else plain.tile

    few_rows = 1 << 20 if gated.is_few else 0
    with (
        mock.patch.object(products, "expert_tile", chosen),
        mock.patch.object(products, "FEW_ROWS", few_rows),
    ):
        yield


def time_calls(model: Model, layers: list[ExpertWeights], found: list[Timing], rows: int) -> None:
    """Whole calls: with the tiles of the repository, and with the best tile of each kind."""
    for regime in REGIMES:
        calls = 16
        choices = [model.choices(rows, regime, i, "cuda") for i in range(calls)]
        x = torch.randn(rows, model.width, device="cuda").bfloat16()
        weight = torch.rand(rows, model.num_taken, device="cuda")

        def call(i: int) -> Tensor:
            return apply_experts(x, choices[i], weight, layers[i % NUM_LAYERS])  # noqa: B023

        line = f"{model.name} {regime:6} {rows:4} rows, whole: now {timed(call, calls):7.2f} µs"
        here = [x for x in found if x[:3] == (model.name, regime, rows)]
        for is_few in (True, False):
            best = {
                is_gated: min(own, key=lambda x: x.took_us).each
                for is_gated in (True, False)
                if (own := [x for x in here if x.is_gated == is_gated and x.each.is_few == is_few])
            }
            # Blocks are laid out once for both products.
            if len(best) == 2 and (is_few or best[True].tile.rows == best[False].tile.rows):
                with tiles_in_use(best[True], best[False]):
                    line += f" | best {'few' if is_few else 'many'} {timed(call, calls):7.2f}"
        print(line)


# ---- reports


def report(found: list[Timing], model: str, rows: int) -> None:
    for regime in REGIMES:
        for is_gated in (True, False):
            key = (model, regime, rows, is_gated)
            own = sorted((x for x in found if x[:4] == key), key=lambda x: x.took_us)
            line = f"{model} {regime:6} {rows:4} {'gate_up' if is_gated else 'down   '}"
            for x in own[:4]:
                line += f" | {x.took_us:6.2f} {x.terabytes_s:4.2f} {x.each}"
            print(line + (f" | worst {own[-1].took_us:.1f}" if own else ""))


def report_buckets(found: list[Timing]) -> None:
    """Per product and row count: each tile's time relative to the best, over all cases."""
    for rows in sorted({x.rows for x in found}):
        for is_gated in (True, False):
            own = [x for x in found if x.rows == rows and x.is_gated == is_gated]
            best: dict[tuple[str, str], float] = {}
            for x in own:
                key = x.model, x.regime
                best[key] = min(best.get(key, x.took_us), x.took_us)
            score: dict[Try, list[float]] = {}
            for x in own:
                score.setdefault(x.each, []).append(x.took_us / best[x.model, x.regime])
            mean = sorted((sum(y) / len(y), max(y), str(x)) for x, y in score.items())
            shown = " | ".join(f"{x:.2f} (worst {y:.2f}) {z}" for x, y, z in mean[:5])
            print(f"all {rows:4} {'gate_up' if is_gated else 'down   '}: {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="glm,q30")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--seconds", type=float, default=60, help="start no row count after this")
    parser.add_argument("--workers", type=int, default=15)
    options = parser.parse_args()
    begin = time.monotonic()
    models = [MODELS[x] for x in options.models.split(",")]
    rows_list = [int(x) for x in options.rows.split(",")]
    compile_all(models, rows_list, options.workers)
    found: list[Timing] = []
    for model in models:
        layers = make_layers(model)
        for rows in rows_list:
            if time.monotonic() - begin > options.seconds:
                break
            for is_gated in (True, False):
                found += time_products(model, layers, rows, is_gated)
            report(found, model.name, rows)
            time_calls(model, layers, found, rows)
        print(f"{time.monotonic() - begin:.1f} s")
        del layers
    report_buckets(found)


if __name__ == "__main__":
    main()
