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
from paceline.layers.attention import ForwardInputs
from paceline.layers.linear import Linear
from paceline.layers.mlp import GatedMlp
from paceline.parallel.collectives import Group
from paceline.parallel.expert_exchange import ExpertExchange, RoutedRows


class Experts(Protocol):
    """Rows and their experts -> the experts' weighted sum, plus what the shared one made.

    `num_rows`: the most rows that any rank has in this pass; None: as many as here.
    """

    def __call__(
        self, rows: RoutedRows, shared_TD: Tensor | None, num_rows: int | None = None
    ) -> Tensor: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True)
class MoeMlp:
    """The sum of the chosen experts, by the router's weights, and of the shared expert."""

    router: Router
    experts: Experts
    shared: GatedMlp | None = None

    def __call__(self, x_TD: Tensor, inputs: ForwardInputs | None = None) -> Tensor:
        rows = RoutedRows(x_TD, *self.router(x_TD))
        shared_TD = None if self.shared is None else self.shared(x_TD)
        return self.experts(rows, shared_TD, None if inputs is None else inputs.num_rows)

    @property
    def nbytes(self) -> int:
        shared = 0 if self.shared is None else self.shared.nbytes
        return self.router.nbytes + self.experts.nbytes + shared


@dataclass(slots=True)
class Router:
    """Logits by expert, and the choice among them. Whole on every rank: all choose alike."""

    linear: Linear  # gives fp32
    bias_E: Tensor | None  # fp32
    how: Routing
    route: Route

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return self.route(self.linear(x_TD), self.bias_E, self.how)

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes


# ---- on one rank


@dataclass(slots=True)
class StackedExperts:
    """All experts in two tensors and one call: for fixed shapes, may be captured."""

    weights: ExpertWeights
    apply: ApplyExperts
    out_dtype: torch.dtype | None = None  # None: the weights'

    def __call__(
        self, rows: RoutedRows, shared_TD: Tensor | None, num_rows: int | None = None
    ) -> Tensor:
        return self.apply(*rows, self.weights, shared_TD, self.out_dtype)

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
        self, rows: RoutedRows, shared_TD: Tensor | None, num_rows: int | None = None
    ) -> Tensor:
        x_TD, chosen_TK, weight_TK = rows
        sum_TD = torch.zeros_like(x_TD) if shared_TD is None else shared_TD.clone()
        flat_E, order_E = chosen_TK.flatten().sort(stable=True)
        row_E, weight_E = order_E // chosen_TK.shape[1], weight_TK.flatten()[order_E]
        used, counts = (x.tolist() for x in flat_E.unique_consecutive(return_counts=True))
        # By rising id, so that a row adds up in the same order whoever its neighbours are.
        places = zip(used, row_E.split(counts), weight_E.split(counts), strict=True)
        for expert, row_R, weight_R in places:
            if expert < 0:  # nobody
                continue
            out_RD = self.experts[expert](x_TD.index_select(0, row_R))
            sum_TD.index_add_(0, row_R, out_RD * weight_R.unsqueeze(1))
        return sum_TD

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.experts)


# ---- on several ranks. `inner` gives fp32 sums, which are rounded when all ranks' are added.


@dataclass(slots=True)
class ReducedExperts:
    """Every rank has a part of each expert, and of the shared one: one sum over `tp` for all."""

    inner: Experts
    tp: Group

    def __call__(
        self, rows: RoutedRows, shared_TD: Tensor | None, num_rows: int | None = None
    ) -> Tensor:
        return self.tp.all_reduce(self.inner(rows, shared_TD)).to(rows.x_TD.dtype)

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes


@dataclass(slots=True)
class SpreadExperts:
    """Every rank has some of the experts, whole: rows go to them and their sums come back."""

    inner: Experts  # this rank's, numbered from 0
    exchange: ExpertExchange
    num_experts: int  # of all ranks
    has_shared_part: bool  # the shared expert lies in parts over the exchange's `tp`; else whole

    def __call__(
        self, rows: RoutedRows, shared_TD: Tensor | None, num_rows: int | None = None
    ) -> Tensor:
        part_TD = shared_TD if self.has_shared_part else None
        sum_TD = self.exchange.run(rows, self.num_experts, num_rows, self._apply, part_TD)
        if shared_TD is not None and part_TD is None:
            sum_TD = sum_TD + shared_TD
        return sum_TD.to(rows.x_TD.dtype)

    def _apply(self, rows: RoutedRows) -> Tensor:
        return self.inner(rows, None)

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes
