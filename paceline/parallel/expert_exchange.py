"""Expert parallelism: sends rows to the ranks that hold their experts, and sums back.

Knows expert ids, rows and groups; the caller applies the experts (`apply`).
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

NO_EXPERT = -1  # a choice that this rank skips: another rank's expert, or a padding row


class RoutedRows(NamedTuple):
    """Rows, and the router's choice for each."""

    x_TD: Tensor
    chosen_TK: Tensor  # int32 expert ids or NO_EXPERT
    weight_TK: Tensor  # fp32


# Applies this rank's experts (numbered from 0) to rows and gives their weighted sums in fp32. Sums
# stay fp32 until those of all ranks are added, so that a row differs from the result of a single
# rank only by the order of additions. That doubles the bytes sent back, but with few rows latency
# matters more than bytes.
Apply = Callable[[RoutedRows], Tensor]


class ExpertExchange(Protocol):
    """Between the router and the experts. All ranks must call `run` together."""

    @property
    def tp(self) -> Group:
        """The ranks of this replica; they hold the same rows."""

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can capture it: no host reads, shapes depend on `num_rows` only."""

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
        """fp32 [T, D]: the sum over all ranks' experts, with equal bits on the ranks of a replica.

        `num_rows` is the largest number of rows of any rank; None: as many as here. `part_TD` is
        added before the sum over `tp`: this rank's part of the shared expert.
        """


@dataclass(frozen=True, slots=True)
class _Spread:
    """Consecutive experts on each rank, in rank order, as evenly as possible."""

    tp: Group  # ranks with the same rows
    dp: Group  # ranks with other rows

    def share(self, num_experts: int) -> range:
        return self._share_of(self.dp.rank, num_experts)

    def _share_of(self, replica: int, num_experts: int) -> range:
        """The experts of the rank with this rank's place in a replica."""
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
        local_TK = torch.where(is_own_TK, chosen_TK - own.start, NO_EXPERT)
        return apply(rows._replace(chosen_TK=local_TK)).float()

    def run(
        self,
        rows: RoutedRows,
        num_experts: int,
        num_rows: int | None,
        apply: Apply,
        part_TD: Tensor | None = None,
    ) -> Tensor:
        num_here = len(rows.x_TD)
        if not self.dp.is_active:
            sum_TD = self._apply_own(rows, num_experts, apply)
        elif num_rows is None or num_here <= num_rows:
            sum_TD = self._exchange(rows, num_experts, num_rows or num_here, apply)
        else:
            raise CollectiveError(
                f"this rank has {num_here} rows for the experts, and the ranks agreed on at most "
                f"{num_rows} in this pass."
            )
        return self.tp.all_reduce(sum_TD if part_TD is None else sum_TD + part_TD)

    def _exchange(self, rows: RoutedRows, num_experts: int, num_rows: int, apply: Apply) -> Tensor:
        """fp32 [T, D]: the sum over the experts of the ranks of `dp`."""
        raise NotImplementedError


class GatherScatter(_Spread):
    """All ranks get all rows: one all-gather, one reduce-scatter."""

    __slots__ = ()
    is_capturable: ClassVar[bool] = True

    def _exchange(self, rows: RoutedRows, num_experts: int, num_rows: int, apply: Apply) -> Tensor:
        num_here, width = rows.x_TD.shape
        packed_RB = self.dp.all_gather(_pack(_padded(rows, num_rows))).flatten(0, 1)
        partial_RD = self._apply_own(_unpack(packed_RB, rows), num_experts, apply)
        partial_GTD = partial_RD.view(self.dp.size, num_rows, width)
        return self.dp.reduce_scatter(partial_GTD)[:num_here]


class AllToAll(_Spread):
    """A row is sent only to ranks that hold some of its experts. The host reads the counts."""

    __slots__ = ()
    is_capturable: ClassVar[bool] = False

    def _exchange(self, rows: RoutedRows, num_experts: int, num_rows: int, apply: Apply) -> Tensor:
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
        # One replica at a time, because a single call may add the parts of a row in any order.
        for row_N, partial_ND in zip(row_R.split(send), partial_RD.split(send), strict=True):
            sum_TD.index_add_(0, row_N, partial_ND)
        return sum_TD

    def _goes_to(self, replica: int, chosen_TK: Tensor, num_experts: int) -> Tensor:
        """The rows to send to the rank with this rank's place in `replica`."""
        theirs = self._share_of(replica, num_experts)
        return ((chosen_TK >= theirs.start) & (chosen_TK < theirs.stop)).any(1)


def _padded(rows: RoutedRows, num_rows: int) -> RoutedRows:
    extra = num_rows - len(rows.x_TD)
    if not extra:
        return rows
    x_TD, weight_TK = (pad(x, (0, 0, 0, extra)) for x in (rows.x_TD, rows.weight_TK))
    return RoutedRows(x_TD, pad(rows.chosen_TK, (0, 0, 0, extra), value=NO_EXPERT), weight_TK)


def _pack(rows: RoutedRows) -> Tensor:
    """uint8 [T, ...]: all values of a row one after the other, so that one call sends them."""
    return torch.cat([x.contiguous().view(torch.uint8) for x in rows], dim=1)


def _unpack(packed_TB: Tensor, like: RoutedRows) -> RoutedRows:
    sizes = [x.shape[1] * x.element_size() for x in like]
    parts = zip(packed_TB.split(sizes, dim=1), like, strict=True)
    return RoutedRows(*(part.contiguous().view(x.dtype) for part, x in parts))
