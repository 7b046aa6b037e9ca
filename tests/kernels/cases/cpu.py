"""Inputs on which both twins of a kernel pair must agree: shared by tests and benchmarks.

Arguments are made anew for every call, and the same every time: some kernels write into them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.kernels import table
from paceline.kernels.attention.reference import AttentionBatch
from paceline.kernels.elementwise.reference import HeadNorms
from paceline.kernels.panels import reference as panels
from paceline.kernels.panels.reference import PanelWeight, pack_blocks, pack_dense
from tests.kernels.cases.delta_rule import NORMS, norm_arguments, small
from tests.kernels.cases.delta_rule import arguments as delta_arguments
from tests.kernels.cases.elementwise import wide_gate_arguments
from tests.kernels.cases.kv_codes import coded_attention, coded_heads

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One call of one kernel."""

    kernel: str
    name: str
    make: Callable[[], Arguments]
    tolerance: float = 2e-6  # relative and absolute, of float32 results
    is_large: bool = False  # the size of a small real model: for benchmarks

    def __str__(self) -> str:
        return f"{self.kernel}-{self.name}"

    def outcome(self, function: Callable[..., Tensor | None]) -> list[Tensor]:
        """The result, and every tensor that the call may have written to."""
        arguments = self.make()
        result = function(*arguments)
        parts = [x for a in arguments for x in (a if isinstance(a, tuple) else (a,))]
        kinds = (torch.float32, torch.uint8)
        written = [x for x in parts if isinstance(x, Tensor) and x.dtype in kinds]
        # silu_and_mul may use its input as scratch; what is left in it means nothing.
        kept = [] if self.kernel == "silu_and_mul" else written
        return kept if result is None else [result, *kept]


def pairs(device: torch.device) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Reference and vector kernel of each operation that has one."""
    return {
        name: (operation.reference, operation.on(device))
        for name, operation in table.operations().items()
        if "numba" in operation.files
    }


def all_cases() -> Iterator[Case]:
    for rows, width in ((1, 32), (5, 50), (33, 576)):
        yield Case("rms_norm", f"{rows}x{width}", _norm_arguments(rows, width, has_delta=False))
        yield Case("add_rms_norm", f"{rows}x{width}", _norm_arguments(rows, width, has_delta=True))
        yield Case("silu_and_mul", f"{rows}x{width}", _gate_arguments(rows, width))
        yield Case("sigmoid_mul", f"{rows}x{width}", on_cpu(wide_gate_arguments(rows, width)))
    for tokens, heads, size in ((1, (9, 3), 64), (20, (4, 2), 12), (9, (2, 2), 40)):
        for has_norms in (False, True):
            name = f"{tokens}x{heads}x{size}{'-norms' if has_norms else ''}"
            make = _heads_arguments(tokens, heads, size, has_norms=has_norms)
            yield Case("place_heads", name, make, tolerance=5e-6)
    make = _heads_arguments(5, (4, 2), 16, has_norms=True, gap=8)
    yield Case("place_heads", "rows with gaps", make, tolerance=5e-6)
    for batch, heads, size, page_size in ATTENTION:
        make = attention_arguments(batch, heads, size, page_size)
        yield Case("paged_attention", f"{batch}-{heads}x{size}-pages{page_size}", make)
        make = attention_arguments(batch, heads, size, page_size, is_causal=False)
        yield Case("paged_attention", f"{batch}-{heads}x{size}-block", make)
        make = on_cpu(coded_attention(_wide(make)))
        yield Case("paged_attention", f"{batch}-{heads}x{size}-block-fp8", make)
    for tokens, heads, size in ((20, (4, 2), 12), (9, (2, 2), 40)):
        make = on_cpu(coded_heads(_wide(_heads_arguments(tokens, heads, size, has_norms=False))))
        yield Case("place_heads", f"{tokens}x{heads}x{size}-fp8", make)
    for kind in ("Q4_0", "Q4_1", "Q8_0", "f16", "bf16", "f32"):
        for num_rows, outputs, inputs in ((1, 64, 32), (7, 100, 96), (50, 96, 832)):
            make = matmul_arguments(kind, num_rows, outputs, inputs)
            yield Case("matmul", f"{kind}-{num_rows}x{outputs}x{inputs}", make, tolerance=1e-4)
    yield from _fp8_cases()
    for named in small():
        yield Case("delta_rule", named.name, on_cpu(delta_arguments(named)), tolerance=1e-5)
    for norm in NORMS[:4]:
        yield Case("gated_norm", str(norm), on_cpu(norm_arguments(*norm)))
    yield from _large_cases()


def _fp8_cases() -> Iterator[Case]:
    for rows, width in ((1, 5), (3, 132), (33, 576)):
        for is_blocked in (False, True):
            name = f"{rows}x{width}{'-blocks' if is_blocked else ''}"
            yield Case("round_rows", name, _round_arguments(rows, width, is_blocked), 0.0)
        for has_bias in (False, True):
            name = f"{rows}x{width}{'-bias' if has_bias else ''}"
            yield Case("scale_outputs", name, _scale_arguments(rows, width, has_bias), 0.0)


def on_cpu(make: Callable[[torch.device, torch.dtype], Arguments]) -> Callable[[], Arguments]:
    """Arguments of a GPU's case."""
    return lambda: make(torch.device("cpu"), torch.float32)


def _round_arguments(rows: int, width: int, is_blocked: bool) -> Callable[[], Arguments]:
    """Large and tiny numbers, ties between two codes, a row of zeros."""

    def make() -> Arguments:
        random = torch.Generator().manual_seed(rows + width)
        x_TK = torch.randn(rows, width, generator=random).exp().mul_(3.0).floor_().mul_(0.25)
        x_TK *= torch.randn(rows, width, generator=random).sign()
        x_TK[:, ::7] *= 2.0**-12
        x_TK[rows // 2, : width // 2] = 0.0
        return x_TK, is_blocked

    return make


def _scale_arguments(rows: int, width: int, has_bias: bool) -> Callable[[], Arguments]:
    def make() -> Arguments:
        random = torch.Generator().manual_seed(rows + width)
        x_TN = torch.randn(rows, width, generator=random)
        scale_N, bias_N = torch.randn(2, width, generator=random)
        return x_TN, scale_N, bias_N if has_bias else None

    return make


# Rows as (queries, KV length), query and KV heads, head size, page size.
ATTENTION: list[tuple[list[tuple[int, int]], tuple[int, int], int, int]] = [
    ([(1, 1), (1, 17), (6, 300), (1, 256), (40, 40), (100, 530)], (9, 3), 64, 16),
    ([(5, 5), (1, 33), (3, 90)], (4, 2), 12, 16),
    ([(5, 5), (1, 33), (70, 290)], (4, 2), 8, 4),
    ([(1, 300), (129, 300)], (8, 1), 128, 32),
    ([(2, 50)], (4, 4), 80, 7),
]


def _large_cases() -> Iterator[Case]:
    """A layer of SmolLM2-135M: one request, a verify window, a batch, a prompt."""
    for rows in (1, 6, 8, 48, 512):
        name = f"{rows} rows"
        for kernel, has_delta in (("rms_norm", False), ("add_rms_norm", True)):
            yield Case(kernel, name, _norm_arguments(rows, 576, has_delta=has_delta), is_large=True)
        yield Case("silu_and_mul", name, _gate_arguments(rows, 1536), is_large=True)
        make = _heads_arguments(rows, (9, 3), 64, has_norms=False)
        yield Case("place_heads", name, make, 5e-6, is_large=True)
        make = on_cpu(coded_heads(_wide(make)))
        yield Case("place_heads", f"{name}, fp8", make, is_large=True)
        for kind in ("Q4_1", "Q8_0", "f16"):
            make = matmul_arguments(kind, rows, 3072, 576)
            yield Case("matmul", f"{kind}, {name}", make, 1e-3, is_large=True)
    for batch in (
        [(1, 256)],
        [(6, 256)],
        [(1, 256)] * 8,
        [(6, 256)] * 8,
        [(1, 2048)],
        [(512, 512)],
    ):
        make = attention_arguments(batch, (9, 3), 64, 16)
        name = f"{len(batch)} x {batch[0][0]} at {batch[0][1]}"
        yield Case("paged_attention", name, make, is_large=True)
        make = on_cpu(coded_attention(_wide(make)))
        yield Case("paged_attention", f"{name}, fp8", make, is_large=True)


def _numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _wide(make: Callable[[], Arguments]) -> Callable[[torch.device, torch.dtype], Arguments]:
    """Of pages in fp32, as `kv_codes` takes them."""
    return lambda _device, _dtype: make()


def _norm_arguments(rows: int, width: int, *, has_delta: bool) -> Callable[[], Arguments]:
    def make() -> Arguments:
        x, weight = _numbers(rows, width, seed=1), _numbers(width, seed=2)
        return (x, _numbers(rows, width, seed=3), weight, 1e-5) if has_delta else (x, weight, 1e-5)

    return make


def _gate_arguments(rows: int, width: int) -> Callable[[], Arguments]:
    return lambda: (_numbers(rows, 2 * width, seed=1) * 8,)


def _heads_arguments(
    tokens: int, heads: tuple[int, int], size: int, *, has_norms: bool, gap: int = 0
) -> Callable[[], Arguments]:
    """Every third token has no page. Behind each row are `gap` numbers of others."""

    def make() -> Arguments:
        num_q, num_kv = heads
        norms = HeadNorms(_numbers(size, seed=1), _numbers(size, seed=2), 1e-6)
        angle = _numbers(tokens, size // 2, seed=3)
        slot_T = torch.randperm(2 * tokens, generator=torch.Generator().manual_seed(4))[:tokens]
        slot_T[2::3] = -1
        width = (num_q + 2 * num_kv) * size
        return (
            _numbers(tokens, width + gap, seed=5)[:, :width],
            torch.complex(angle.cos(), angle.sin()),
            norms if has_norms else None,
            torch.zeros(num_kv, 2 * tokens, size),
            torch.zeros(num_kv, 2 * tokens, size),
            slot_T,
        )

    return make


def attention_arguments(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    size: int,
    page_size: int,
    *,
    is_causal: bool = True,
) -> Callable[[], Arguments]:
    """Pages scattered over a cache whose unused slots hold NaN."""

    def make() -> Arguments:
        num_q, num_kv = heads
        num_pages = [-(-length // page_size) for _, length in rows]
        order = torch.randperm(sum(num_pages), generator=torch.Generator().manual_seed(1)).int()
        table_SP = torch.full((len(rows) + 1, max(num_pages) + 1), -1, dtype=torch.int32)
        shape = (num_kv, len(order) * page_size, size)
        key_NSH, value_NSH = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
        for i, (count, (_, length)) in enumerate(zip(num_pages, rows, strict=True)):
            order, table_SP[i, :count] = order[count:], order[:count]
            slot = (table_SP[i, :count, None] * page_size + torch.arange(page_size)).flatten()
            slot = slot[:length].long()
            key_NSH[:, slot] = _numbers(num_kv, length, size, seed=10 + i)
            value_NSH[:, slot] = _numbers(num_kv, length, size, seed=50 + i)
        queries = torch.tensor([0, *(n for n, _ in rows)])
        batch = AttentionBatch(
            row_start_B=queries.cumsum(0),
            length_B=torch.tensor([length for _, length in rows]),
            slot_B=torch.arange(len(rows)),
            table_SP=table_SP,
            page_size=page_size,
            group_size=num_q // num_kv,
            is_causal=is_causal,
        )
        qkv_TD = _numbers(int(queries.sum()), (num_q + 2 * num_kv) * size, seed=2)
        return qkv_TD, key_NSH, value_NSH, batch, size**-0.5

    return make


def matmul_arguments(
    kind: str, num_rows: int, outputs: int, inputs: int
) -> Callable[[], Arguments]:
    def make() -> Arguments:
        return _numbers(num_rows, inputs, seed=1), panel_weight(kind, outputs, inputs)

    return make


def panel_weight(kind: str, outputs: int, inputs: int) -> PanelWeight:
    """Random weights with a bias, in a GGUF block type or a panel kind."""
    bias_N = _numbers(outputs, seed=3)
    if kind in panels.BLOCK_BYTES:
        return pack_blocks(kind, random_blocks(kind, outputs, inputs), bias_N)
    dense: dict[str, torch.dtype] = {
        "f16": torch.float16,
        "bf16": torch.bfloat16,
        "f32": torch.float32,
    }
    return pack_dense(_numbers(outputs, inputs, seed=2).to(dense[kind]), bias_N)


def random_blocks(kind: str, outputs: int, inputs: int) -> Tensor:
    """Rows of GGUF blocks: random bits with scales and offsets of ordinary size."""
    generator = torch.Generator().manual_seed(4)
    shape = (outputs, inputs // panels.BLOCK, panels.BLOCK_BYTES[kind])
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    num_halves = 2 if kind == "Q4_1" else 1
    halves = _numbers(*shape[:2], num_halves, seed=5).mul(0.1).half()
    blocks[..., : 2 * num_halves] = halves.view(torch.uint8)
    return blocks.flatten(1)
