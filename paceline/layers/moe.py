"""An MLP block of experts: a router picks a few for each token; one more may serve all of them.

Knows no families: what a router does is data (kernels/routing), names are models/moe_loading's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels.dispatch import ApplyExperts, Route
from paceline.kernels.experts import ExpertWeights
from paceline.kernels.routing import Routing
from paceline.layers.linear import Linear
from paceline.layers.mlp import GatedMlp, Mlp


class Experts(Protocol):
    """Experts [T, k] and their weights -> their weighted sum, plus what the shared one made."""

    def __call__(
        self, x_TD: Tensor, chosen_TK: Tensor, weight_TK: Tensor, shared_TD: Tensor | None
    ) -> Tensor: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True)
class MoeMlp:
    """The sum of the chosen experts, by the router's weights, and of the shared expert."""

    router: Router
    experts: Experts
    shared: Mlp | None = None

    def __call__(self, x_TD: Tensor) -> Tensor:
        chosen_TK, weight_TK = self.router(x_TD)
        shared_TD = None if self.shared is None else self.shared(x_TD)
        return self.experts(x_TD, chosen_TK, weight_TK, shared_TD)

    @property
    def nbytes(self) -> int:
        shared = 0 if self.shared is None else self.shared.nbytes
        return self.router.nbytes + self.experts.nbytes + shared


@dataclass(slots=True)
class Router:
    """Logits by expert, and the choice among them."""

    linear: Linear  # gives fp32
    bias_E: Tensor | None  # fp32
    how: Routing
    route: Route

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return self.route(self.linear(x_TD), self.bias_E, self.how)

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes


@dataclass(slots=True)
class StackedExperts:
    """All experts in two tensors and one call: for fixed shapes, may be captured."""

    weights: ExpertWeights
    apply: ApplyExperts

    def __call__(
        self, x_TD: Tensor, chosen_TK: Tensor, weight_TK: Tensor, shared_TD: Tensor | None
    ) -> Tensor:
        return self.apply(x_TD, chosen_TK, weight_TK, self.weights, shared_TD)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.weights)


@dataclass(slots=True)
class SeparateExperts:
    """CPU: each expert is an MLP of its own, in whatever format the linears have there.

    Only experts that some row chose are computed, on those rows.
    """

    experts: list[GatedMlp]

    def __call__(
        self, x_TD: Tensor, chosen_TK: Tensor, weight_TK: Tensor, shared_TD: Tensor | None
    ) -> Tensor:
        sum_TD = torch.zeros_like(x_TD) if shared_TD is None else shared_TD.clone()
        flat_E, order_E = chosen_TK.flatten().sort(stable=True)
        row_E, weight_E = order_E // chosen_TK.shape[1], weight_TK.flatten()[order_E]
        used, counts = (x.tolist() for x in flat_E.unique_consecutive(return_counts=True))
        # By rising id, so that a row adds up in the same order whoever its neighbours are.
        rows, weights = row_E.split(counts), weight_E.split(counts)
        for expert, row_R, weight_R in zip(used, rows, weights, strict=True):
            out_RD = self.experts[expert](x_TD.index_select(0, row_R))
            sum_TD.index_add_(0, row_R, out_RD * weight_R.unsqueeze(1))
        return sum_TD

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.experts)
