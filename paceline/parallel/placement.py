"""Which rank has which part: numbers only. No torch, no collective."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks there are, and how they divide the work.

    Ranks of one replica are neighbours: rank = replica * tensor_parallel + place in the replica.
    """

    tensor_parallel: int = 1
    data_parallel: int = 1
    spreads_experts: bool = False  # over all ranks; else each replica holds all experts

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.data_parallel

    def leaders(self) -> list[int]:
        """The rank of each replica that runs the scheduler."""
        return [d * self.tensor_parallel for d in range(self.data_parallel)]

    def replica(self, index: int) -> list[int]:
        """The ranks of one replica, its leader first."""
        first = index * self.tensor_parallel
        return list(range(first, first + self.tensor_parallel))


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank's number in the layout, and the paths of files that the ranks of an engine share."""

    rank: int = 0
    layout: Layout = Layout()
    store: str = ""  # where groups find their members; a lone rank needs none
    collectives: str = ""  # see contract.CollectiveLog; empty: the rank's own memory

    @property
    def tp_rank(self) -> int:
        return self.rank % self.layout.tensor_parallel

    @property
    def dp_rank(self) -> int:
        return self.rank // self.layout.tensor_parallel

    @property
    def is_leader(self) -> bool:
        return self.tp_rank == 0

    def tp_ranks(self) -> list[int]:
        return self.layout.replica(self.dp_rank)

    def dp_ranks(self) -> list[int]:
        """The ranks with the same part of the model, one in each replica."""
        step = self.layout.tensor_parallel
        return list(range(self.tp_rank, self.layout.num_ranks, step))


ONLY_RANK = RankPlace()


def layout_of(config: EngineConfig) -> Layout:
    """The layout asked for. It may spread experts although the model has none."""
    device = config.device
    return Layout(
        device.tensor_parallel_size, device.data_parallel_size, device.enable_expert_parallel
    )
