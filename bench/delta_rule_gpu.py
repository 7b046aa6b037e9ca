"""The gated delta rule of one layer on a GPU: decode and verify steps, and prompts.

Run as `python -m bench.delta_rule_gpu [file.json]`. It needs torch and Triton. Calls are captured
in one graph, over more states than a cache holds.

A step reads and writes each state once and replays accepted drafts from kept inputs. Beside it
stands the alternative, a state after each position of a window (K + 1 writes, no replay).
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.kernels_gpu import COLD_BYTES, DEVICE, MEMORY_RATE, Cell, microseconds
from paceline.kernels.delta_rule.reference import (
    DeltaRows,
    DeltaSizes,
    DeltaState,
    DeltaWeights,
    num_kept,
)
from paceline.kernels.delta_rule.triton import apply
from paceline.kernels.delta_rule.triton.apply import delta_rule

SIZES = {"nv32": DeltaSizes(16, 32, 128, 128), "nv48": DeltaSizes(16, 48, 128, 128)}
ROWS, DRAFTS, PROMPTS = (1, 8, 64), (0, 1, 3, 7), (512, 4096, 32000)
DTYPE = torch.bfloat16
# Values of a program, its warps, positions loaded at once.
TILES = [
    (v, w, p) for v, w in ((8, 1), (16, 1), (16, 2), (32, 2), (32, 4), (64, 4)) for p in (4, 8)
]
# Values, warps and stages of a program that passes states; warps of one that prepares a chunk.
PASSES = [(32, 4, 2, 4), (32, 4, 3, 4), (32, 8, 2, 8), (64, 4, 2, 8), (64, 8, 2, 8), (16, 4, 2, 8)]


def numbers(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def weights_of(sizes: DeltaSizes) -> DeltaWeights:
    return DeltaWeights(
        numbers(sizes.channels, sizes.conv_size) / 2,
        -numbers(sizes.num_value_heads, dtype=torch.float32).exp() / 8,
        numbers(sizes.num_value_heads, dtype=torch.float32),
    )


def state_of(sizes: DeltaSizes, num_slots: int, max_k: int, num_saved: int) -> DeltaState:
    head = (sizes.num_value_heads, sizes.value_size, sizes.key_size)
    kept, taps = num_kept(max_k, sizes.conv_size), sizes.conv_size - 1
    return DeltaState(
        torch.zeros(num_slots, *head, device=DEVICE),
        numbers(num_slots, kept, sizes.width),
        torch.zeros(num_saved, *head, device=DEVICE),
        numbers(num_saved, taps, sizes.width),
    )


def rows_of(
    num_rows: int, query_len: int, committed: int, replayed: int, marks: list[int]
) -> DeltaRows:
    """Rows at position 1000, each with `query_len` entries."""

    def full(value: int) -> Tensor:
        return torch.full((num_rows,), value, dtype=torch.int32, device=DEVICE)

    index_B = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    mark_len_BM = torch.tensor([marks or [-1]] * num_rows, dtype=torch.int32, device=DEVICE)
    num_marks = mark_len_BM.shape[1]
    entry_BM = torch.arange(num_rows * num_marks, dtype=torch.int32, device=DEVICE)
    return DeltaRows(
        index_B,
        index_B * query_len,
        full(query_len),
        full(1000),
        full(committed),
        full(1000 - replayed),
        mark_len_BM,
        entry_BM.view(num_rows, num_marks),
        query_len,
    )


def state_bytes(sizes: DeltaSizes) -> int:
    return 4 * sizes.num_value_heads * sizes.value_size * sizes.key_size


def step_cell(sizes: DeltaSizes, num_rows: int, k: int, replayed: int, keeps_states: bool) -> Cell:
    """`keeps_states`: the alternative, as marks after all positions of the window but the last."""
    marks = [1001 + i for i in range(k)] if keeps_states else []
    rows = rows_of(num_rows, k + 1, k + 1 if keeps_states else 1, replayed, marks)
    weights = weights_of(sizes)
    num_states = 2 + len(marks)
    itemsize = DTYPE.itemsize
    # Inputs: own and kept are read, own are written; outputs are written.
    num_inputs = 2 * (k + 1) + replayed + sizes.conv_size - 1
    columns = num_inputs * sizes.width + (k + 1) * sizes.num_value_heads * sizes.value_size
    num_bytes = num_rows * (num_states * state_bytes(sizes) + columns * itemsize)

    def make(num_sets: int) -> list[Callable[[], Any]]:
        num_saved = num_rows * len(marks)
        calls: list[Callable[[], Any]] = []
        for _ in range(num_sets):
            state = state_of(sizes, num_rows, k, num_saved)
            input_TP = numbers(num_rows * (k + 1), sizes.width)
            calls.append(partial(delta_rule, input_TP, weights, sizes, state, rows))
        return calls

    return Cell("delta_rule", f"{num_rows} rows, K {k}, {replayed} replayed", make, num_bytes)


def prompt_cell(sizes: DeltaSizes, length: int) -> Cell:
    """Operations of the recurrence: 6 K V for each token and head."""
    rows = rows_of(1, length, length, 0, [])
    operations = 6.0 * length * sizes.num_value_heads * sizes.key_size * sizes.value_size

    def make(num_sets: int) -> list[Callable[[], Any]]:
        weights, state = weights_of(sizes), state_of(sizes, 1, 0, 0)
        input_TP = numbers(length, sizes.width)
        return [partial(delta_rule, input_TP, weights, sizes, state, rows)] * 2

    return Cell("delta_rule", f"prompt of {length}", make, COLD_BYTES, operations)


def steps(name: str) -> Iterator[dict[str, Any]]:
    sizes = SIZES[name]
    for num_rows in ROWS:
        for k in DRAFTS:
            for replayed, keeps_states in ((k // 2, False), (k, False), (0, True)):
                if keeps_states and k == 0:
                    continue
                cell = step_cell(sizes, num_rows, k, replayed, keeps_states)
                taken = microseconds(cell)
                yield {
                    "sizes": name,
                    "rows": num_rows,
                    "k": k,
                    "replayed": replayed,
                    "keeps_states": keeps_states,
                    "us": round(taken, 2),
                    "mb": round(cell.num_bytes / 1e6, 2),
                    "share": round(cell.num_bytes / taken * 1e6 / MEMORY_RATE, 3),
                }


def prompts(name: str) -> Iterator[dict[str, Any]]:
    for length in PROMPTS:
        cell = prompt_cell(SIZES[name], length)
        taken = microseconds(cell)
        rate = cell.num_operations / taken / 1e6
        yield {"sizes": name, "prompt": length, "us": round(taken, 1), "tflops": round(rate, 1)}


def kernels_of_a_prompt(name: str, length: int) -> dict[str, Any]:
    """µs of each kernel, as the profiler sees them."""
    (call, _) = prompt_cell(SIZES[name], length).make(2)
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = {x.key: round(x.device_time_total, 1) for x in profile.key_averages()}
    return {"sizes": name, "prompt": length, "kernels": found}


@contextmanager
def constants(**values: int) -> Iterator[None]:
    before = {name: getattr(apply, name) for name in values}
    try:
        for name, value in values.items():
            setattr(apply, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(apply, name, value)


def sweep() -> Iterator[dict[str, Any]]:
    """Tiles against each other; one that does not fit says so."""
    sizes = SIZES["nv32"]
    for values, warps, positions in TILES:
        tile = {"RECURRENT_VALUES": values, "RECURRENT_WARPS": warps, "POSITIONS": positions}
        with constants(**tile):
            for num_rows, k in ((1, 0), (1, 3), (8, 3), (64, 0), (64, 3), (64, 7)):
                cell = step_cell(sizes, num_rows, k, k // 2, False)
                yield {"tile": [values, warps, positions], "case": cell.name, **_tried(cell)}
    for values, warps, stages, prepare_warps in PASSES:
        tile = {"PASSED_VALUES": values, "PASS_WARPS": warps, "PASS_STAGES": stages}
        with constants(**tile, PREPARE_WARPS=prepare_warps):
            found: dict[str, Any] = {"pass": [values, warps, stages, prepare_warps]}
            try:
                yield {**found, **kernels_of_a_prompt("nv32", 4096)}
            except Exception as error:
                yield {**found, "error": str(error)[:200]}


def _tried(cell: Cell) -> dict[str, Any]:
    try:
        return {"us": round(microseconds(cell), 2)}
    except Exception as error:
        return {"error": str(error)[:200]}


def check(text: str) -> Iterator[dict[str, Any]]:
    """Cases of the tests against their reference: those with this text in their name and type."""
    from tests.kernels.cases import pairs

    for case in pairs.all_triton_cases():
        if case.operation in ("delta_rule", "gated_norm", "sigmoid_mul"):
            for dtype in case.dtypes:
                if text not in f"{case} {dtype}":
                    continue
                result = "agrees"
                try:
                    pairs.check(case, DEVICE, dtype)
                except Exception:
                    result = traceback.format_exc()[-1200:]
                yield {"case": str(case), "dtype": str(dtype), "result": result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path, help="a JSON file")
    parser.add_argument("--check", help="only compare cases whose name has this with the reference")
    parser.add_argument("--sweep", action="store_true", help="try other tiles")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    parts: list[Iterator[dict[str, Any]]] = []
    if options.check is not None:
        parts.append(check(options.check))
    else:
        for name in SIZES:
            parts += [prompts(name), steps(name)]
        parts.append(kernels_of_a_prompt(name, 4096) for name in SIZES)
    if options.sweep:
        parts.append(sweep())
    lines = []
    for part in parts:
        for line in part:
            lines.append(line)
            print(json.dumps(line), flush=True)
            if options.out is not None:
                found = {"gpu": torch.cuda.get_device_name(), "lines": lines}
                options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
