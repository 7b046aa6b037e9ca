"""Routers and experts, number by number: the choice, its weights, NaN rows, neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from paceline.kernels.elementwise.reference import silu_and_mul
from paceline.kernels.experts.reference import ExpertWeights, Routing, apply_experts, route
from paceline.layers.linear import DenseLinear
from paceline.layers.mlp import GatedMlp
from paceline.layers.moe import Experts, MoeMlp, Router, SeparateExperts, StackedExperts
from paceline.parallel.expert_exchange import NO_EXPERT, RoutedRows

EXPERTS, CHOSEN, WIDTH, INNER = 6, 2, 12, 8
NAN = float("nan")


def weights() -> ExpertWeights:
    random = torch.Generator().manual_seed(1)
    gate_up = torch.randn(EXPERTS, 2 * INNER, WIDTH, generator=random)
    return ExpertWeights(gate_up, torch.randn(EXPERTS, WIDTH, INNER, generator=random))


def experts(kind: str) -> Experts:
    gate_up, down, *_ = weights()
    if kind == "stacked":
        return StackedExperts(weights(), apply_experts)
    pairs = zip(gate_up, down, strict=True)
    return SeparateExperts(
        [GatedMlp(DenseLinear(g, None), DenseLinear(d, None), silu_and_mul) for g, d in pairs]
    )


def rows(count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", ["stacked", "separate"])
def test_every_row_gets_the_sum_of_its_experts_and_the_shared_one(kind: str) -> None:
    x_TD, shared_TD = rows(9), rows(9).flip(0)
    chosen_TK, weight_TK = route(torch.randn(9, EXPERTS), None, Routing(CHOSEN))
    found = experts(kind)(RoutedRows(x_TD, chosen_TK, weight_TK), shared_TD.clone())
    gate_up, down, *_ = weights()
    for t in range(9):
        wanted = shared_TD[t].clone()
        for expert, weight in zip(chosen_TK[t].tolist(), weight_TK[t], strict=True):
            gate, up = (gate_up[expert] @ x_TD[t]).chunk(2)
            wanted += weight * (down[expert] @ (silu(gate) * up))
        torch.testing.assert_close(found[t], wanted)


@pytest.mark.trap("I9")
@pytest.mark.parametrize("kind", ["stacked", "separate"])
def test_no_expert_adds_nothing_for_any_row_and_weight(kind: str) -> None:
    x_TD, shared_TD = rows(4), rows(4).flip(0)
    chosen_TK, weight_TK = route(torch.randn(4, EXPERTS), None, Routing(CHOSEN))
    whole = experts(kind)(RoutedRows(x_TD, chosen_TK, weight_TK), shared_TD)
    first_TK = chosen_TK.clone()
    first_TK[:, 1] = NO_EXPERT
    second_TK = torch.where(first_TK < 0, chosen_TK, NO_EXPERT)
    halves = [
        experts(kind)(RoutedRows(x_TD, x, torch.where(x < 0, NAN, weight_TK)), None)
        for x in (first_TK, second_TK)
    ]
    torch.testing.assert_close(halves[0] + halves[1] + shared_TD, whole)
    poisoned = RoutedRows(x_TD.fill_(NAN), first_TK.fill_(NO_EXPERT), weight_TK.fill_(NAN))
    assert torch.equal(experts(kind)(poisoned, shared_TD), shared_TD)
    assert experts(kind)(RoutedRows(*(x[:0] for x in poisoned)), None).shape == (0, WIDTH)


@pytest.mark.trap("I9")
@pytest.mark.parametrize("kind", ["stacked", "separate"])
def test_a_row_of_nan_takes_valid_experts_and_changes_no_other_row(kind: str) -> None:
    random = torch.Generator().manual_seed(3)
    weight_EH = torch.randn(EXPERTS, WIDTH, generator=random)
    router = Router(DenseLinear(weight_EH, None), None, Routing(CHOSEN), route)
    block = MoeMlp(router, experts(kind))
    x_TD = rows(5)
    x_TD[3] = NAN
    found = block(x_TD)
    assert found[3].isnan().all()
    others = [0, 1, 2, 4]
    torch.testing.assert_close(found[others], block(x_TD[others]))


@pytest.mark.trap("I9")
@pytest.mark.parametrize(
    "how",
    [Routing(3), Routing(3, is_sigmoid=True, num_groups=2, num_chosen_groups=1)],
    ids=["softmax", "sigmoid"],
)
def test_a_choice_is_valid_and_distinct_whatever_the_logits_are(how: Routing) -> None:
    lows = torch.full((EXPERTS,), -math.inf)
    some = torch.tensor([NAN, 1.0, NAN, -math.inf, 2.0, math.inf])
    logits_TE = torch.stack([torch.full((EXPERTS,), NAN), lows, some, torch.zeros(EXPERTS)])
    bias_E = torch.zeros(EXPERTS) if how.is_sigmoid else None
    chosen_TK, weight_TK = route(logits_TE, bias_E, how)
    assert chosen_TK.dtype == torch.int32
    assert weight_TK.dtype == torch.float32
    for chosen in chosen_TK.tolist():
        assert len(set(chosen)) == 3
        assert all(0 <= expert < EXPERTS for expert in chosen)
    assert chosen_TK[3].tolist() == [0, 1, 2], "ties go to the lowest id"


def test_softmax_weights_are_of_all_experts_and_scaled_to_one_if_asked() -> None:
    logits_TE = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0, 0.5]])
    share_E = torch.softmax(logits_TE, 1)[0]
    chosen_TK, weight_TK = route(logits_TE, None, Routing(2, is_normed=False))
    assert chosen_TK.tolist() == [[1, 3]]
    torch.testing.assert_close(weight_TK[0], share_E[[1, 3]])
    _, weight_TK = route(logits_TE, None, Routing(2))
    torch.testing.assert_close(weight_TK[0], share_E[[1, 3]] / share_E[[1, 3]].sum())


def test_the_bias_is_for_the_choice_and_groups_are_kept_by_their_best_pair() -> None:
    logits_TE = torch.tensor([[4.0, -9.0, -9.0, 1.0, 1.0, 0.9, 0.0, 0.0, 0.0]])
    bias_E = torch.tensor([0.0, 0, 0, 0, 0, 0.5, 0, 0, 0.1])
    how = Routing(
        2, is_sigmoid=True, scaling=2.5, num_groups=3, num_chosen_groups=1, is_normed=True
    )
    chosen_TK, weight_TK = route(logits_TE, bias_E, how)
    # Group 0 has the best expert, group 1 the best pair; there the bias lifts the third.
    assert chosen_TK.tolist() == [[5, 3]]
    score = torch.sigmoid(torch.tensor([0.9, 1.0]))
    torch.testing.assert_close(weight_TK[0], score / score.sum() * 2.5)


def test_shared_experts_are_taken_by_every_row_with_weight_one() -> None:
    """Stacked behind the others they make what an MLP as wide as all of them makes."""
    gate_up, down, *_ = weights()
    x_TD, routed = rows(7), EXPERTS - 2
    logits_TE = torch.randn(7, routed, generator=torch.Generator().manual_seed(3))
    how = Routing(CHOSEN, scaling=1.5)
    chosen_TK, weight_TK = route(logits_TE, None, how)
    both_TK, weights_TK = route(logits_TE, None, how._replace(num_shared=2))
    assert both_TK[:, CHOSEN:].tolist() == [[routed, routed + 1]] * 7
    assert (weights_TK[:, CHOSEN:] == 1).all()
    assert torch.equal(both_TK[:, :CHOSEN], chosen_TK)
    assert torch.equal(weights_TK[:, :CHOSEN], weight_TK)
    gate_RD, up_RD = (torch.cat([x.chunk(2)[i] for x in gate_up[routed:]]) for i in (0, 1))
    inner_TI = silu(x_TD @ gate_RD.T) * (x_TD @ up_RD.T)
    shared_TD = inner_TI @ torch.cat(list(down[routed:]), dim=1).T
    apart = experts("stacked")(RoutedRows(x_TD, chosen_TK, weight_TK), shared_TD)
    stacked = experts("stacked")(RoutedRows(x_TD, both_TK, weights_TK), None)
    torch.testing.assert_close(stacked, apart)
