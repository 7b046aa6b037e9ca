"""A mixture of experts: a router chooses a few experts per token, and a shared one may serve all.

Knows no families: the router's rules are data (kernels/routing), loading is models/blocks/experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels.experts.reference import ExpertWeights, Routing
from paceline.layers.attention import ForwardInputs
from paceline.layers.linear import Linear
from paceline.layers.mlp import GatedMlp
from paceline.parallel.collectives import Group
from paceline.parallel.expert_exchange import ExpertExchange, RoutedRows

Route = Callable[[Tensor, Tensor | None, Routing], tuple[Tensor, Tensor]]
ApplyExperts = Callable[
    [Tensor, Tensor, Tensor, ExpertWeights, Tensor | None, torch.dtype | None], Tensor
]


class Experts(Protocol):
    """The weighted sum of each row's experts, plus the output of the shared expert.

    `num_rows` is the largest number of rows of any rank in this pass; None: as many as here.
    """

    def __call__(
        self, rows: RoutedRows, shared_TD: Tensor | None, num_rows: int | None = None
    ) -> Tensor: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True)
class SharedExpert:
    """The expert that every row takes, or this rank's part of it."""

    mlp: GatedMlp
    gate: Linear | None = None  # one number per row, fp32: the output is scaled by its sigmoid

    def __call__(self, x_TD: Tensor) -> Tensor:
        out_TD = self.mlp(x_TD)
        if self.gate is None:
            return out_TD
        return (out_TD * torch.sigmoid(self.gate(x_TD))).to(out_TD.dtype)

    @property
    def nbytes(self) -> int:
        return self.mlp.nbytes + (0 if self.gate is None else self.gate.nbytes)


@dataclass(slots=True)
class MoeMlp:
    """The chosen experts' outputs, weighted by the router, plus the shared expert's."""

    router: Router
    experts: Experts
    shared: SharedExpert | None = None

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
    """Logits by expert, and the choice. It is whole on every rank, so all make the same choice."""

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
    """All experts in two tensors and one call: fixed shapes, so a CUDA graph can capture it."""

    weights: ExpertWeights
    apply: ApplyExperts
    out_dtype: torch.dtype | None = None  # None: the weights'

    def __call__(
        self, rows: RoutedRows, shared_TD: Tensor | None, num_rows: int | None = None
    ) -> Tensor:
        return self.apply(*rows, self.weights, shared_TD, self.out_dtype)

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes


@dataclass(slots=True)
class SeparateExperts:
    """CPU: each expert is a separate MLP in the format of the CPU's linears.

    An expert is computed only for the rows that chose it.
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
        # In the order of ids, so that the sum of a row does not depend on the other rows.
        places = zip(used, row_E.split(counts), weight_E.split(counts), strict=True)
        for expert, row_R, weight_R in places:
            if expert < 0:  # NO_EXPERT
                continue
            out_RD = self.experts[expert](x_TD.index_select(0, row_R))
            sum_TD.index_add_(0, row_R, out_RD * weight_R.unsqueeze(1))
        return sum_TD

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.experts)


# ---- on several ranks. `inner` gives fp32 sums, which are rounded after the sum over ranks.


@dataclass(slots=True)
class ReducedExperts:
    """Tensor parallel: every rank has a slice of each expert; one sum over `tp` joins them."""

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
    """Expert parallel: every rank has some whole experts; rows are sent to them and back."""

    inner: Experts  # this rank's, numbered from 0
    exchange: ExpertExchange
    num_experts: int  # of all ranks
    has_shared_part: bool  # the shared expert is sliced over the exchange's `tp`; else whole

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
