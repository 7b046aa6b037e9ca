"""The agreement: one CPU collective per step among the leaders of all replicas.

Only the loop thread uses it, on its own group, for the next step while the current one runs.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.parallel.collectives import Group, gloo_wire, open_store
from paceline.parallel.contract import Contract
from paceline.parallel.groups import GroupOptions, open_collective_log
from paceline.parallel.placement import RankPlace
from paceline.step import StepAgreement, StepProposal, StepSize


class HostLockstep:
    """See step.Lockstep."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.number = 0

    def agree(self, proposal: StepProposal) -> StepAgreement:
        contract = self._group.contract
        contract.step, contract.phase = self.number + 1, "agreement"
        row_F = torch.tensor(_packed(proposal), dtype=torch.int32)
        proposals = [_unpacked(row) for row in self._group.all_gather(row_F).tolist()]
        self.number += 1
        return StepAgreement(
            step_size=StepSize.joined([w.step_size for w in proposals]),
            has_plan=any(w.has_plan for w in proposals),
            is_unfinished=any(w.is_unfinished for w in proposals),
            is_draining=all(w.is_draining for w in proposals),
            has_spare_time=any(w.has_spare_time for w in proposals),
        )


def open_lockstep(place: RankPlace, options: GroupOptions) -> HostLockstep:
    """All leaders must call this at the same time; peers must not."""
    leaders = place.layout.leaders()
    log = open_collective_log(place)
    contract = Contract(place.rank, log, options.checks, options.timeout_s)
    store = open_store(place)
    wire = gloo_wire(store, "host", leaders, place, options.timeout_s)
    return HostLockstep(Group("host", leaders, place.rank, contract, wire))


def smallest(place: RankPlace, name: str, value: int) -> int:
    """The minimum of a value over all ranks, for example of page counts. For start-up only."""
    if place.layout.num_ranks == 1:
        return value
    store: Any = open_store(place)
    store.set(f"{name}:{place.rank}", str(value))
    return min(int(store.get(f"{name}:{r}")) for r in range(place.layout.num_ranks))


def meet(place: RankPlace, name: str) -> None:
    """A barrier of all ranks, without a deadline: loading may take any time."""
    smallest(place, name, 0)


def check_same(place: RankPlace, name: str, value: str) -> None:
    """Refuse ranks whose values differ, for example GPU names. For start-up only."""
    store: Any = open_store(place)
    store.set(f"{name}:{place.rank}", value)
    for rank in range(place.layout.num_ranks):
        theirs = store.get(f"{name}:{rank}").decode()
        if theirs != value:
            raise ConfigError(
                f"rank {place.rank} has {name} {value!r} and rank {rank} has {theirs!r}; all ranks "
                "must have the same, or they would compute different tokens."
            )


def _packed(proposal: StepProposal) -> list[int]:
    flags = (
        proposal.has_plan,
        proposal.is_unfinished,
        proposal.is_draining,
        proposal.has_spare_time,
    )
    return [*proposal.step_size.packed(), *map(int, flags)]


def _unpacked(row: list[int]) -> StepProposal:
    *step_size, has_plan, is_unfinished, is_draining, has_spare_time = row
    flags = map(bool, (has_plan, is_unfinished, is_draining, has_spare_time))
    return StepProposal(StepSize.unpacked(step_size), *flags)
