"""The groups of one rank: built once and passed down. Models ask a group, never torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from paceline.parallel.collectives import SOLO, Group, gloo_wire, nccl_wire, open_store
from paceline.parallel.contract import CollectiveLog, Contract, ResultCheck
from paceline.parallel.expert_exchange import AllToAll, ExpertExchange, GatherScatter
from paceline.parallel.placement import RankPlace

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Groups:
    """The ranks that a model exchanges tensors with."""

    tp: Group = SOLO  # ranks that share this replica's layers
    dp: Group = SOLO  # ranks with the same part in other replicas
    exchange: ExpertExchange | None = None  # None: experts are not spread over ranks
    contract: Contract = SOLO.contract  # of all collectives above
    results: ResultCheck | None = None  # compares the tokens of a replica's ranks

    def for_draft(self, tensor_parallel: int) -> Groups:
        """The groups of the draft. With 1 it is whole on every rank of the replica; experts of a
        MoE draft are still spread as the target's."""
        return self if tensor_parallel == self.tp.size else replace(self, tp=SOLO)

    def close(self) -> None:
        """Call it after the last collective, when no CUDA graph contains one any more."""
        self.tp.close()
        self.dp.close()


ALONE = Groups()


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How groups exchange data."""

    backend: Backend = "gloo"
    timeout_s: float = 60.0
    checks: bool = False  # compare the announcements of every collective
    forces: bool = False  # groups of one exchange data with themselves
    exchange: Literal["allgather_reducescatter", "alltoall"] = "allgather_reducescatter"


def open_groups(place: RankPlace, options: GroupOptions) -> Groups:
    """All ranks must call this at the same time."""
    layout = place.layout
    if layout.num_ranks == 1 and not options.forces:
        return ALONE
    store, log = open_store(place), open_collective_log(place)
    contract = Contract(place.rank, log, options.checks, options.timeout_s)
    open_wire = nccl_wire if options.backend == "nccl" else gloo_wire

    def group(name: str, ranks: list[int]) -> Group:
        if len(ranks) == 1 and not options.forces:
            return Group(name, ranks, place.rank, contract, None)
        wire = open_wire(store, name, ranks, place, options.timeout_s)
        return Group(name, ranks, place.rank, contract, wire)

    tp, dp = group("tp", place.tp_ranks()), group("dp", place.dp_ranks())
    exchange: ExpertExchange | None = None
    if layout.spreads_experts:
        exchange = AllToAll(tp, dp) if options.exchange == "alltoall" else GatherScatter(tp, dp)
    results = None
    if options.checks and tp.size > 1:
        own = Contract(place.rank, log, place.is_leader, options.timeout_s)
        results = ResultCheck(own, tp.ranks)
    return Groups(tp, dp, exchange, contract, results)


def open_collective_log(place: RankPlace) -> CollectiveLog:
    return CollectiveLog(place.collectives, place.layout.num_ranks)
