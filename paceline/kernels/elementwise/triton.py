"""Norms, gates, head norms with rotation and the KV write, on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.elementwise.reference import HeadNorms
from paceline.kernels.fp8.reference import BLOCK as FP8_BLOCK
from paceline.kernels.fp8.triton.parts import rounded
from paceline.kernels.gpu.triton import dependent, wait_for_input
from paceline.kernels.kv_codes.reference import KvScales
from paceline.kernels.kv_codes.triton import encoded

_GATES = 1024  # outputs of a program
# Numbers that a program takes: 16 bytes per thread of four warps in a two-byte type.
_HEAD_NUMBERS = 1024


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    out_TD = torch.empty(x_TD.shape, dtype=dtype or weight_D.dtype, device=x_TD.device)
    launch_norm(x_TD, None, weight_D, eps, out_TD)
    return out_TD


def add_rms_norm(
    residual_TD: Tensor,
    delta_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The residual may be wider than the result, and keeps its own type."""
    out_TD = torch.empty(delta_TD.shape, dtype=dtype or weight_D.dtype, device=delta_TD.device)
    launch_norm(residual_TD, delta_TD, weight_D, eps, out_TD)
    return out_TD


def launch_norm(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    out_TD: Tensor,
    scale_TG: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """With scales the results are codes: norms of `dtype`, rounded by groups (see fp8)."""
    rows, width = x_TD.shape
    block = triton.next_power_of_2(width)
    delta = x_TD if delta_TD is None else delta_TD
    num_groups = 1 if scale_TG is None else scale_TG.shape[1]
    _norm_kernel[(rows,)](
        *(x_TD, delta, weight_D, out_TD, scale_TG),
        *(x_TD.stride(0), delta.stride(0), eps),
        WIDTH=width,
        BLOCK=block,
        HAS_DELTA=delta_TD is not None,
        NUM_GROUPS=num_groups,
        GROUP=block if num_groups == 1 else FP8_BLOCK,
        DTYPE=getattr(tl, str(dtype).removeprefix("torch.")),
        num_warps=min(max(block // 256, 1), 16),
        **dependent(),
    )


@triton.jit
def _norm_kernel(  # noqa: PLR0913
    x_TD,
    delta_TD,
    weight_D,
    out_TD,
    scale_TG,
    x_stride,
    delta_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    # The weight does not wait for the row.
    weight = tl.load(weight_D + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_input(IS_DEPENDENT)
    x_at = x_TD + row * x_stride + column
    x = tl.load(x_at, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_TD + row * delta_stride + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(x_at, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    out = x * scale * weight
    if scale_TG is not None:
        out_GS = tl.reshape(out.to(DTYPE).to(tl.float32), (BLOCK // GROUP, GROUP))
        codes_GS, scale_G = rounded(out_GS)
        group = tl.arange(0, BLOCK // GROUP)
        tl.store(scale_TG + row * NUM_GROUPS + group, scale_G, mask=group < NUM_GROUPS)
        out = tl.reshape(codes_GS, (BLOCK,))
    tl.store(out_TD + row * WIDTH + column, out.to(out_TD.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up_TI: Tensor) -> Tensor:
    rows, width = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    out_TI = gate_up_TI.new_empty(rows, width)
    grid = (rows, triton.cdiv(width, _GATES))
    _silu_and_mul_kernel[grid](
        *(gate_up_TI, out_TI, gate_up_TI.stride(0)),
        WIDTH=width,
        BLOCK=_GATES,
        num_warps=4,
        **dependent(),
    )
    return out_TI


@triton.jit
def _silu_and_mul_kernel(
    gate_up_TI,
    out_TI,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_input(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate_at = gate_up_TI + row * stride + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_TI + row * WIDTH + column, out.to(out_TI.dtype.element_ty), mask=inside)


def sigmoid_mul(x_TD: Tensor, gate_TD: Tensor) -> Tensor:
    rows, width = x_TD.shape
    out_TD = x_TD.new_empty(rows, width)
    _sigmoid_mul_kernel[(rows, triton.cdiv(width, _GATES))](
        *(x_TD, gate_TD, out_TD, x_TD.stride(0), gate_TD.stride(0)),
        WIDTH=width,
        BLOCK=_GATES,
        num_warps=4,
        **dependent(),
    )
    return out_TD


@triton.jit
def _sigmoid_mul_kernel(
    x_TD,
    gate_TD,
    out_TD,
    x_stride,
    gate_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_input(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_TD + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_TD + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    out = x / (1.0 + tl.exp(-gate))
    tl.store(out_TD + row * WIDTH + column, out.to(out_TD.dtype.element_ty), mask=inside)


def place_heads(
    qkv_TD: Tensor,
    rotation_TH: Tensor,
    norms: HeadNorms | None,
    key_NSH: Tensor,
    value_NSH: Tensor,
    slot_T: Tensor,
    scales: KvScales | None = None,
) -> None:
    num_kv, _, head_size = key_NSH.shape
    num_heads = qkv_TD.shape[1] // head_size
    padded_size = triton.next_power_of_2(head_size)
    heads_at_once = min(max(_HEAD_NUMBERS // padded_size, 1), triton.next_power_of_2(num_heads))
    rotation = torch.view_as_real(rotation_TH)
    query_norm, key_norm = (qkv_TD, qkv_TD) if norms is None else (norms.query_H, norms.key_H)
    _place_heads_kernel[(len(qkv_TD), triton.cdiv(num_heads, heads_at_once))](
        *(qkv_TD, rotation, query_norm, key_norm, key_NSH, value_NSH, *(scales or (None, None))),
        slot_T,
        *(qkv_TD.stride(0), rotation.stride(0), key_NSH.stride(0)),
        0.0 if norms is None else norms.eps,
        NUM_Q=num_heads - 2 * num_kv,
        NUM_KV=num_kv,
        HEAD=head_size,
        HEADS=heads_at_once,
        PADDED=padded_size,
        HAS_NORMS=norms is not None,
        num_warps=4,
        **dependent(),
    )


@triton.jit(do_not_specialize_on_alignment=["slot_T"])
def _place_heads_kernel(  # noqa: PLR0913
    qkv_TD,
    rotation_TH2,
    query_norm_H,
    key_norm_H,
    key_NSH,
    value_NSH,
    key_scale_N,
    value_scale_N,
    slot_T,
    qkv_stride,
    rotation_stride,
    cache_stride,
    eps,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, PADDED)
    in_head = column < HEAD
    inside = (head < NUM_Q + 2 * NUM_KV) & in_head[None, :]
    wait_for_input(IS_DEPENDENT)
    slot = tl.load(slot_T + token).to(tl.int64)
    turn = tl.load(rotation_TH2 + token * rotation_stride + column, mask=in_head, other=0.0)
    x_at = qkv_TD + token * qkv_stride + head * HEAD + column[None, :]
    x = tl.load(x_at, mask=inside, other=0.0)

    turned = x.to(tl.float32)
    if HAS_NORMS:
        query_norm = tl.load(query_norm_H + column, mask=in_head, other=0.0).to(tl.float32)
        key_norm = tl.load(key_norm_H + column, mask=in_head, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(turned * turned, axis=1) / HEAD + eps)
        turned *= scale[:, None]
        turned *= tl.where(head < NUM_Q, query_norm[None, :], key_norm[None, :])
    cos, sin = tl.split(tl.reshape(turn, (1, PADDED // 2, 2)))
    even, odd = tl.split(tl.reshape(turned, (HEADS, PADDED // 2, 2)))
    turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    turned = tl.reshape(turned, (HEADS, PADDED)).to(x.dtype)

    is_key, is_value = (head >= NUM_Q) & (head < NUM_Q + NUM_KV), head >= NUM_Q + NUM_KV
    tl.store(x_at, turned, mask=inside & (head < NUM_Q + NUM_KV))
    # Slots times head size may pass 2^31, and -1 is no slot.
    cache_at = slot * HEAD + column[None, :]
    key_at = key_NSH + (head - NUM_Q).to(tl.int64) * cache_stride + cache_at
    value_at = value_NSH + (head - NUM_Q - NUM_KV).to(tl.int64) * cache_stride + cache_at
    is_written = inside & (slot >= 0)
    if key_scale_N is not None:
        is_last = is_value & (head < NUM_Q + 2 * NUM_KV)
        turned = encoded(turned, tl.load(key_scale_N + head - NUM_Q, mask=is_key, other=1.0))
        value_scale_at = value_scale_N + head - NUM_Q - NUM_KV
        x = encoded(x, tl.load(value_scale_at, mask=is_last, other=1.0))
    tl.store(key_at, turned, mask=is_written & is_key)
    tl.store(value_at, x, mask=is_written & is_value)
