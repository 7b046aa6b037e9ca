"""Which rank sits where: numbers only. No torch, no collective."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks there are, and what they share.

    Ranks of one replica are neighbours: rank = replica * tensor_parallel + place in the replica.
    """

    tensor_parallel: int = 1
    data_parallel: int = 1
    spreads_experts: bool = False  # over all ranks; else a replica holds all of them

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.data_parallel

    def leaders(self) -> list[int]:
        """The rank of each replica that plans."""
        return [d * self.tensor_parallel for d in range(self.data_parallel)]

    def replica(self, index: int) -> list[int]:
        """The ranks of one replica, its leader first."""
        first = index * self.tensor_parallel
        return list(range(first, first + self.tensor_parallel))


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's place. `folder` is where the ranks of one engine meet; empty when it is alone."""

    rank: int = 0
    layout: Layout = Layout()
    folder: str = ""

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
        """Those with this place in their replicas."""
        step = self.layout.tensor_parallel
        return list(range(self.tp_rank, self.layout.num_ranks, step))


LONE_SEAT = Seat()


def layout_of(config: EngineConfig) -> Layout:
    """What was asked for. Whether there are experts to spread only the models know."""
    device = config.device
    return Layout(
        device.tensor_parallel_size, device.data_parallel_size, device.enable_expert_parallel
    )
