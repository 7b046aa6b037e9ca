"""A row's experts give it the same bits whoever its neighbours are, and however many."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.experts.reference import ExpertWeights, Routing, route


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [(1, 16), (17, 32), (33, 64), (65, 300)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_row_has_the_same_bits_among_any_neighbours(
    counts: tuple[int, int], dtype: torch.dtype
) -> None:
    from paceline.kernels.experts.triton.products import apply_experts

    torch.manual_seed(0)
    few, many = counts
    num_experts, width, inner = 24, 512, 384
    gate_up = torch.randn(num_experts + 1, 2 * inner, width, device="cuda") * width**-0.5
    down = torch.randn(num_experts + 1, width, inner, device="cuda") * inner**-0.5
    experts = ExpertWeights(gate_up.to(dtype), down.to(dtype))
    x_TD = torch.randn(many, width, device="cuda").to(dtype)
    logits_TE = torch.randn(many, num_experts, device="cuda")
    chosen_TK, weight_TK = route(logits_TE, None, Routing(4, num_shared=1))
    whole = apply_experts(x_TD, chosen_TK, weight_TK, experts)
    order = torch.randperm(many, device="cuda")[:few]
    part = apply_experts(x_TD[order], chosen_TK[order], weight_TK[order], experts)
    assert torch.equal(part, whole[order])
