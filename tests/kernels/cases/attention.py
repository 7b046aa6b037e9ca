"""Attention cases for the Triton twins: rows of every kind between gaps, over scattered pages.

Every slot that no row may read holds NaN; the result of entries without an owner must be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.attention.reference import AttentionBatch
from tests.kernels.cases.pairs import FLOATS, Arguments, TritonCase

DEAD = (0, 0)  # a row without a request


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows as (queries, KV length); query and KV heads."""

    rows: list[tuple[int, int]]
    heads: tuple[int, int]
    head_size: int
    page_size: int = 16
    width: int = 0  # entries of each row, where all have the same; else rows are packed
    gap: int = 0  # unowned entries behind every row
    spare_pages: int = 3  # unused columns of the page table
    window: int | None = None  # what lies behind it may be anybody's
    is_causal: bool = True
    has_row_window: bool = False

    @property
    def num_entries(self) -> int:
        return sum((self.width or count) + self.gap for count, _ in self.rows)


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    shape: Shape
    dtypes: tuple[torch.dtype, ...] = field(default=FLOATS)
    is_large: bool = False


def cases() -> Iterator[TritonCase]:
    for named in (*_decode_shapes(), *_mixed_shapes(), *_windows(), *_blocks(), *_large_shapes()):
        yield TritonCase(
            operation="paged_attention",
            name=named.name,
            make=arguments(named.shape),
            outputs=_outputs,
            dtypes=named.dtypes,
            is_large=named.is_large,
        )


def _decode_shapes() -> Iterator[_Named]:
    yield _Named("decode", Shape([(1, 1), (1, 17), (1, 90), DEAD], (4, 1), 16, width=1))
    yield _Named("decode, dead rows only", Shape([DEAD] * 3, (4, 2), 16, width=1))
    lengths = [(1, 300), DEAD, (1, 256), (1, 257), (1, 600)]
    yield _Named("long decode", Shape(lengths, (3, 1), 64, width=1))
    yield _Named("no group", Shape([(1, 40), (1, 5)], (2, 2), 80, width=1))
    yield _Named("group of 8", Shape([(3, 70), (1, 20), (5, 300)], (8, 1), 128, width=5))
    windows = [(4, 4), (2, 33), DEAD, (1, 259), (4, 258)]
    few = (torch.float32, torch.bfloat16)  # the interpreter takes its time
    yield _Named("verify", Shape(windows, (3, 1), 64, width=4, gap=1))
    yield _Named("verify, tiny heads", Shape(windows, (4, 2), 8, page_size=4, width=4), few)
    yield _Named("wide windows", Shape([(8, 8), (7, 300), (16, 40)], (4, 1), 12, width=16), few)
    yield _Named("very long decode", Shape([(1, 2500)], (2, 1), 32, width=1), few)
    yield _Named("odd pages", Shape([(2, 50), (1, 300)], (2, 2), 12, page_size=7, width=2))
    full = Shape([(2, 64), (1, 63)], (2, 1), 16, width=2, spare_pages=0)
    yield _Named("a full page table", full)


def _mixed_shapes() -> Iterator[_Named]:
    rows = [(40, 40), (1, 70), DEAD, (3, 300), (20, 90)]
    few = (torch.float32, torch.bfloat16)
    yield _Named("mixed", Shape(rows, (4, 2), 16, gap=2), few)
    yield _Named("mixed, group of 3", Shape(rows, (3, 1), 64), few)
    yield _Named("mixed, odd heads", Shape([(1, 9), (50, 60)], (4, 4), 12, page_size=4, gap=1))
    yield _Named("mixed, group of 8", Shape([(17, 17), (33, 100)], (8, 1), 80))
    yield _Named("prompt", Shape([(100, 100)], (4, 1), 128), few)
    yield _Named("chunk with history", Shape([(64, 290), (16, 16)], (4, 1), 64, page_size=4))
    # Enough entries that keys and values of the step are not fetched from the pages. Rows begin
    # within a block, at its first and at its last position; they end with qkv_TD or before a gap.
    halves = (torch.float16, torch.bfloat16)
    rows = [(90, 133), (70, 70), DEAD, (20, 31), (1, 70), (130, 258)]
    yield _Named("chunks of a large step", Shape(rows, (2, 1), 128), halves)
    rows = [(100, 227), (40, 40), (150, 413)]
    yield _Named("chunks of a large step, gaps", Shape(rows, (4, 1), 128, gap=3), halves)
    rows = [(200, 263), (64, 65)]
    yield _Named("chunks of a large step, group of 3", Shape(rows, (6, 2), 64), halves)
    yield _Named("chunks of a large step, odd heads", Shape(rows, (2, 1), 48), halves)
    # And so few that they are.
    rows = [(50, 211), (33, 33), (1, 70), DEAD, (20, 149)]
    yield _Named("chunks of a small step, no group", Shape(rows, (1, 1), 128, gap=2), halves)
    rows = [(40, 300), (18, 18), (3, 40)]
    yield _Named("chunks of a small step, group of 8", Shape(rows, (8, 1), 128), halves)


def _windows() -> Iterator[_Named]:
    few = (torch.float32, torch.bfloat16)
    decode = [(1, 1), (1, 24), (1, 25), (1, 90), DEAD, (1, 700)]
    yield _Named("window, decode", Shape(decode, (4, 1), 16, width=1, window=24))
    verify = [(4, 4), (2, 33), DEAD, (1, 259), (4, 600), (4, 301)]
    yield _Named("window, verify", Shape(verify, (4, 2), 8, 4, width=4, gap=1, window=45), few)
    yield _Named("window of one", Shape(verify, (2, 1), 16, width=4, window=1), few)
    long = [(1, 900), (2, 513), (1, 100)]
    yield _Named("window of stretches", Shape(long, (2, 1), 16, width=2, window=300), few)
    rows = [(40, 40), (1, 70), DEAD, (3, 300), (20, 90), (64, 300)]
    yield _Named("window, mixed", Shape(rows, (4, 2), 16, gap=2, window=24), few)
    yield _Named("window, prompt", Shape([(100, 100)], (4, 1), 128, window=70), few)


def _blocks() -> Iterator[_Named]:
    """Queries that see all of their row, as those of a block drafter do."""
    few = (torch.float32, torch.bfloat16)
    rows = [(4, 4), (2, 33), DEAD, (4, 259), (3, 258)]
    block = Shape(rows, (4, 2), 16, width=4, gap=1, is_causal=False)
    yield _Named("block", block, few)
    rows = [(16, 16), (16, 600), (9, 301), (1, 70)]
    yield _Named("block, widest", Shape(rows, (4, 1), 16, width=16, is_causal=False), few)
    window = Shape(rows, (4, 1), 16, width=16, window=45, is_causal=False)
    yield _Named("block, window", window, few)
    for name, is_causal in (("both ways", False), ("causal", True)):
        window = Shape(rows, (4, 1), 16, 16, 16, 0, 3, 45, is_causal, has_row_window=True)
        yield _Named(f"block, window of the row, {name}", window, few)


def _large_shapes() -> Iterator[_Named]:
    halves = (torch.float16, torch.bfloat16)
    for name, heads, size in (("sm", (9, 3), 64), ("l8", (32, 8), 128)):
        rows = [(1, 4000 - 37 * i) for i in range(32)]
        yield _Named(f"{name} decode", Shape(rows, heads, size, width=1), FLOATS, True)
        rows = [(4, 4000 + i) for i in range(80)] + [DEAD] * 4  # not all partials find room
        yield _Named(f"{name} many rows", Shape(rows, heads, size, width=4), halves, True)
        rows = [(1, 1 + 97 * i) for i in range(32)] + [(512, 512), (300, 3000), DEAD, (17, 4000)]
        yield _Named(f"{name} mixed", Shape(rows, heads, size, gap=1), halves, True)
        yield _Named(f"{name} prompt", Shape([(2048, 2048)], heads, size), halves, True)
    # Groups that fill tiles and that do not; chunks that begin anywhere.
    rows = [(300, 1001), (129, 129), (17, 2000), (1, 900), DEAD, (700, 915), (4, 77)]
    for heads in ((8, 8), (9, 3), (16, 2), (14, 2), (20, 4), (64, 1)):
        name = f"chunks, {heads[0]} heads by {heads[1]}"
        yield _Named(name, Shape(rows, heads, 128, gap=1), halves, True)
    yield _Named("wide heads", Shape([(4, 999), (600, 700)], (16, 4), 256), FLOATS, True)
    window = Shape([(1, 3999), (4, 900), (300, 3000)], (32, 8), 128, window=512)
    yield _Named("large window", window, halves, True)
    yield _Named("big group", Shape([(4, 999), (600, 700)], (64, 2), 96), halves, True)


def arguments(shape: Shape) -> Callable[[torch.device, torch.dtype], Arguments]:
    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        generator = torch.Generator().manual_seed(1)
        num_q, num_kv = shape.heads
        num_pages = [-(-length // shape.page_size) for _, length in shape.rows]
        num_slots = (sum(num_pages) + 1) * shape.page_size
        readable_S, table_SP = _table(shape, num_pages, generator)
        key_NSH, value_NSH = (
            _cache((num_kv, num_slots, shape.head_size), readable_S, seed, device, dtype)
            for seed in (2, 3)
        )
        width = (num_q + 2 * num_kv) * shape.head_size
        random = torch.Generator(device).manual_seed(4)
        qkv_TD = torch.randn(shape.num_entries, width, generator=random, device=device).to(dtype)
        batch = attention_batch(shape, table_SP, device)
        _fill_own(qkv_TD, key_NSH, value_NSH, batch)
        return qkv_TD, key_NSH, value_NSH, batch, shape.head_size**-0.5

    return make


def attention_batch(shape: Shape, table_SP: Tensor, device: torch.device) -> AttentionBatch:
    """What a fixed-shape step hands to attention: int32, rows apart, slots in no order."""
    step = torch.tensor([0, *((shape.width or n) + shape.gap for n, _ in shape.rows)])
    integers = {
        "row_start_B": step.cumsum(0)[:-1],
        "query_len_B": torch.tensor([count for count, _ in shape.rows]),
        "length_B": torch.tensor([length for _, length in shape.rows]),
        "slot_B": _slots(shape),
    }
    tensors: dict[str, Any] = {
        name: value.to(torch.int32).to(device) for name, value in integers.items()
    }
    return AttentionBatch(
        **tensors,
        table_SP=table_SP.to(device),
        page_size=shape.page_size,
        group_size=shape.heads[0] // shape.heads[1],
        max_query_len=shape.width or shape.num_entries,
        window=shape.window,
        is_causal=shape.is_causal,
        has_row_window=shape.has_row_window,
    )


def _fill_own(qkv_TD: Tensor, key_NSH: Tensor, value_NSH: Tensor, batch: AttentionBatch) -> None:
    """Behind a row's queries lie their keys and values as the pages have them; elsewhere NaN."""
    num_kv, _, head_size = key_NSH.shape
    own_TD = qkv_TD[:, -2 * num_kv * head_size :]
    own_TD.fill_(float("nan"))
    assert batch.query_len_B is not None
    lengths = (batch.row_start_B, batch.query_len_B, batch.length_B, batch.slot_B)
    for start, count, length, slot in zip(*(x.tolist() for x in lengths), strict=True):
        position = torch.arange(length - count, length, device=qkv_TD.device)
        page = batch.table_SP[slot, position // batch.page_size].long()
        flat = page * batch.page_size + position % batch.page_size
        both = torch.cat((key_NSH[:, flat], value_NSH[:, flat])).transpose(0, 1)
        own_TD[start : start + count] = both.flatten(1)


def _slots(shape: Shape) -> Tensor:
    """Row b has slot B - b; dead rows share the last one of all, as padding does."""
    count = len(shape.rows)
    return torch.tensor([count - i if n else count + 1 for i, (n, _) in enumerate(shape.rows)])


def _table(shape: Shape, num_pages: list[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Which flat slots some row reads, and the page table; page 0 belongs to no row."""
    order = torch.randperm(sum(num_pages), generator=generator).int() + 1
    columns = max(*num_pages, 1) + shape.spare_pages
    table_SP = torch.full((len(shape.rows) + 2, columns), -1, dtype=torch.int32)
    readable_S = torch.zeros((sum(num_pages) + 1) * shape.page_size, dtype=torch.bool)
    slots = _slots(shape).tolist()
    for slot, count, (queries, length) in zip(slots, num_pages, shape.rows, strict=True):
        order, table_SP[slot, :count] = order[count:], order[:count]
        flat = table_SP[slot, :count, None].long() * shape.page_size
        begin = 0 if shape.window is None else max(length - queries + 1 - shape.window, 0)
        readable_S[(flat + torch.arange(shape.page_size)).flatten()[begin:length]] = True
    return readable_S, table_SP


def _cache(
    size: tuple[int, int, int],
    readable_S: Tensor,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    random = torch.Generator(device).manual_seed(seed)
    cache_NSH = torch.randn(size, generator=random, device=device).to(dtype)
    cache_NSH[:, ~readable_S.to(device)] = float("nan")
    return cache_NSH


def _outputs(_: Arguments, result: Tensor) -> list[Tensor]:
    return [result]
