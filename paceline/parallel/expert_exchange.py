"""Rows to the ranks that hold their experts, and sums back: experts spread over all ranks.

Knows ids, rows and groups. What an expert does to a row is the caller's (`apply`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.errors import CollectiveError, ConfigError
from paceline.parallel.collectives import Group

NOBODY = -1  # an expert that is not here, and the choices of a row that is nobody's


class RoutedRows(NamedTuple):
    """Rows, and what the router chose for each."""

    x_TD: Tensor
    chosen_TK: Tensor  # int32; NOBODY: no expert
    weight_TK: Tensor  # fp32


# What this rank's experts (numbered from 0; NOBODY: skipped) make of rows, weighed and summed up.
# Sums are fp32 and stay so until all ranks' are added: a row then differs from one rank's by the
# order of additions alone, not by a rounding per rank. It costs twice the bytes of a half type on
# the way back, where few rows wait for the first byte and not for the last.
Apply = Callable[[RoutedRows], Tensor]


class ExpertExchange(Protocol):
    """Between the router and the experts. All ranks call `run` together, each with its rows."""

    @property
    def tp(self) -> Group:
        """The ranks that hold the same rows."""

    @property
    def is_capturable(self) -> bool:
        """No host read, and shapes by `num_rows` alone."""

    def share(self, num_experts: int) -> range:
        """This rank's experts."""

    def run(
        self,
        rows: RoutedRows,
        num_experts: int,
        num_rows: int | None,
        apply: Apply,
        part_TD: Tensor | None = None,
    ) -> Tensor:
        """fp32 [T, D]: the sum over all ranks' experts; equal bits on the ranks of a replica.

        `num_rows` is the most rows that any rank has, None: as many as here. `part_TD` is this
        rank's part of something else that is to be summed up over `tp`.
        """


@dataclass(frozen=True, slots=True)
class _Spread:
    """Experts in rank order, in runs as even as they can be. A replica's ranks are neighbours."""

    tp: Group  # these hold the same rows
    dp: Group  # these hold other rows

    def share(self, num_experts: int) -> range:
        return self._share_of(self.dp.rank, num_experts)

    def _share_of(self, replica: int, num_experts: int) -> range:
        """The experts of the rank that has this place in another replica."""
        num_ranks = self.tp.size * self.dp.size
        if num_experts < num_ranks:
            raise ConfigError(
                f"{num_experts} experts cannot be spread over {num_ranks} ranks "
                f"(tensor_parallel_size {self.tp.size} x data_parallel_size {self.dp.size}); use "
                f"at most {num_experts} ranks, or leave out enable_expert_parallel."
            )
        rank = replica * self.tp.size + self.tp.rank
        return range(rank * num_experts // num_ranks, (rank + 1) * num_experts // num_ranks)

    def _apply_own(self, rows: RoutedRows, num_experts: int, apply: Apply) -> Tensor:
        if not len(rows.x_TD):
            return rows.x_TD.new_zeros(rows.x_TD.shape, dtype=torch.float32)
        own, chosen_TK = self.share(num_experts), rows.chosen_TK
        is_own_TK = (chosen_TK >= own.start) & (chosen_TK < own.stop)
        local_TK = torch.where(is_own_TK, chosen_TK - own.start, NOBODY)
        return apply(rows._replace(chosen_TK=local_TK)).float()

    def _join(self, sum_TD: Tensor, part_TD: Tensor | None) -> Tensor:
        return self.tp.all_reduce(sum_TD if part_TD is None else sum_TD + part_TD)


class GatherScatter(_Spread):
    """Everybody sees all rows: one all-gather, one reduce-scatter. Shapes by `num_rows` alone."""

    __slots__ = ()
    is_capturable: ClassVar[bool] = True

    def run(
        self,
        rows: RoutedRows,
        num_experts: int,
        num_rows: int | None,
        apply: Apply,
        part_TD: Tensor | None = None,
    ) -> Tensor:
        if not self.dp.is_active:
            return self._join(self._apply_own(rows, num_experts, apply), part_TD)
        num_here, width = rows.x_TD.shape
        num_rows = _checked(num_here, num_rows)
        packed_RB = self.dp.all_gather(_pack(_padded(rows, num_rows))).flatten(0, 1)
        partial_RD = self._apply_own(_unpack(packed_RB, rows), num_experts, apply)
        partial_GTD = partial_RD.view(self.dp.size, num_rows, width)
        return self._join(self.dp.reduce_scatter(partial_GTD)[:num_here], part_TD)


class AllToAll(_Spread):
    """A row travels only to ranks that hold some of its experts. The host reads how many do."""

    __slots__ = ()
    is_capturable: ClassVar[bool] = False

    def run(
        self,
        rows: RoutedRows,
        num_experts: int,
        num_rows: int | None,
        apply: Apply,
        part_TD: Tensor | None = None,
    ) -> Tensor:
        if not self.dp.is_active:
            return self._join(self._apply_own(rows, num_experts, apply), part_TD)
        _checked(len(rows.x_TD), num_rows)
        goes_GT = torch.stack(
            [self._goes_to(g, rows.chosen_TK, num_experts) for g in range(self.dp.size)]
        )
        counts_GG = self.dp.all_gather(goes_GT.sum(1, dtype=torch.int32)).tolist()
        send, receive = counts_GG[self.dp.rank], [x[self.dp.rank] for x in counts_GG]
        row_R = goes_GT.nonzero()[:, 1]  # by replica, then by row
        arrived = self.dp.all_to_all(_pack(rows).index_select(0, row_R), send, receive)
        partial_RD = self._apply_own(_unpack(arrived, rows), num_experts, apply)
        partial_RD = self.dp.all_to_all(partial_RD, receive, send)
        sum_TD = rows.x_TD.new_zeros(rows.x_TD.shape, dtype=torch.float32)
        # A replica at a time, for one call may add a row's parts in any order.
        for row_N, partial_ND in zip(row_R.split(send), partial_RD.split(send), strict=True):
            sum_TD.index_add_(0, row_N, partial_ND)
        return self._join(sum_TD, part_TD)

    def _goes_to(self, replica: int, chosen_TK: Tensor, num_experts: int) -> Tensor:
        """Rows for the rank of this place there: our neighbours send to its neighbours."""
        theirs = self._share_of(replica, num_experts)
        return ((chosen_TK >= theirs.start) & (chosen_TK < theirs.stop)).any(1)


def _checked(num_here: int, num_rows: int | None) -> int:
    if num_rows is None:
        return num_here
    if num_here > num_rows:
        raise CollectiveError(
            f"this rank has {num_here} rows for the experts, and the ranks agreed on at most "
            f"{num_rows} in this pass."
        )
    return num_rows


def _padded(rows: RoutedRows, num_rows: int) -> RoutedRows:
    extra = num_rows - len(rows.x_TD)
    if not extra:
        return rows
    x_TD, weight_TK = (pad(x, (0, 0, 0, extra)) for x in (rows.x_TD, rows.weight_TK))
    return RoutedRows(x_TD, pad(rows.chosen_TK, (0, 0, 0, extra), value=NOBODY), weight_TK)


def _pack(rows: RoutedRows) -> Tensor:
    """uint8 [T, ...]: all that belongs to a row behind each other, so that one call moves it."""
    return torch.cat([x.contiguous().view(torch.uint8) for x in rows], dim=1)


def _unpack(packed_TB: Tensor, like: RoutedRows) -> RoutedRows:
    sizes = [x.shape[1] * x.element_size() for x in like]
    parts = zip(packed_TB.split(sizes, dim=1), like, strict=True)
    return RoutedRows(*(part.contiguous().view(x.dtype) for part, x in parts))
