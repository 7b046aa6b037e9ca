"""Which experts a token takes, on the GPU: one launch, one program a row.

Experts lie in a tile of groups by members, so that any count of either fits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.experts.reference import NO_SCORE, TINY, Routing
from paceline.kernels.gpu.triton import dependent, wait_for_input


def route(logits_TE: Tensor, bias_E: Tensor | None, how: Routing) -> tuple[Tensor, Tensor]:
    num_rows, num_experts = logits_TE.shape
    num_experts -= how.has_shared_gate
    num_taken = how.num_chosen + how.num_shared
    shape, device = (num_rows, num_taken), logits_TE.device
    chosen_TK = torch.empty(shape, dtype=torch.int32, device=device)
    weight_TK = torch.empty(shape, dtype=torch.float32, device=device)
    size = num_experts // how.num_groups
    _route_kernel[(num_rows,)](
        *(logits_TE, logits_TE if bias_E is None else bias_E, chosen_TK, weight_TK),
        *(logits_TE.stride(0), how.scaling),
        GROUPS=how.num_groups,
        SIZE=size,
        PADDED_GROUPS=triton.next_power_of_2(how.num_groups),
        PADDED_SIZE=triton.next_power_of_2(size),
        CHOSEN=how.num_chosen,
        TAKEN=num_taken,
        PADDED_TAKEN=triton.next_power_of_2(num_taken),
        CHOSEN_GROUPS=how.num_chosen_groups,
        HAS_BIAS=bias_E is not None,
        IS_SIGMOID=how.is_sigmoid,
        IS_NORMED=how.is_normed,
        HAS_SHARED_GATE=how.has_shared_gate,
        NONE=NO_SCORE,
        LEAST=TINY if how.is_sigmoid else 0.0,
        num_warps=1 if num_experts <= 256 else 4,
        **dependent(),
    )
    return chosen_TK, weight_TK


@triton.jit
def _route_kernel(  # noqa: PLR0913
    logits_TE,
    bias_E,
    chosen_TK,
    weight_TK,
    logits_stride,
    scaling,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    TAKEN: tl.constexpr,
    PADDED_TAKEN: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_NORMED: tl.constexpr,
    HAS_SHARED_GATE: tl.constexpr,
    NONE: tl.constexpr,
    LEAST: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_input(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, PADDED_GROUPS), tl.arange(0, PADDED_SIZE)
    inside = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    expert = group[:, None] * SIZE + member[None, :]
    lowest = float("-inf")
    logit = tl.load(logits_TE + row * logits_stride + expert, mask=inside, other=lowest)
    logit = logit.to(tl.float32)
    if IS_SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
        choice = score
    else:
        part = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        score = part / tl.sum(tl.sum(part, 1), 0)
        choice = logit
    if HAS_BIAS:
        choice += tl.load(bias_E + expert, mask=inside, other=0.0)
    # NaN is not above anything; what is outside stays below all.
    choice = tl.where(choice >= NONE, choice, NONE)
    choice = tl.where(inside, choice, lowest)
    if GROUPS > 1:
        choice = _in_best_groups(choice, GROUPS, PADDED_GROUPS, PADDED_SIZE, CHOSEN_GROUPS)

    count: tl.constexpr = PADDED_GROUPS * PADDED_SIZE
    choice, score = tl.reshape(choice, (count,)), tl.reshape(score, (count,))
    expert, place = tl.reshape(expert, (count,)), tl.arange(0, count)
    index = tl.arange(0, PADDED_TAKEN)
    chosen = GROUPS * SIZE + index - CHOSEN  # shared experts, behind those of the choice
    weight = tl.zeros((PADDED_TAKEN,), dtype=tl.float32)
    for k in tl.static_range(CHOSEN):
        is_best = place == tl.argmax(choice, 0)
        chosen = tl.where(index == k, tl.sum(tl.where(is_best, expert, 0), 0), chosen)
        weight = tl.where(index == k, tl.sum(tl.where(is_best, score, 0.0), 0), weight)
        choice = tl.where(is_best, lowest, choice)
    if IS_NORMED:
        weight /= tl.sum(weight, 0) + LEAST
    shared = 1.0
    if HAS_SHARED_GATE:
        gate = tl.load(logits_TE + row * logits_stride + GROUPS * SIZE).to(tl.float32)
        shared = 1.0 / (1.0 + tl.exp(-gate))
    weight = tl.where(index < CHOSEN, weight * scaling, shared)
    at = row * TAKEN + index
    tl.store(chosen_TK + at, chosen, mask=index < TAKEN)
    tl.store(weight_TK + at, weight, mask=index < TAKEN)


@triton.jit
def _in_best_groups(
    choice,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
):
    group, member = tl.arange(0, PADDED_GROUPS), tl.arange(0, PADDED_SIZE)
    lowest = float("-inf")
    is_first = member[None, :] == tl.argmax(choice, 1)[:, None]
    pair = tl.max(choice, 1) + tl.max(tl.where(is_first, lowest, choice), 1)
    pair = tl.where(group < GROUPS, pair, lowest)
    is_kept = tl.zeros((PADDED_GROUPS,), dtype=tl.int32)
    for _ in tl.static_range(CHOSEN_GROUPS):
        is_best = group == tl.argmax(pair, 0)
        is_kept = tl.where(is_best, 1, is_kept)
        pair = tl.where(is_best, lowest, pair)
    return tl.where((is_kept > 0)[:, None], choice, lowest)
