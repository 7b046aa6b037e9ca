"""Cases of a layer's elementwise kernels for the Triton twins: norms, gates, heads.

Sizes that are no power of two, and types that differ between residual and activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from paceline.kernels.elementwise.reference import HeadNorms
from tests.kernels.cases.pairs import FLOATS, Arguments, TritonCase

Make = Callable[[torch.device, torch.dtype], Arguments]


def cases() -> Iterator[TritonCase]:
    for rows, width in ((1, 32), (3, 12), (5, 50), (4, 576), (2, 4096)):
        yield _case("rms_norm", f"{rows}x{width}", norm_arguments(rows, width, False))
        yield _case("add_rms_norm", f"{rows}x{width}", norm_arguments(rows, width, True))
        yield _case("silu_and_mul", f"{rows}x{width}", gate_arguments(rows, width))
        yield _case("sigmoid_mul", f"{rows}x{width}", wide_gate_arguments(rows, width))
    for tokens, heads, size in ((1, (9, 3), 64), (7, (4, 2), 12), (3, (2, 2), 80), (2, (8, 1), 8)):
        for has_norms in (False, True):
            name = f"{tokens}x{heads}x{size}{' with norms' if has_norms else ''}"
            yield _case("place_heads", name, heads_arguments(tokens, heads, size, has_norms))
    for operation, has_delta in (("rms_norm", False), ("add_rms_norm", True)):
        make = norm_arguments(3, 50, has_delta, is_exact=True)
        yield _case(operation, "fp32 weights", make)
    make = heads_arguments(4, (4, 2), 16, True, is_exact=True)
    yield _case("place_heads", "fp32 norms, rows with gaps", make)
    for rows in (1, 64, 2048):
        yield _large("rms_norm", f"{rows} rows", norm_arguments(rows, 4096, False))
        yield _large("add_rms_norm", f"{rows} rows", norm_arguments(rows, 4096, True))
        yield _large("silu_and_mul", f"{rows} rows", gate_arguments(rows, 14336))
        yield _large("sigmoid_mul", f"{rows} rows", wide_gate_arguments(rows, 4096))
        make = heads_arguments(rows, (32, 8), 128, True)
        yield _large("place_heads", f"{rows} rows", make)
    yield _large("place_heads", "wide", heads_arguments(9, (16, 4), 256, True))


def _case(operation: str, name: str, make: Make) -> TritonCase:
    return TritonCase(
        operation=operation,
        name=name,
        make=make,
        outputs=_outputs,
        dtypes=FLOATS,
        # A norm of a half-precision sum, or a rounded gate: errors of two roundings.
        scale=2.0,
    )


def _large(operation: str, name: str, make: Make) -> TritonCase:
    return replace(_case(operation, name, make), is_large=True)


def _outputs(arguments: Arguments, result: Tensor | None) -> list[Tensor]:
    """The result, and what the call has to leave in its arguments."""
    written = [x for x in arguments if isinstance(x, Tensor) and x.is_floating_point()]
    if len(arguments) == 1:  # silu_and_mul may use its input as scratch
        written = []
    return written if result is None else [result, *written]


def numbers(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def norm_arguments(rows: int, width: int, has_delta: bool, *, is_exact: bool = False) -> Make:
    """Exact: the weight is fp32, and the result is not."""

    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        x = numbers(rows, width, seed=1, device=device, dtype=dtype)
        delta = numbers(rows, width, seed=3, device=device, dtype=dtype)
        weight = numbers(width, seed=2, device=device, dtype=dtype)
        rest = (weight.float(), 1e-5, dtype) if is_exact else (weight, 1e-5)
        return (x, delta, *rest) if has_delta else (x, *rest)

    return make


def gate_arguments(rows: int, width: int) -> Make:
    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        return (numbers(rows, 2 * width, seed=1, device=device, dtype=dtype) * 4,)

    return make


def wide_gate_arguments(rows: int, width: int) -> Make:
    """The gate is a part of wider rows, as a product gives it."""

    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        x = numbers(rows, width, seed=1, device=device, dtype=dtype)
        gate = numbers(rows, width + 8, seed=2, device=device, dtype=dtype) * 4
        return x, gate[:, 4 : width + 4]

    return make


def heads_arguments(
    tokens: int, heads: tuple[int, int], size: int, has_norms: bool, *, is_exact: bool = False
) -> Make:
    """Every third token has no page; slots are int32, as a fixed-shape step has them.

    Exact: norms are fp32, and rows have gates behind them.
    """

    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        num_q, num_kv = heads
        like = torch.empty(0, device=device, dtype=dtype)
        kind, width = torch.float32 if is_exact else dtype, (num_q + 2 * num_kv) * size
        query_H, key_H = (numbers(size, seed=s, device=device, dtype=kind) for s in (1, 2))
        angle = numbers(tokens, size // 2, seed=3, device=device, dtype=torch.float32)
        slot_T = torch.randperm(2 * tokens, generator=torch.Generator().manual_seed(4))[:tokens]
        slot_T[2::3] = -1
        return (
            numbers(tokens, width + 8 * is_exact, seed=5, device=device, dtype=dtype)[:, :width],
            torch.complex(angle.cos(), angle.sin()),
            HeadNorms(query_H, key_H, 1e-6) if has_norms else None,
            like.new_zeros(num_kv, 2 * tokens, size),
            like.new_zeros(num_kv, 2 * tokens, size),
            slot_T.to(torch.int32).to(device),
        )

    return make
