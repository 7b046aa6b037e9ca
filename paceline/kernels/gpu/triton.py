"""Dependent launches: a kernel may be launched while the one in front still runs.

Every kernel that is launched so waits, before it touches anything that the kernel in front writes;
else the one behind it would run ahead of the one in front. Before the wait there is only what was
there before a plain launch (torch's own), or before one in front that waits first: no product.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton.language.extra import cuda
from triton.runtime import driver


@cache
def has_dependent_launches() -> bool:
    """Whether kernels may wait for the one in front, and prefetch to the L2 cache: GPUs from Hopper
    (sm_90) on have the instructions. The interpreter runs one kernel after the other anyway."""
    return not triton.knobs.runtime.interpret and driver.active.get_current_target().arch >= 90


def dependent() -> dict[str, Any]:
    """Launch options, and the constexpr that `wait_for_input` takes."""
    options: dict[str, Any] = {"IS_DEPENDENT": has_dependent_launches()}
    return {**options, "launch_pdl": True} if has_dependent_launches() else options


def after_all() -> dict[str, Any]:
    """The same for a kernel that reads, before it waits, what the one in front of it writes."""
    return {**dependent(), "launch_pdl": False} if has_dependent_launches() else dependent()


@triton.jit
def wait_for_input(IS_DEPENDENT: tl.constexpr):
    """Wait until the kernel in front has written everything; let the next one be launched."""
    if IS_DEPENDENT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def prefetch_to_l2(at, SIZE: tl.constexpr):
    """Prefetch SIZE bytes at each address. Both are multiples of 16. From Hopper on."""
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [at.to(tl.int64, bitcast=True), tl.full(at.shape, SIZE, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
