"""Head norms, rotation and the KV write on the GPU in one launch; twin of kernels/rope.

A program takes some heads of one token, queries, keys and values alike.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.rope import HeadNorms
from paceline.kernels.triton_chain import dependent, wait_for_input

# Numbers that a program takes: 16 bytes per thread of four warps in a two-byte type.
BLOCK = 1024


def place_heads(
    qkv_TD: Tensor,
    rotation_TH: Tensor,
    norms: HeadNorms | None,
    key_NSH: Tensor,
    value_NSH: Tensor,
    slot_T: Tensor,
) -> None:
    num_kv, _, head_size = key_NSH.shape
    num_heads = qkv_TD.shape[1] // head_size
    padded_size = triton.next_power_of_2(head_size)
    heads_at_once = min(max(BLOCK // padded_size, 1), triton.next_power_of_2(num_heads))
    rotation = torch.view_as_real(rotation_TH)
    query_norm, key_norm = (qkv_TD, qkv_TD) if norms is None else (norms.query_H, norms.key_H)
    _place_heads_kernel[(len(qkv_TD), triton.cdiv(num_heads, heads_at_once))](
        *(qkv_TD, rotation, query_norm, key_norm, key_NSH, value_NSH, slot_T),
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

    is_value = head >= NUM_Q + NUM_KV
    tl.store(x_at, turned, mask=inside & (head < NUM_Q + NUM_KV))
    # Slots times head size may pass 2^31, and -1 is no slot.
    cache_at = slot * HEAD + column[None, :]
    key_at = key_NSH + (head - NUM_Q).to(tl.int64) * cache_stride + cache_at
    value_at = value_NSH + (head - NUM_Q - NUM_KV).to(tl.int64) * cache_stride + cache_at
    is_written = inside & (slot >= 0)
    tl.store(key_at, turned, mask=is_written & (head >= NUM_Q) & (head < NUM_Q + NUM_KV))
    tl.store(value_at, x, mask=is_written & is_value)
