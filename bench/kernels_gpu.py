"""Times the Triton kernels of a decoder layer and of a draw on the GPU, at the sizes of two models.

Calls are captured in one graph, as in a step, over more buffers than the cache can hold. Prints
microseconds per call and the share of the GPU's memory or matrix rate.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn.functional import linear

from paceline.kernels.attention.reference import AttentionBatch
from paceline.kernels.attention.triton import tiles
from paceline.kernels.attention.triton.attend import (
    paged_attention,
    prepare_attention,
    tiles_kernel,
)
from paceline.kernels.attention.triton.work import PagedHeads
from paceline.kernels.elementwise.triton import add_rms_norm, place_heads, rms_norm, silu_and_mul
from paceline.kernels.kv_codes.reference import KvScales, encode
from paceline.kernels.linear import hopper
from paceline.kernels.linear.reference import Product
from paceline.kernels.rows import WindowRows
from paceline.kernels.sampling.reference import SlotKnobs
from paceline.kernels.sampling.triton.draw import draw

MEMORY_RATE = 4.8e12  # an H200's, by its datasheet
COLD_BYTES = 250e6  # several times the cache
PAGE_SIZE = 16
DEVICE = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a layer."""

    name: str
    hidden: int
    num_q: int
    num_kv: int
    head_size: int
    intermediate: int

    @property
    def qkv_width(self) -> int:
        return (self.num_q + 2 * self.num_kv) * self.head_size


MODELS = (Model("sm", 576, 9, 3, 64, 1536), Model("l8", 4096, 32, 8, 128, 14336))


@dataclass(slots=True)
class Cell:
    """One line of the table."""

    kernel: str
    name: str
    # Takes the number of buffer sets; returns one call for each.
    make: Callable[[int], list[Callable[[], Any]]]
    num_bytes: float  # the fewest bytes that a call can move
    num_operations: float = 0.0  # given if arithmetic is the limit


def attention_cell(
    model: Model,
    rows: list[tuple[int, int]],
    width: int,
    dtype: torch.dtype,
    *,
    is_fp8: bool = False,
) -> Cell:
    """Rows as (queries, KV length); width 0: packed, as a mixed step has them. fp8: the pages."""
    num_entries = sum(width or count for count, _ in rows)
    total = sum(length for _, length in rows)
    size = dtype.itemsize
    cache_bytes = 2 * total * model.num_kv * model.head_size * (1 if is_fp8 else size)
    pairs = sum(count * length - count * (count - 1) / 2 for count, length in rows)

    def make(num_sets: int) -> list[Callable[[], Any]]:
        qkv_TD, caches, batch = _operands(model, rows, width, num_sets, dtype)
        rest: tuple[Any, ...] = (batch, model.head_size**-0.5)
        if is_fp8:
            scales = KvScales(*torch.ones(2, model.num_kv, device=DEVICE))
            caches, rest = encode(caches, torch.ones((), device=DEVICE)), (*rest, scales)
        return [partial(paged_attention, qkv_TD, c[0], c[1], *rest) for c in caches]

    counts = {count for count, _ in rows}
    kind = f"{len(rows)} x {rows[0][0]} at {rows[0][1]}"
    if len(counts) > 1:
        kind = f"{len(rows) - 1} x {rows[0][0]} at {rows[0][1]} + {rows[-1][0]}"
    return Cell(
        "paged_attention",
        f"{model.name} {kind}{', fp8 pages' if is_fp8 else ''}",
        make,
        cache_bytes + 2 * num_entries * model.num_q * model.head_size * size,
        4 * pairs * model.num_q * model.head_size if max(counts) > 16 else 0.0,
    )


def tiles_cells(model: Model, rows: list[tuple[int, int]], dtype: torch.dtype) -> Iterator[Cell]:
    """Attention of prompts: by the kernel for this GPU, and by the plain kernel."""
    same = attention_cell(model, rows, 0, dtype)
    for name, chosen in (
        ("chosen", tiles_kernel),
        ("plain", lambda *_: tiles.attend_tiles),
    ):

        def make(num_sets: int, chosen: Callable[..., Any] = chosen) -> list[Callable[[], Any]]:
            qkv_TD, caches, batch = _operands(model, rows, 0, num_sets, dtype)
            out_TD = qkv_TD.new_empty(len(qkv_TD), model.num_q * model.head_size)
            rest = (batch, batch.work, model.head_size**-0.5, out_TD)
            return [
                partial(
                    chosen(qkv_TD, *c, batch), qkv_TD, PagedHeads(c[0], c[1], None, None), *rest
                )
                for c in caches
            ]

        label = f"{same.name}, {name}"
        yield Cell("attend_tiles", label, make, same.num_bytes, same.num_operations)


def _operands(
    model: Model, rows: list[tuple[int, int]], width: int, num_sets: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """The product in front, sets of keys and values, and the batch with its lists."""
    num_entries = sum(width or count for count, _ in rows)
    batch, num_slots = _batch(model, rows, width)
    prepare_attention(batch, num_entries, model.num_kv)
    qkv_TD = torch.randn(num_entries, model.qkv_width, device=DEVICE).to(dtype)
    shape = (num_sets, 2, model.num_kv, num_slots, model.head_size)
    return qkv_TD, torch.empty(shape, device=DEVICE, dtype=dtype).normal_(), batch


def _batch(model: Model, rows: list[tuple[int, int]], width: int) -> tuple[AttentionBatch, int]:
    """Pages in random order; the page table is as wide as for 8,192 tokens, or wider."""
    num_pages = [-(-length // PAGE_SIZE) for _, length in rows]
    order = torch.randperm(sum(num_pages), device=DEVICE).int()
    width_P = max(8192 // PAGE_SIZE, *num_pages)
    table_SP = torch.full((len(rows), width_P), -1, dtype=torch.int32, device=DEVICE)
    for row, pages in enumerate(order.split(num_pages)):
        table_SP[row, : len(pages)] = pages
    start = torch.tensor([0, *(width or count for count, _ in rows)]).cumsum(0)[:-1]
    integers = (
        start,
        torch.tensor([length for _, length in rows]),
        torch.arange(len(rows)),
        torch.tensor([count for count, _ in rows]),
    )
    row_start_B, length_B, slot_B, query_len_B = (x.to(torch.int32).to(DEVICE) for x in integers)
    batch = AttentionBatch(
        row_start_B=row_start_B,
        length_B=length_B,
        slot_B=slot_B,
        table_SP=table_SP,
        page_size=PAGE_SIZE,
        group_size=model.num_q // model.num_kv,
        query_len_B=query_len_B,
        max_query_len=width or sum(count for count, _ in rows),
    )
    return batch, sum(num_pages) * PAGE_SIZE


def prepare_cell(model: Model, num_rows: int, length: int) -> Cell:
    def make(num_sets: int) -> list[Callable[[], Any]]:
        batch, _ = _batch(model, [(1, length)] * num_rows, 1)
        return [partial(prepare_attention, batch, num_rows, model.num_kv)] * num_sets

    return Cell("prepare", f"{num_rows} at {length}", make, 0.0)


def layer_cells(model: Model, rows: int, dtype: torch.dtype) -> Iterator[Cell]:
    """The elementwise kernels of a layer."""
    size = dtype.itemsize
    rotation_TH = torch.polar(
        torch.ones(rows, model.head_size // 2), torch.randn(rows, model.head_size // 2)
    ).to(DEVICE)
    slot_T = torch.arange(rows, device=DEVICE, dtype=torch.int32)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=DEVICE, dtype=dtype).normal_()

    def norms(num_sets: int) -> list[Callable[[], Any]]:
        x, weight = numbers(num_sets, rows, model.hidden), numbers(model.hidden)
        return [partial(rms_norm, x, weight, 1e-5) for x in x]

    def adds(num_sets: int) -> list[Callable[[], Any]]:
        x, weight = numbers(num_sets, 2, rows, model.hidden), numbers(model.hidden)
        return [partial(add_rms_norm, x[0], x[1], weight, 1e-5) for x in x]

    def gates(num_sets: int) -> list[Callable[[], Any]]:
        x = numbers(num_sets, rows, 2 * model.intermediate)
        return [partial(silu_and_mul, x) for x in x]

    def heads(num_sets: int) -> list[Callable[[], Any]]:
        qkv = numbers(num_sets, rows, model.qkv_width)
        cache = numbers(num_sets, 2, model.num_kv, rows, model.head_size)
        return [
            partial(place_heads, x, rotation_TH, None, c[0], c[1], slot_T)
            for x, c in zip(qkv, cache, strict=True)
        ]

    name = f"{model.name} {rows} rows"
    hidden_bytes, heads_bytes = rows * model.hidden * size, rows * model.qkv_width * size
    cache_bytes = 2 * rows * model.num_kv * model.head_size * size
    yield Cell("rms_norm", name, norms, 2 * hidden_bytes)
    yield Cell("add_rms_norm", name, adds, 4 * hidden_bytes)
    yield Cell("silu_and_mul", name, gates, 3 * rows * model.intermediate * size)
    yield Cell("place_heads", name, heads, 2 * heads_bytes + cache_bytes)


def gate_up_cells(model: Model, rows: int, dtype: torch.dtype) -> Iterator[Cell]:
    """Gate-up product of many rows with activation: ours, and torch's with a separate kernel."""
    width = model.intermediate
    num_operations = 4.0 * rows * width * model.hidden
    num_bytes = (rows * (model.hidden + width) + 2 * width * model.hidden) * dtype.itemsize
    for name, multiply in (
        ("ours", hopper.linear_silu),
        ("torch's, silu_and_mul", lambda x, product: silu_and_mul(linear(x, product.weight_NK))),
    ):

        def make(num_sets: int, multiply: Callable[..., Any] = multiply) -> list[Callable[[], Any]]:
            shapes = ((num_sets, rows, model.hidden), (num_sets, 2 * width, model.hidden))
            x, weight = (torch.empty(s, device=DEVICE, dtype=dtype).normal_() for s in shapes)
            return [partial(multiply, x, Product(w, None)) for x, w in zip(x, weight, strict=True)]

        label = f"{model.name} {rows} rows, {name}"
        yield Cell("linear_silu", label, make, num_bytes, num_operations)


def draw_cells(vocab_size: int, num_rows: int, dtype: torch.dtype) -> Iterator[Cell]:
    """A token for each row, from logits as flat as a random model's or as steep as a real one's.

    Each set has other noise, because the time of a draw depends on the winner.
    """
    slot_B = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    none_B0 = slot_B.new_empty(num_rows, 0)
    num_bytes = num_rows * vocab_size * dtype.itemsize

    def full(value: float, of: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=of, device=DEVICE)

    for name, temperature, top_k, top_p in (
        ("greedy", 0.0, 0, 1.0),
        ("all", 0.8, 0, 1.0),
        ("top_p", 0.8, 0, 0.95),
        ("top_k", 0.8, 50, 1.0),
        ("both", 0.6, 20, 0.95),
    ):
        seed_S2 = torch.stack((slot_B, slot_B), 1)
        numbers = (full(temperature), full(top_k, torch.int32), full(top_p), full(0.0))
        knobs = SlotKnobs(*numbers, seed_S2)
        for kind, spread in (("flat", 0.7), ("steep", 4.0)):

            def make(num_sets: int, knobs: SlotKnobs = knobs, spread: float = spread) -> list[Any]:
                logits = torch.empty(num_sets, num_rows, vocab_size, device=DEVICE, dtype=dtype)
                logits.normal_(std=spread)
                one_B = torch.ones_like(slot_B)
                first_B = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
                rows = (
                    WindowRows(slot_B, first_B, one_B, full(n, torch.int32), none_B0)
                    for n in range(num_sets)
                )
                return [partial(draw, x, r, knobs) for x, r in zip(logits, rows, strict=True)]

            yield Cell("draw", f"{num_rows} x {vocab_size}, {name}, {kind}", make, num_bytes)


LONG = ((1, 16000), (1, 32000), (1, 64000), (1, 128000), (8, 16000), (64, 4000))


def all_cells(dtype: torch.dtype) -> Iterator[Cell]:
    for (num_rows, length), width, is_fp8 in product(LONG, (1, 4), (False, True)):
        rows = [(width, length)] * num_rows
        yield attention_cell(MODELS[1], rows, width, dtype, is_fp8=is_fp8)
    for model in MODELS:
        for length in (300, 4000):
            for num_rows in (1, 8, 32, 64, 256):
                for width in (1, 4):
                    rows = [(width, length)] * num_rows
                    yield attention_cell(model, rows, width, dtype)
        yield attention_cell(model, [(4096, 4096)], 0, dtype)
        yield attention_cell(model, [(2048, 2048)] * 8, 0, dtype)
        yield attention_cell(model, [(2048, 2048)] * 8, 0, dtype, is_fp8=True)
        yield attention_cell(model, [*[(1, 300)] * 32, (512, 512)], 0, dtype)
        for count, length, num_rows in ((512, 512, 8), (4096, 4096, 1), (2000, 4000, 4)):
            yield from tiles_cells(model, [(count, length)] * num_rows, dtype)
        for num_rows in (1, 64, 256):
            yield from layer_cells(model, num_rows, dtype)
        for num_rows in (512, 1024, 2048, 4096, 8192):
            yield from gate_up_cells(model, num_rows, dtype)
    yield prepare_cell(MODELS[1], 1, 300)
    yield prepare_cell(MODELS[1], 64, 4000)
    yield prepare_cell(MODELS[1], 256, 300)
    for vocab_size in (49152, 128256):
        for num_rows in (1, 64, 256):
            yield from draw_cells(vocab_size, num_rows, dtype)


def microseconds(cell: Cell, repeats: int = 5) -> float:
    """Median over replays of the mean call."""
    num_sets = int(min(max(COLD_BYTES // max(cell.num_bytes, 1.0), 2), 128))
    calls = cell.make(num_sets)
    calls[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[repeats // 2]


def measure(cell: Cell) -> dict[str, Any]:
    taken = microseconds(cell)
    found = {"kernel": cell.kernel, "case": cell.name, "us": round(taken, 2)}
    if cell.num_operations:
        found["tflops"] = round(cell.num_operations / taken / 1e6, 1)
    elif cell.num_bytes:
        found["memory_share"] = round(cell.num_bytes / taken * 1e6 / MEMORY_RATE, 3)
    return found


def show(found: dict[str, Any]) -> None:
    share, rate = found.get("memory_share"), found.get("tflops")
    note = f"{100 * share:5.1f} % of memory rate" if share is not None else ""
    note = f"{rate:5.0f} TFLOP/s" if rate is not None else note
    print(f"{found['kernel']:16} {found['case']:26} {found['us']:9.2f} us  {note}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("filters", nargs="*", help="only lines that contain one of these")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    rows = []
    for cell in all_cells(getattr(torch, options.dtype)):
        label = f"{cell.kernel} {cell.name}"
        if options.filters and not any(text in label for text in options.filters):
            continue
        rows.append(measure(cell))
        if not options.json:
            show(rows[-1])
    if options.json:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "cells": rows}, indent=1))


if __name__ == "__main__":
    main()
