"""The groups of one rank: built once, passed down. Model files ask a group, never torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.parallel.collectives import SOLO, Group, gloo_wire, nccl_wire, open_store
from paceline.parallel.contract import Board, Contract, ResultCheck
from paceline.parallel.expert_exchange import AllToAll, ExpertExchange, GatherScatter
from paceline.parallel.placement import Seat

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Groups:
    """Whom a model talks to."""

    tp: Group = SOLO  # the other parts of this replica's layers
    dp: Group = SOLO  # the same part of other replicas
    exchange: ExpertExchange | None = None  # experts are spread over all ranks
    contract: Contract = SOLO.contract  # of all collectives above
    results: ResultCheck | None = None  # where ranks of a replica compare what they computed

    def for_draft(self, tensor_parallel: int) -> Groups:
        """At 1 a draft is whole on every rank; a MoE draft still uses the target's exchange."""
        return self if tensor_parallel == self.tp.size else replace(self, tp=SOLO)

    def close(self) -> None:
        """After the last collective and the last graph that holds one."""
        self.tp.close()
        self.dp.close()


ALONE = Groups()


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How groups talk."""

    backend: Backend = "gloo"
    timeout_s: float = 60.0
    checks: bool = False  # compare every collective before it begins
    forces: bool = False  # groups of one talk to themselves
    exchange: Literal["allgather_reducescatter", "alltoall"] = "allgather_reducescatter"


def open_groups(seat: Seat, options: GroupOptions) -> Groups:
    """All ranks call it at the same time, in the same order of groups."""
    layout = seat.layout
    if layout.num_ranks == 1 and not options.forces:
        return ALONE
    store, board = open_store(seat.folder, layout.num_ranks), open_board(seat)
    contract = Contract(seat.rank, board, options.checks, options.timeout_s)
    open_wire = nccl_wire if options.backend == "nccl" else gloo_wire

    def group(name: str, ranks: list[int]) -> Group:
        if len(ranks) == 1 and not options.forces:
            return Group(name, ranks, seat.rank, contract, None)
        wire = open_wire(store, name, ranks, seat.rank, options.timeout_s)
        return Group(name, ranks, seat.rank, contract, wire)

    tp, dp = group("tp", seat.tp_ranks()), group("dp", seat.dp_ranks())
    exchange: ExpertExchange | None = None
    if layout.spreads_experts:
        exchange = AllToAll(tp, dp) if options.exchange == "alltoall" else GatherScatter(tp, dp)
    results = None
    if options.checks and tp.size > 1:
        own = Contract(seat.rank, board, seat.is_leader, options.timeout_s)
        results = ResultCheck(own, tp.ranks)
    return Groups(tp, dp, exchange, contract, results)


def open_board(seat: Seat) -> Board:
    return Board(Path(seat.folder, "board"), seat.layout.num_ranks)
