"""Rows in e4m3 on the GPU (Ada, Hopper and later): of rows, of a norm, of an activation."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.e4m3 import DTYPE
from paceline.kernels.elementwise.triton import launch_norm
from paceline.kernels.fp8.reference import BLOCK, Fp8Rows
from paceline.kernels.fp8.triton.parts import rounded
from paceline.kernels.gpu.triton import dependent, wait_for_input

# Numbers of a program where a row has several groups: 16 bytes per thread of four warps.
_NUMBERS = 1024


def quantise_rows(x_TK: Tensor, is_blocked: bool) -> Fp8Rows:
    return _quantise(x_TK, x_TK.shape[1], is_blocked, is_gated=False)


def silu_rows(gate_up_TI: Tensor, is_blocked: bool) -> Fp8Rows:
    return _quantise(gate_up_TI, gate_up_TI.shape[1] // 2, is_blocked, is_gated=True)


@cache
def _check(device: torch.device) -> None:
    has = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    if has < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise RuntimeError(
            f"fp8 weights need a GPU of compute capability 8.9 or more; {name} has "
            f"{has[0]}.{has[1]}. Leave out --quantization, or take a checkpoint in bfloat16."
        )


def _empty_rows(like: Tensor, num_inputs: int, is_blocked: bool) -> Fp8Rows:
    _check(like.device)
    num_rows, num_groups = len(like), triton.cdiv(num_inputs, BLOCK) if is_blocked else 1
    scale_TG = like.new_empty((num_rows, num_groups), dtype=torch.float32)
    return Fp8Rows(like.new_empty((num_rows, num_inputs), dtype=DTYPE), scale_TG)


def _quantise(x_TK: Tensor, num_inputs: int, is_blocked: bool, *, is_gated: bool) -> Fp8Rows:
    rows = _empty_rows(x_TK, num_inputs, is_blocked)
    num_rows, num_groups = rows.scale_TG.shape
    width = BLOCK if is_blocked else num_inputs
    size = triton.next_power_of_2(width)
    groups = min(max(_NUMBERS // size, 1), triton.next_power_of_2(num_groups))
    _quantise_kernel[(num_rows, triton.cdiv(num_groups, groups))](
        *(x_TK, *rows, x_TK.stride(0)),
        INPUTS=num_inputs,
        WIDTH=width,
        SIZE=size,
        GROUPS=groups,
        IS_GATED=is_gated,
        num_warps=min(max(groups * size // 256, 1), 16),
        **dependent(),
    )
    return rows


@triton.jit
def _quantise_kernel(  # noqa: PLR0913
    x_TK,
    codes_TK,
    scale_TG,
    x_stride,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """A program takes some groups of a row, each of WIDTH inputs. Gated: of a gate and an up."""
    wait_for_input(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = tl.arange(0, SIZE)[None, :]
    k = group[:, None] * WIDTH + inside
    is_input = (inside < WIDTH) & (k < INPUTS)
    x_at = x_TK + row * x_stride + k
    x_GS = tl.load(x_at, mask=is_input, other=0.0).to(tl.float32)
    if IS_GATED:
        up_GS = tl.load(x_at + INPUTS, mask=is_input, other=0.0).to(tl.float32)
        x_GS = x_GS / (1.0 + tl.exp(-x_GS)) * up_GS
        x_GS = x_GS.to(x_TK.dtype.element_ty).to(tl.float32)
    codes_GS, scale_G = rounded(x_GS)
    tl.store(codes_TK + row * INPUTS + k, codes_GS, mask=is_input)
    num_groups: tl.constexpr = (INPUTS + WIDTH - 1) // WIDTH
    tl.store(scale_TG + row * num_groups + group, scale_G, mask=group < num_groups)


def norm_rows(
    residual_TD: Tensor,
    delta_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    dtype: torch.dtype,
    is_blocked: bool,
) -> Fp8Rows:
    rows = _empty_rows(residual_TD, residual_TD.shape[1], is_blocked)
    launch_norm(residual_TD, delta_TD, weight_D, eps, *rows, dtype)
    return rows
