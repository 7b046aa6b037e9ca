"""Matrix products of a decode step on a GPU: our tiles against cuBLAS, inside CUDA graphs.

Run as `python -m bench.gemm_gpu`: prints µs and TB/s of each product by row count, then whole layer
stacks. `--write` also writes the best tile of each shape to paceline/kernels/linear/tiles.json, or
to the file given by `--table`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from bench.gemm_tiles import CompileOnly, candidates, variants
from paceline.kernels.linear import reference, tiles
from paceline.kernels.linear.reference import HeadPlaces, NormedRows, Product
from paceline.kernels.linear.tiles import Tile
from paceline.kernels.linear.triton import products

ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
# More than the caches hold, so that every call reads its weights from memory.
WORKING_SET_BYTES = 400e6
EPS = 1e-5
LOGITS = torch.float32  # the plain products are heads
# Separate kernels that cuBLAS needs and our products include: norm, rotation, activation.
BESIDE_US = 3.0
TOLERANCE = 6e-3  # bf16 results of fp32 sums


@dataclass(frozen=True)
class Shape:
    """One product of one model."""

    end: str
    n: int
    k: int
    head: int = 64
    num_kv: int = 1

    def __str__(self) -> str:
        return f"{self.end} {self.n}x{self.k}"

    @property
    def num_copies(self) -> int:
        return max(2, min(64, round(WORKING_SET_BYTES / (2 * self.n * self.k))))


MODELS = {
    "sm": [
        Shape("heads", 960, 576, 64, 3),
        Shape("added", 576, 576),
        Shape("gated", 3072, 576),
        Shape("added", 576, 1536),
        Shape("plain", 49152, 576),
    ],
    "l8": [
        Shape("heads", 6144, 4096, 128, 8),
        Shape("added", 4096, 4096),
        Shape("gated", 28672, 4096),
        Shape("added", 4096, 14336),
        Shape("plain", 128256, 4096),
    ],
}


def square_counts(shape: Shape, rows: int) -> list[int]:
    """Numbers of partial sums of squares that the product in front may write; the likely one first.

    In front of the heads is the down projection or nothing; in front of gate and up, that of
    attention.
    """
    if shape.end not in ("heads", "gated"):
        return [1]
    is_deep = shape.end == "heads"
    counts = {
        -(-front.n // (products.SUMMED if x.is_apart else x.block_n))
        for front in (x for model in MODELS.values() for x in model)
        if front.end == "added" and front.n == shape.k and (front.k > front.n) == is_deep
        for x in candidates(front.n, front.k, rows)
    }
    return sorted(counts - {1}) + [1] * is_deep


class Operands:
    """Tensors of one product at one row count; the rows of a norm have `num_squares` sums each."""

    def __init__(
        self, shape: Shape, rows: int, device: str, dtype: torch.dtype, num_squares: int
    ) -> None:
        torch.manual_seed(rows)
        self.shape = shape
        self.x = torch.randn(rows, shape.k, device=device).to(dtype)
        squares = torch.rand(rows, num_squares, device=device) + 0.5
        self.rows = NormedRows(self.x, squares * (shape.k / num_squares), EPS)
        self.residual = torch.randn(rows, shape.n, device=device)
        self.norm = torch.rand(shape.n, device=device).to(dtype) + 0.5
        key = torch.zeros(shape.num_kv, 512, shape.head, device=device, dtype=dtype)
        angle = torch.rand(rows, shape.head // 2, device=device)
        slot = torch.arange(rows, device=device, dtype=torch.int32)
        rotation = torch.polar(torch.ones_like(angle), angle)
        self.places = HeadPlaces(rotation, key, torch.zeros_like(key), slot)

    def run(self, ops: Any, product: Product, **tile: Any) -> Any:
        """Call the product in `ops`: linear/reference or linear/triton/products."""
        end = self.shape.end
        if end == "plain":
            return ops.linear(self.x, product, LOGITS, **tile)
        if end == "gated":
            return ops.norm_linear_silu(self.rows, product, **tile)
        if end == "heads":
            return ops.norm_linear_heads(self.rows, product, self.places, **tile)
        return ops.linear_add(self.x, product, self.residual, self.norm, EPS, **tile)

    def run_cublas(self, product: Product) -> Tensor:
        """The product alone."""
        if self.shape.end == "plain":
            return torch.mm(self.x, product.weight_NK.t(), out_dtype=LOGITS)
        return torch_linear(self.x, product.weight_NK)

    def outputs(self, result: Any) -> list[Tensor]:
        """Everything that a call wrote."""
        if self.shape.end == "heads":
            num_q = self.shape.n - 2 * self.shape.num_kv * self.shape.head
            return [result[:, :num_q], self.places.key_NSH, self.places.value_NSH]
        if self.shape.end == "added":
            return [self.residual, result.x_TD, result.squares_TP.sum(1)]
        return [result]


def timed(call: Callable[[int], Any], calls: int) -> float:
    """µs of one call, from replays of a graph that holds `calls` of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            call(i)
    graph.replay()
    best = float("inf")
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / (2 * calls))
    return best


def wanted_of(shape: Shape, rows: int, product: Product) -> list[Tensor]:
    """What the reference writes, from fp32 sums."""
    operands = Operands(
        shape, rows, "cuda", product.weight_NK.dtype, square_counts(shape, rows)[-1]
    )
    return operands.outputs(operands.run(reference, product))


def error_of(wanted: list[Tensor], shape: Shape, rows: int, product: Product, tile: Tile) -> float:
    """Largest relative error of what the product writes."""
    operands = Operands(
        shape, rows, "cuda", product.weight_NK.dtype, square_counts(shape, rows)[-1]
    )
    found = operands.outputs(operands.run(products, product, tile=tile))
    pairs = [(x.float(), y.float()) for x, y in zip(wanted, found, strict=True)]
    return max(float((x - y).norm() / x.norm()) for x, y in pairs)


def time_shape(shape: Shape, rows_list: list[int]) -> Iterator[tuple[int, str, Any, float]]:
    """(rows, contender, tile, µs) of cuBLAS and of every candidate."""
    weights = [
        torch.empty(shape.n, shape.k, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
        for _ in range(shape.num_copies)
    ]
    calls = len(weights) * max(1, round(24 / len(weights)))
    for rows in rows_list:
        operands = Operands(shape, rows, "cuda", torch.bfloat16, square_counts(shape, rows)[0])

        def product(i: int) -> Product:
            return Product(weights[i % len(weights)], None)

        wanted = wanted_of(shape, rows, product(0))
        yield rows, "cublas", None, timed(lambda i: operands.run_cublas(product(i)), calls)  # noqa: B023
        for tile in candidates(shape.n, shape.k, rows):
            try:
                wrong = error_of(wanted, shape, rows, product(0), tile)
                if not wrong < TOLERANCE:
                    print(f"WRONG {shape} {rows} {tuple(tile)}: relative error {wrong:.2g}")
                    continue
                took = timed(
                    lambda i: operands.run(products, product(i), tile=tile),  # noqa: B023
                    calls,
                )
            except Exception as error:
                print(f"{shape} {rows} {tuple(tile)}: {type(error).__name__} {str(error)[:80]}")
                continue
            yield rows, "own", tile, took


Job = tuple[Shape, Tile, int]


def compile_all(shapes: list[Shape], rows_list: list[int], workers: int) -> None:
    """Fill Triton's cache from many processes that do not use the GPU."""
    jobs = list(dict.fromkeys(x for rows in rows_list for x in _jobs(shapes, rows)))
    begin = time.monotonic()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        failed = [x for x in pool.map(_compile, jobs, chunksize=2) if x]
    print(f"compiled {len(jobs)} tiles in {time.monotonic() - begin:.1f} s; {failed[:4]}")


def _jobs(shapes: list[Shape], rows: int) -> Iterator[Job]:
    """Everything that the products alone and the stacks launch."""
    for shape in shapes:
        for tile in candidates(shape.n, shape.k, rows):
            for variant in variants(tile) if shape.end != "plain" else [tile]:
                for num_squares in square_counts(shape, rows):
                    yield shape, variant, num_squares
                if shape.end == "added" and shape.k > shape.n:  # the last layer's share
                    yield replace(shape, end="plain"), variant, 1


def _compile(job: Job) -> str | None:
    shape, tile, num_squares = job
    try:
        with CompileOnly():
            rows = 1 if tile.block_t == 1 else 8
            operands = Operands(shape, rows, "cpu", torch.bfloat16, num_squares)
            weight = torch.empty(shape.n, shape.k, dtype=torch.bfloat16)
            operands.run(products, Product(weight, None), tile=tile)
    except Exception as error:
        return f"{shape} {tuple(tile)}: {type(error).__name__} {str(error)[:120]}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="sm,l8")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--seconds", type=float, default=600, help="stop after about this long")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--json", type=Path, help="every timing")
    parser.add_argument("--write", action="store_true", help="update the table of the repository")
    parser.add_argument("--table", type=Path, help="with --write: another file for the table")
    options = parser.parse_args()
    begin = time.monotonic()
    shapes = [x for name in options.models.split(",") for x in MODELS[name]]
    rows_list = [int(x) for x in options.rows.split(",")]
    compile_all(shapes, rows_list, options.workers)
    found: list[tuple[str, int, str, Any, float]] = []
    print(f"{time.monotonic() - begin:.1f} s")
    for shape in shapes:
        for rows, who, tile, took in time_shape(shape, rows_list):
            found.append((str(shape), rows, who, tile, took))
            if time.monotonic() - begin > 0.6 * options.seconds:
                break
    print(f"{time.monotonic() - begin:.1f} s for {len(found)} timings")
    report(shapes, rows_list, found)
    if options.json:
        options.json.write_text(json.dumps(found))
    if options.write:
        fill_table(found)
    for name in options.models.split(","):
        time_stacks(name, rows_list, found if options.write else [], begin + options.seconds)
        print(f"{time.monotonic() - begin:.1f} s")
        if options.write:
            (options.table or tiles.FILE).write_text(table_text())


def report(shapes: list[Shape], rows_list: list[int], found: list[Any]) -> None:
    for shape in shapes:
        for rows in rows_list:
            here = sorted((x for x in found if x[:2] == (str(shape), rows)), key=lambda x: x[4])
            cublas = [x[4] for x in here if x[2] == "cublas"]
            own = [x for x in here if x[2] == "own"]
            size = 2 * shape.n * shape.k
            line = f"{shape!s:22} {rows:4}"
            for took in cublas:
                line += f"  cublas {took:7.2f} µs {size / took / 1e6:5.2f}"
            for _, _, _, tile, took in own[:3]:
                line += f" | {took:7.2f} {size / took / 1e6:5.2f} {short(tile)}"
            if own:
                line += f" | worst {own[-1][4]:.1f}"
            print(line)


def time_stacks(name: str, rows_list: list[int], found: list[Any], deadline: float) -> None:
    """Products and norms of all layers without attention, µs: ours, ours in turn, cuBLAS."""
    from bench.gemm_stack import Stack

    stack = Stack(name)
    count = len(stack.layers)
    for rows in rows_list:
        if time.monotonic() > deadline:
            break
        residual, rotation, inputs = stack.inputs(rows)
        if found and rows in tiles.BUCKETS:
            tune(stack, name, rows, found)
        line = f"{name} {rows:4} rows, {count} layers: difference {stack.difference(rows):.1e}"
        for title, is_fused, is_dependent in VARIANTS:
            with launched(is_dependent):
                took = timed(lambda _: stack.run(residual, rotation, inputs, is_fused), 1)  # noqa: B023
            line += f" | {title} {took:8.1f} ({took / count:6.2f} per layer)"
        print(line)


def tune(stack: Any, name: str, rows: int, found: list[Any], best_of: int = 2) -> None:
    """Choose among the best tiles of each product by the time of the whole stack."""
    residual, rotation, inputs = stack.inputs(rows)
    known = tiles._table().setdefault(torch.cuda.get_device_name(), {})
    shapes = [str(x) for x in MODELS[name][:4]]

    def time_with(choices: dict[str, Any]) -> float:
        for shape, choice in choices.items():
            known.setdefault(shape, {})[str(rows)] = choice
        stack.forget()
        return timed(lambda _: stack.run(residual, rotation, inputs, True), 1)

    best = {x: known.get(x, {}).get(str(rows), "cublas") for x in shapes}
    least = time_with(best)
    for shape in shapes:
        here = [x for x in found if x[:2] == (shape, rows)]
        own = sorted((x for x in here if x[2] == "own"), key=lambda x: x[4])
        cublas = min((x[4] for x in here if x[2] == "cublas"), default=0.0)
        # cuBLAS needs separate kernels that our products include.
        choices: list[Any] = [x[3] for x in own[:best_of] if x[4] < 1.5 * cublas]
        choices = [y for x in choices for y in variants(x)]
        choices.append("cublas")
        tried = [(least, best[shape])]
        tried += [(time_with({shape: x}), x) for x in choices if x != best[shape]]
        tried.sort(key=lambda x: x[0])
        least, best[shape] = tried[0]
        time_with(best)
        shown = [f"{x:.0f} {'cublas' if y == 'cublas' else short(y)}" for x, y in tried]
        print(f"   {rows} {shape}: {', '.join(shown)}")
    # One cuBLAS product between fused ones may be slow where all of them would not be.
    if time_with(dict.fromkeys(shapes, "cublas")) > least:
        time_with(best)


VARIANTS = (("fused", True, True), ("in turn", True, False), ("cuBLAS", False, True))


@contextmanager
def launched(is_dependent: bool) -> Iterator[None]:
    """Without dependent launches, if asked: each kernel starts after the one before has ended."""
    launch = products._launch
    if not is_dependent:
        products._launch = lambda num_warps, is_dependent: launch(num_warps, False)
    try:
        yield
    finally:
        products._launch = launch


def short(tile: Any) -> str:
    tile = Tile(*tile)
    rest = f"w{tile.warps}d{tile.depth}s{tile.splits}{'+' * tile.is_apart}a{tile.ahead}"
    return f"{tile.kind}{tile.block_t}.{tile.block_n}.{tile.block_k}.{rest}"


def fill_table(found: list[tuple[str, int, str, Any, float]]) -> None:
    """The fastest of each bucket at its largest row count; `tune` refines the choice."""
    known = tiles._table().setdefault(torch.cuda.get_device_name(), {})
    for shape, rows, _, _, _ in found:
        if rows in tiles.BUCKETS:
            here = [x for x in found if x[:2] == (shape, rows)]
            beside = 0.0 if shape.startswith("plain") else BESIDE_US
            best = min(here, key=lambda x: x[4] + beside * (x[2] == "cublas"))
            known.setdefault(shape, {})[str(rows)] = "cublas" if best[2] == "cublas" else best[3]
    tiles.pick_tile.cache_clear()


def table_text() -> str:
    """JSON with one tile per line."""
    gpus = []
    for gpu, shapes in tiles._table().items():
        blocks = []
        for shape, buckets in shapes.items():
            lines = [f"   {json.dumps(x)}: {json.dumps(y)}" for x, y in buckets.items()]
            blocks.append(f"  {json.dumps(shape)}: {{\n" + ",\n".join(lines) + "\n  }")
        gpus.append(f" {json.dumps(gpu)}: {{\n" + ",\n".join(blocks) + "\n }")
    return "{\n" + ",\n".join(gpus) + "\n}\n"


if __name__ == "__main__":
    main()
