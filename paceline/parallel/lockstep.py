"""One agreement per step among the leaders of replicas: the only CPU collective there is.

Used by the loop thread alone, on a group of its own, for the next step while this one runs.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.parallel.collectives import Group, gloo_wire, open_store
from paceline.parallel.contract import Contract
from paceline.parallel.groups import GroupOptions, open_board
from paceline.parallel.placement import Seat
from paceline.step import Agreed, Extent, Wish


class HostLockstep:
    """See step.Lockstep."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.number = 0

    def agree(self, wish: Wish) -> Agreed:
        contract = self._group.contract
        contract.step, contract.phase = self.number + 1, "agreement"
        row_F = torch.tensor(_packed(wish), dtype=torch.int32)
        wishes = [_unpacked(row) for row in self._group.all_gather(row_F).tolist()]
        self.number += 1
        return Agreed(
            extent=Extent.joined([w.extent for w in wishes]),
            has_plan=any(w.has_plan for w in wishes),
            is_unfinished=any(w.is_unfinished for w in wishes),
            is_draining=all(w.is_draining for w in wishes),
            has_spare_time=any(w.has_spare_time for w in wishes),
        )


def open_lockstep(seat: Seat, options: GroupOptions) -> HostLockstep:
    """Called by all leaders at the same time, and by nobody else."""
    leaders = seat.layout.leaders()
    board = open_board(seat)
    contract = Contract(seat.rank, board, options.checks, options.timeout_s)
    store = open_store(seat.folder, seat.layout.num_ranks)
    wire = gloo_wire(store, "host", leaders, seat.rank, options.timeout_s)
    return HostLockstep(Group("host", leaders, seat.rank, contract, wire))


def smallest(seat: Seat, name: str, value: int) -> int:
    """The least of what all ranks have: how many pages, say. At start-up, through the store."""
    if seat.layout.num_ranks == 1:
        return value
    store: Any = open_store(seat.folder, seat.layout.num_ranks)
    store.set(f"{name}:{seat.rank}", str(value))
    return min(int(store.get(f"{name}:{r}")) for r in range(seat.layout.num_ranks))


def meet(seat: Seat, name: str) -> None:
    """Return when all ranks have come here, however long they read: loading has no deadline."""
    smallest(seat, name, 0)


def check_same(seat: Seat, name: str, value: str) -> None:
    """All ranks have the same: GPU, say. At start-up, through the store."""
    store: Any = open_store(seat.folder, seat.layout.num_ranks)
    store.set(f"{name}:{seat.rank}", value)
    for rank in range(seat.layout.num_ranks):
        theirs = store.get(f"{name}:{rank}").decode()
        if theirs != value:
            raise ConfigError(
                f"rank {seat.rank} has {name} {value!r} and rank {rank} has {theirs!r}; all ranks "
                "must have the same, or they would compute different tokens."
            )


def _packed(wish: Wish) -> list[int]:
    flags = (wish.has_plan, wish.is_unfinished, wish.is_draining, wish.has_spare_time)
    return [*wish.extent.packed(), *map(int, flags)]


def _unpacked(row: list[int]) -> Wish:
    *extent, has_plan, is_unfinished, is_draining, has_spare_time = row
    flags = map(bool, (has_plan, is_unfinished, is_draining, has_spare_time))
    return Wish(Extent.unpacked(extent), *flags)
