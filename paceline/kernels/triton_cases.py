"""Inputs on which a torch reference and its Triton twin must agree: for tests and benchmarks.

Topics add their own files `triton_cases_<topic>.py` with a function `cases()`; nothing is run here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor

import paceline.kernels

Arguments = tuple[Any, ...]
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# What rounding may do: absolute and relative, by the type that the kernel computes in.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class TritonCase:
    """One call of one pair."""

    kernel: str
    name: str
    reference: str  # module:function of the torch twin
    fast: str  # module:function of the Triton twin
    make: Callable[[torch.device, torch.dtype], Arguments]  # fresh every time, always the same
    # From (arguments, result): the tensors to compare; what is undefined is left out or masked.
    outputs: Callable[[Arguments, Any], list[Tensor]]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    scale: float = 1.0  # of the tolerance
    is_large: bool = False  # a real model's size: for the GPU and for benchmarks
    is_hoppers: bool = False  # takes more shared memory than other GPUs have

    def __str__(self) -> str:
        return f"{self.kernel}-{self.name}"

    def function(self, which: str) -> Callable[..., Any]:
        module, _, name = getattr(self, which).partition(":")
        found: Callable[..., Any] = getattr(import_module(module), name)
        return found

    def outcome(self, which: str, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        arguments = self.make(device, dtype)
        return self.outputs(arguments, self.function(which)(*arguments))


def all_triton_cases() -> Iterator[TritonCase]:
    for module in sorted(m.name for m in iter_modules(paceline.kernels.__path__)):
        if module.startswith("triton_cases_"):
            yield from import_module(f"paceline.kernels.{module}").cases()


def check(case: TritonCase, device: torch.device, dtype: torch.dtype) -> None:
    """Raise AssertionError where the twins differ."""
    wanted = case.outcome("reference", device, dtype)
    found = case.outcome("fast", device, dtype)
    assert len(wanted) == len(found), f"{case}: {len(wanted)} and {len(found)} outputs"
    for index, (want, got) in enumerate(zip(wanted, found, strict=True)):
        bound = TOLERANCE.get(want.dtype, TOLERANCE[dtype]) * case.scale
        if not want.is_floating_point():
            bound = 0.0
        try:
            torch.testing.assert_close(got, want, atol=bound, rtol=bound, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(f"{case}[{index}]: {error}") from None
