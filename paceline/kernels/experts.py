"""The products of chosen experts: sum over k of weight_k * down_e(silu(gate_e x) * up_e x).

The torch reference: every expert on every row that chose it, one expert after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


class ExpertWeights(NamedTuple):
    """The experts of a layer, stacked."""

    gate_up_EIH: Tensor  # [E, 2 * inner, hidden]: gate rows, then up rows
    down_EHI: Tensor  # [E, hidden, inner]


def apply_experts(
    x_TD: Tensor,
    chosen_TK: Tensor,
    weight_TK: Tensor,
    experts: ExpertWeights,
    shared_TD: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """What the chosen experts make of each row, weighed and summed up in fp32, plus `shared_TD`.

    Expert -1 is nobody: it adds nothing, whatever its weight. Returns [T, D] in `out_dtype` (None:
    the type of the experts' weights). Rows depend on nothing but themselves.
    """
    gate_up_EIH, down_EHI = experts
    dtype = down_EHI.dtype
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
        gate_TI, up_TI = linear(x_TD.float(), gate_up_EIH[expert].float()).chunk(2, dim=1)
        inner_TI = (silu(gate_TI) * up_TI).to(dtype)
        share_TD = linear(inner_TI.float(), down_EHI[expert].float()) * weight_T1
        sum_TD += share_TD.masked_fill(~is_chosen_TK.any(1, keepdim=True), 0.0)
    return sum_TD.to(out_dtype or dtype)
