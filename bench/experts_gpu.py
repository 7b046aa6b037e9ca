"""Compares tiles for the products of experts on a GPU, inside CUDA graphs.

usage: python -m bench.experts_gpu [--models q30,glm,mixtral] [--rows 1,...,2048] [--json FILE]

Prints µs of both products by row count, with the share of the GPU's memory rate (weights of the
experts in use, read once) or of its matrix rate, whichever is larger; the best tile of each bucket;
whole calls, and how long laying out and adding up take. "fixed": all rows choose the same experts;
"spread": random; "zipf": expert number n of a random order is chosen 1 / n as often as the first.
--tiny: a small model, on any GPU or in Triton's interpreter, only checked.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
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
from paceline.kernels.experts.triton import layout, products
from paceline.kernels.experts.triton.layout import lay_out
from paceline.kernels.experts.triton.products import ExpertTile, apply_experts, multiply_rows

ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)
REGIMES = ("fixed", "spread", "zipf")
MEMORY_RATE, MATRIX_RATE = 4.8e12, 990e12  # an H200's in bf16, by its datasheet
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
            # The largest of logits plus Gumbel noise: draws without putting back.
            rank = torch.randperm(self.num_experts, generator=random) + 1.0
            logits = -rank.log() if regime == "zipf" else torch.zeros(self.num_experts)
            noise = torch.rand(rows, self.num_experts, generator=random).clamp(1e-9, 1 - 1e-6)
            chosen = (logits - (-noise.log()).log()).topk(self.num_chosen).indices
        shared = torch.arange(self.num_experts, self.num_stacked).expand(rows, -1)
        return torch.cat((chosen, shared), 1).int().to(device)

    def matrix_bytes(self, is_gated: bool) -> int:
        return 2 * self.width * self.inner * (1 + is_gated)


MODELS = {
    "glm": Model("glm", 2048, 1536, 64, 4, 1),
    "q30": Model("q30", 2048, 768, 128, 8),
    "mixtral": Model("mixtral", 4096, 14336, 8, 2),
}
TINY = Model("tiny", 64, 32, 6, 2)


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
    cut(64, 128, 4, 4, 2)._replace(rows=16),
    cut(128, 128, 8, 3, 2)._replace(rows=16),
    cut(64, 128, 4, 4, 2)._replace(rows=32),
    cut(128, 64, 8, 5, 2)._replace(rows=32),
    cut(64, 64, 4, 6, 2)._replace(rows=64),
    cut(128, 64, 4, 4, 2)._replace(rows=64),
    cut(128, 64, 8, 4, 2)._replace(rows=64),
    cut(128, 128, 8, 4, 1)._replace(rows=64),
    cut(256, 64, 8, 5, 1)._replace(rows=64),
    cut(64, 64, 4, 4, 2)._replace(rows=128),
    cut(128, 64, 8, 6, 1)._replace(rows=128),
    cut(128, 64, 4, 3, 2)._replace(rows=128),
    cut(256, 64, 8, 4, 1)._replace(rows=128),
    cut(128, 64, 8, 4, 1)._replace(rows=256),
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
    memory_share: float
    matrix_share: float

    @property
    def share(self) -> str:
        """Of the rate that the product is nearer to."""
        if self.memory_share >= self.matrix_share:
            return f"{100 * self.memory_share:3.0f}%mem"
        return f"{100 * self.matrix_share:3.0f}%tc"


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
    for regime in regimes(rows):
        calls = 32 if regime == "fixed" else 12
        choices = [model.choices(rows, regime, i, "cuda") for i in range(calls)]
        num_used = sum(len(x.unique()) for x in choices) / calls
        size = num_used * model.matrix_bytes(is_gated)
        for each in tries(rows, is_gated):
            if not wrong[each] < TOLERANCE:
                continue
            chosen = [operands.laid_out(x, each) for x in choices]
            took = timed(lambda i: operands.run(chosen[i], each.tile, i), calls)  # noqa: B023
            operations = rows * model.num_taken * model.matrix_bytes(is_gated)  # two per 2 bytes
            shares = size / took * 1e6 / MEMORY_RATE, operations / took * 1e6 / MATRIX_RATE
            yield Timing(model.name, regime, rows, is_gated, each, took, *shares)


def regimes(rows: int) -> Sequence[str]:
    """Many rows that choose the same experts: no router does that."""
    return REGIMES if rows <= 64 else REGIMES[1:]


def error_of(operands: Operands, each: Try, wanted: Tensor, regime: str = "spread") -> float:
    """Largest relative error against the reference; infinite if a tile does not run."""
    device = operands.x.device.type
    chosen = operands.model.choices(operands.rows, regime, 1, device)
    operands.out.fill_(float("nan"))
    title = f"{operands.model.name} {operands.rows} {each}"
    try:
        operands.run(operands.laid_out(chosen, each), each.tile, 1)
        if device == "cuda":
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


def best_pairs(found: list[Timing]) -> Iterator[tuple[Timing, Timing]]:
    """The best tiles of both products, for each size of blocks: rows are laid out once for both."""
    for size in sorted({(x.each.is_few, x.each.tile.rows) for x in found}):
        own = [x for x in found if (x.each.is_few, x.each.tile.rows) == size]
        gated, plain = ([x for x in own if x.is_gated == is_gated] for is_gated in (True, False))
        if gated and plain:
            best = (min(x, key=lambda x: x.took_us) for x in (gated, plain))
            yield next(best), next(best)


def time_calls(
    model: Model, layers: list[ExpertWeights], found: list[Timing], rows: int
) -> Iterator[dict[str, Any]]:
    """Whole calls: with the tiles of the repository, and with the best ones of each block size."""
    for regime in regimes(rows):
        calls = 16
        choices = [model.choices(rows, regime, i, "cuda") for i in range(calls)]
        x = torch.randn(rows, model.width, device="cuda").bfloat16()
        weight = torch.rand(rows, model.num_taken, device="cuda")

        def call(i: int) -> Tensor:
            return apply_experts(x, choices[i], weight, layers[i % NUM_LAYERS])  # noqa: B023

        def laying(i: int) -> None:
            lay_out(choices[i], model.num_stacked, 128)  # noqa: B023

        row: dict[str, Any] = {"model": model.name, "regime": regime, "rows": rows}
        row["whole_us"] = {"now": timed(call, calls)}
        if rows > products.FEW_ROWS:
            for counted in (layout.COUNTED, 4 * layout.COUNTED):
                with mock.patch.object(layout, "COUNTED", counted):
                    row["whole_us"][f"lay_out by {counted}"] = timed(laying, calls)
        here = [x for x in found if x[:3] == (model.name, regime, rows)]
        for gated, plain in best_pairs(here):
            with tiles_in_use(gated.each, plain.each):
                row["whole_us"][f"{gated.each} {plain.each}"] = timed(call, calls)
        shown = " | ".join(f"{name} {took:.1f}" for name, took in row["whole_us"].items())
        print(f"{model.name} {regime:6} {rows:4} rows, whole, µs: {shown}", flush=True)
        yield row


# ---- reports


def report(found: list[Timing], model: str, rows: int) -> None:
    for regime in regimes(rows):
        for is_gated in (True, False):
            key = (model, regime, rows, is_gated)
            own = sorted((x for x in found if x[:4] == key), key=lambda x: x.took_us)
            line = f"{model} {regime:6} {rows:4} {'gate_up' if is_gated else 'down   '}"
            for x in own[:4]:
                line += f" | {x.took_us:6.2f} {x.share} {x.each}"
            print(line + (f" | worst {own[-1].took_us:.1f}" if own else ""), flush=True)


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


def check_tiny() -> int:
    """How many tiles are wrong for a small model."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wrong = 0
    for rows, is_gated in product((5, 100), (True, False)):
        shape = (2 * TINY.inner, TINY.width) if is_gated else (TINY.width, TINY.inner)
        matrix = torch.randn(TINY.num_stacked, *shape, device=device).half()
        operands = Operands(TINY, rows, is_gated, [matrix])
        wanted = operands.wanted(TINY.choices(rows, "zipf", 1, device), 1)
        sizes = {(x.is_few, x.tile.rows): x for x in tries(rows, is_gated)}  # no warps, no stages
        for each in sizes.values():
            each = each._replace(tile=each.tile._replace(outputs=32, inputs=32))
            wrong += not error_of(operands, each, wanted, "zipf") < TOLERANCE
        print(f"tiny {rows} {'gate_up' if is_gated else 'down'}: {len(sizes)} sizes of blocks")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="q30,glm,mixtral")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--seconds", type=float, default=360, help="start no row count after this")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(argv)
    if options.tiny:
        return check_tiny()
    begin = time.monotonic()
    models = [MODELS[x] for x in options.models.split(",")]
    rows_list = [int(x) for x in options.rows.split(",")]
    compile_all(models, rows_list, options.workers)
    found: list[Timing] = []
    whole: list[dict[str, Any]] = []
    for model in models:
        layers = make_layers(model)
        for rows in rows_list:
            if time.monotonic() - begin > options.seconds:
                print(f"no time for {model.name} with {rows} rows")
                continue
            for is_gated in (True, False):
                found += time_products(model, layers, rows, is_gated)
            report(found, model.name, rows)
            whole += time_calls(model, layers, found, rows)
        print(f"{time.monotonic() - begin:.1f} s", flush=True)
        del layers
    report_buckets(found)
    if options.json is not None:
        cells = [{**x._asdict(), "each": str(x.each)} for x in found]
        record = {"bench": "experts", "cells": cells, "whole": whole}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
