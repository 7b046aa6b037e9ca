"""Cases of the gated delta rule: rows of every kind between gaps, replays, drafts, marks.

Slots that no row has keep what they held; a slot of length 0 holds NaN that no row may read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.delta_rule.reference import (
    DeltaRows,
    DeltaSizes,
    DeltaState,
    DeltaWeights,
    num_kept,
)
from tests.kernels.cases.pairs import FLOATS, Arguments, TritonCase

HALVES = (torch.float16, torch.bfloat16)


class Row(NamedTuple):
    query_len: int
    start: int = 0
    drafts: int = 0
    replayed: int = 0
    marks: tuple[int, ...] = ()  # lengths


DEAD = Row(0)


@dataclass(frozen=True, slots=True)
class Named:
    name: str
    rows: list[Row]
    sizes: DeltaSizes
    max_k: int = 0
    width: int = 0  # entries of each row; 0: rows are packed, with a gap of 1 behind them
    dtypes: tuple[torch.dtype, ...] = FLOATS
    is_large: bool = False


TINY, ODD = DeltaSizes(2, 4, 16, 16), DeltaSizes(1, 3, 24, 40)
WIDE, LARGE = DeltaSizes(1, 2, 32, 64), DeltaSizes(16, 32, 128, 128)


def cases() -> Iterator[TritonCase]:
    for named in (*small(), *_large()):
        yield TritonCase(
            operation="delta_rule",
            name=named.name,
            make=arguments(named),
            outputs=_outputs if named.width else _rounded_outputs,
            dtypes=named.dtypes,
            is_large=named.is_large,
        )

    for rows, heads, size, is_sigmoid in NORMS:
        yield TritonCase(
            operation="gated_norm",
            name=f"{rows}x{heads}x{size}{' sigmoid' if is_sigmoid else ''}",
            make=norm_arguments(rows, heads, size, is_sigmoid),
            outputs=lambda _, result: [result],
            dtypes=FLOATS,
            scale=2.0,
            is_large=heads == 48,
        )


NORMS = [(3, 4, 16, False), (2, 3, 24, True), (20, 2, 40, False), (5, 1, 128, True)]
NORMS += [(rows, 48, 128, False) for rows in (1, 64, 4096)]


def norm_arguments(
    rows: int, heads: int, size: int, is_sigmoid: bool
) -> Callable[[torch.device, torch.dtype], Arguments]:
    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        random = torch.Generator().manual_seed(2)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(device, dtype)

        width = heads * size
        # The gate is a part of wider rows, as a product gives it.
        gate_TV = numbers(rows, width + 8)[:, 4 : width + 4] * 3
        return numbers(rows, width), gate_TV, numbers(size).float(), 1e-6, is_sigmoid

    return make


def _outputs(given: Arguments, result: Tensor) -> list[Tensor]:
    return [result, *given[3]]


def _rounded_outputs(given: Arguments, result: Tensor) -> list[Tensor]:
    """Chunks multiply numbers of the inputs' type, so a state is only as exact as that."""
    return [x.to(result.dtype) for x in _outputs(given, result)]


def small() -> Iterator[Named]:
    # The first has all kernels.
    chunk = [Row(4, 9, 3, 2), Row(100, 30, marks=(31, 64, 93, 130, 131)), Row(3, 7), Row(66)]
    yield Named("mixed with marks", chunk, WIDE, 3)
    decode = [Row(1), Row(1, 1), DEAD, Row(1, 70), Row(1, 3, marks=(4, 90))]
    verify = [Row(4, 9, 3, 2), Row(3, 20, 2, 3), DEAD, Row(1, 6), Row(4, 0, 3), Row(2, 5, 1, 1)]
    marked = [Row(4, 9, 3, 2, (8, 11)), Row(4, 9, 3, 3, (9, 10)), Row(1, 7, 0, 3, (5, 9))]
    yield Named("decode", decode, TINY, 0, 1)
    yield Named("decode of odd sizes", decode, ODD, 0, 1)
    yield Named("dead rows only", [DEAD] * 3, TINY, 0, 1)
    yield Named("verify", verify, TINY, 3, 4)
    yield Named("verify of odd sizes", verify, ODD, 3, 4)
    yield Named("verify with marks", marked, WIDE, 3, 4)
    yield Named("longest window", [Row(8, 30, 7, 7), Row(8, 3, 7, 2, (4,))], TINY, 7, 8)
    yield Named("short prompts", [Row(5), DEAD, Row(7, 6), Row(2, 1)], TINY, 0)
    long = [Row(70), Row(9, 5), DEAD, Row(64, 3), Row(130, 65), Row(1, 40)]
    yield Named("prompts", long, TINY)
    yield Named("prompts of odd sizes", long[:4], ODD)
    many = [DEAD, Row(9), Row(1, 5), Row(70, 3)] * 9
    yield Named("many rows", many, TINY, dtypes=FLOATS[:1])
    yield Named("chunk with drafts", [Row(20, 9, 3), Row(12, 9, 0, 2), Row(12, 9)], TINY, 3)


def _large() -> Iterator[Named]:
    rows = [Row(4, 1000 + i, 3, i % 4) for i in range(60)] + [DEAD] * 4
    yield Named("q35 decode", [Row(1, 50 + i) for i in range(8)], LARGE, 0, 1, FLOATS, True)
    yield Named("q35 verify", rows, LARGE, 3, 4, FLOATS, True)
    rows = [*rows[:9], Row(700, 64, marks=(128, 512, 760)), Row(300), Row(17, 3)]
    yield Named("q35 mixed", rows, LARGE, 3, 0, FLOATS, True)
    yield Named("48 heads", rows[-4:], DeltaSizes(16, 48, 128, 128), 3, 0, HALVES, True)


def arguments(named: Named) -> Callable[[torch.device, torch.dtype], Arguments]:
    sizes, rows, num_rows = named.sizes, named.rows, len(named.rows)
    spans = [named.width or row.query_len + 1 for row in rows]
    num_marks = max(1, *(len(row.marks) for row in rows))
    num_slots, num_saved = num_rows + 2, num_rows * num_marks

    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        random = torch.Generator().manual_seed(1)

        def numbers(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=random).to(of)

        weights = DeltaWeights(
            numbers(sizes.channels, sizes.conv_size) / 2,
            -numbers(sizes.num_value_heads, of=torch.float32).exp() / 4,
            numbers(sizes.num_value_heads, of=torch.float32),
        )
        head = (sizes.num_value_heads, sizes.value_size, sizes.key_size)
        taps, f32 = sizes.conv_size - 1, torch.float32
        state = DeltaState(
            numbers(num_slots, *head, of=f32) / 4,
            numbers(num_slots, num_kept(named.max_k, sizes.conv_size), sizes.width),
            numbers(num_saved, *head, of=f32),
            numbers(num_saved, taps, sizes.width),
        )
        slot_B = torch.randperm(num_slots - 1, generator=random)[:num_rows]
        marks = [(*row.marks, *[-1] * (num_marks - len(row.marks))) for row in rows]
        columns = (
            slot_B,
            torch.tensor([0, *spans]).cumsum(0)[:-1],
            torch.tensor([row.query_len for row in rows]),
            torch.tensor([row.start for row in rows]),
            torch.tensor([row.query_len - row.drafts for row in rows]),
            torch.tensor([row.start - row.replayed for row in rows]),
            torch.tensor(marks),
            torch.randperm(num_saved, generator=random).view(num_rows, num_marks),
        )
        for slot, row in zip(slot_B.tolist(), rows, strict=True):
            if row.start == row.replayed:
                state.state_SNVK[slot] = float("nan")
        width = named.width or max(row.query_len for row in rows)
        on_device = (x.int().to(device) for x in columns)
        return (
            # A part of wider rows, as a product gives them.
            numbers(sum(spans), sizes.width + 8).to(device)[:, : sizes.width],
            DeltaWeights(*(x.to(device) for x in weights)),
            sizes,
            DeltaState(*(x.to(device) for x in state)),
            DeltaRows._make((*on_device, width)),
        )

    return make
