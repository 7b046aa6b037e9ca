"""Inputs on which a torch reference and its Triton kernel must agree.

Each file beside this one has a function `cases()`; nothing is run here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.table import operations

Arguments = tuple[Any, ...]
# Kernels whose references read lengths on the host.
ON_CPU = frozenset(
    {
        *("greedy", "draw", "draft", "judge", "accept_by_rate", "write_logprobs"),
        *("keep_allowed", "keep_late", "ban_early_stops", "add_bias"),
        *("ban_bad_words", "apply_penalties", "finish_step", "end_step", "delta_rule"),
        *("publish_drafts", "take_host_drafts", "note_late"),
    }
)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# What rounding may do: absolute and relative, by the type that the kernel computes in.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class TritonCase:
    """One call of one operation."""

    operation: str  # of kernels/table
    name: str
    make: Callable[[torch.device, torch.dtype], Arguments]  # fresh every time, always the same
    # From (arguments, result): the tensors to compare; what is undefined is left out or masked.
    outputs: Callable[[Arguments, Any], list[Tensor]]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    scale: float = 1.0  # of the tolerance
    is_large: bool = False  # a real model's size: for the GPU and for benchmarks
    backend: str = "triton"  # what is compared with the reference
    least_arch: int = 80  # of the GPUs that have its instructions

    def __str__(self) -> str:
        return f"{self.operation}-{self.name}"

    def function(self, backend: str) -> Callable[..., Any]:
        return operations()[self.operation].by(backend)

    def outcome(self, backend: str, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        arguments = self.make(device, dtype)
        return self.outputs(arguments, self.function(backend)(*arguments))

    def wanted(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """What the reference says; references of step kernels and sampling are for CPU tensors."""
        where = torch.device("cpu") if self.operation in ON_CPU else device
        arguments = self.make(where, dtype)
        result = self.function("reference")(*arguments)
        return [t.to(device) for t in self.outputs(arguments, result)]


TOPICS = (
    *("attention", "delta_rule", "drafts", "elementwise", "experts", "fp8", "kv_codes"),
    *("linear", "mla", "processors", "sampling", "step"),
)


def all_triton_cases() -> Iterator[TritonCase]:
    for topic in TOPICS:
        yield from import_module(f"tests.kernels.cases.{topic}").cases()


def check(case: TritonCase, device: torch.device, dtype: torch.dtype) -> None:
    """Raise AssertionError where they differ."""
    wanted = case.wanted(device, dtype)
    found = [t.to(device) for t in case.outcome(case.backend, device, dtype)]
    assert len(wanted) == len(found), f"{case}: {len(wanted)} and {len(found)} outputs"
    for index, (want, got) in enumerate(zip(wanted, found, strict=True)):
        bound = TOLERANCE.get(want.dtype, TOLERANCE[dtype]) * case.scale
        if not want.is_floating_point():
            bound = 0.0
        try:
            torch.testing.assert_close(got, want, atol=bound, rtol=bound, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(f"{case}[{index}]: {error}") from None
