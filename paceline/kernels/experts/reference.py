"""Which experts a token takes, and the products of the chosen ones. In torch.

`route` turns the router's logits (their product is layers/moe's) into experts and weights.
`apply_experts` is the sum over k of weight_k * down_e(silu(gate_e x) * up_e x): every expert on
every row that chose it, one expert after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from paceline.kernels.fp8.reference import Fp8Weight, fp8_linear, quantise_rows

# Where a score is not a number, or none at all: two of them can be added.
NO_SCORE = -1e30
# What the sum of sigmoids is raised by before others are divided by it.
TINY = 1e-20


class Routing(NamedTuple):
    """How experts are chosen."""

    num_chosen: int
    is_sigmoid: bool = False  # else softmax over all experts
    is_normed: bool = True  # weights of the chosen are divided by their sum
    scaling: float = 1.0
    num_groups: int = 1  # groups with the best pairs of experts are kept before the choice
    num_chosen_groups: int = 1
    num_shared: int = 0  # experts behind the last one, which every row takes with weight 1,
    has_shared_gate: bool = False  # or with the sigmoid of the logits' last column


def route(logits_TE: Tensor, bias_E: Tensor | None, how: Routing) -> tuple[Tensor, Tensor]:
    """Experts int32 [T, k] by falling score, ties by rising id, and their fp32 weights [T, k].

    Shared experts come last in both. Logits have no column for them but that of their gate.

    The bias, if any, takes part in the choice and not in the weights. A row with a NaN gets valid
    experts and weights that are NaN.
    """
    logits_TE = logits_TE.float()
    gate_T1 = torch.ones_like(logits_TE[:, :1])
    if how.has_shared_gate:
        logits_TE, gate_T1 = logits_TE[:, :-1], torch.sigmoid(logits_TE[:, -1:])
    if how.is_sigmoid:
        score_TE = choice_TE = torch.sigmoid(logits_TE)
    else:
        # Softmax keeps the order, and the logits have no ties that rounding made.
        score_TE, choice_TE = torch.softmax(logits_TE, dim=1), logits_TE
    if bias_E is not None:
        choice_TE = choice_TE + bias_E
    choice_TE = torch.where(choice_TE >= NO_SCORE, choice_TE, NO_SCORE)
    if how.num_groups > 1:
        choice_TE = _in_best_groups(choice_TE, how)
    chosen_TK = _best(choice_TE, how.num_chosen)
    weight_TK = score_TE.gather(1, chosen_TK)
    if how.is_normed:
        least = TINY if how.is_sigmoid else 0.0
        weight_TK = weight_TK / (weight_TK.sum(1, keepdim=True) + least)
    chosen_TK, weight_TK = chosen_TK.int(), weight_TK * how.scaling
    if how.num_shared:
        num_rows, first = logits_TE.shape
        shared_K = torch.arange(first, first + how.num_shared, device=logits_TE.device)
        shared_TK = shared_K.int().expand(num_rows, -1)
        chosen_TK = torch.cat((chosen_TK, shared_TK), dim=1)
        weight_TK = torch.cat((weight_TK, gate_T1.expand(-1, how.num_shared)), dim=1)
    return chosen_TK, weight_TK


def _in_best_groups(choice_TE: Tensor, how: Routing) -> Tensor:
    """A group is as good as its two best experts together; those of others cannot be chosen."""
    choice_TGE = choice_TE.unflatten(1, (how.num_groups, -1))
    pair_TG = choice_TGE.topk(2, dim=2).values.sum(2)
    kept_TG = torch.zeros_like(pair_TG, dtype=torch.bool)
    kept_TG.scatter_(1, _best(pair_TG, how.num_chosen_groups), True)
    kept_TGE: Tensor = choice_TGE.masked_fill(~kept_TG.unsqueeze(2), float("-inf"))
    return kept_TGE.flatten(1)


def _best(score_TE: Tensor, count: int) -> Tensor:
    """topk leaves ties open; a stable sort decides them."""
    return score_TE.sort(dim=1, descending=True, stable=True).indices[:, :count]


class ExpertWeights(NamedTuple):
    """The experts of a layer, stacked. In e4m3 if there are scales (kernels/fp8)."""

    gate_up_EIH: Tensor  # [E, 2 * inner, hidden]: gate rows, then up rows
    down_EHI: Tensor  # [E, hidden, inner]
    # fp32 [E, N, 1], or by block [E, ceil(N / 128), ceil(K / 128)], for N outputs and K inputs.
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self if x is not None)


def apply_experts(
    x_TD: Tensor,
    chosen_TK: Tensor,
    weight_TK: Tensor,
    experts: ExpertWeights,
    shared_TD: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """What the chosen experts make of each row, weighed and summed up in fp32, plus `shared_TD`.

    Expert -1 means none: it adds nothing, whatever its weight. Returns [T, D] in `out_dtype` (None:
    the type of the experts' weights; with scales that of the rows). Rows depend on nothing but
    themselves. With scales, rows are rounded before each of the two products.
    """
    gate_up_EIH, down_EHI, gate_up_scale, down_scale = experts
    dtype = down_EHI.dtype if down_scale is None else x_TD.dtype
    x_TD = x_TD.to(dtype)
    sum_TD = x_TD.new_zeros(x_TD.shape, dtype=torch.float32)
    if shared_TD is not None:
        sum_TD += shared_TD
    # No host read on a GPU: there, all experts see all rows.
    used = chosen_TK.unique().tolist() if chosen_TK.is_cpu else range(len(gate_up_EIH))
    for expert in used:
        if expert < 0:
            continue
        is_chosen_TK = chosen_TK == expert
        weight_T1 = torch.where(is_chosen_TK, weight_TK, 0.0).sum(1, keepdim=True)
        gate_TI, up_TI = _product(x_TD, gate_up_EIH, gate_up_scale, expert).chunk(2, dim=1)
        inner_TI = (silu(gate_TI) * up_TI).to(dtype)
        share_TD = _product(inner_TI, down_EHI, down_scale, expert) * weight_T1
        sum_TD += share_TD.masked_fill(~is_chosen_TK.any(1, keepdim=True), 0.0)
    return sum_TD.to(out_dtype or dtype)


def _product(x_TK: Tensor, weight_ENK: Tensor, scale: Tensor | None, expert: int) -> Tensor:
    """One expert's product, in fp32."""
    if scale is None:
        return linear(x_TK.float(), weight_ENK[expert].float())
    is_blocked = scale.shape[1] != weight_ENK.shape[1]
    weight = Fp8Weight(weight_ENK[expert], scale[expert], is_blocked)
    return fp8_linear(quantise_rows(x_TK, is_blocked), weight, None, torch.float32)
