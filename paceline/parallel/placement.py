"""Which rank has which part: numbers only. No torch, no collective."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import EngineConfig
from paceline.errors import ConfigError


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

    def leader_of(self, rank: int) -> int:
        return rank - rank % self.tensor_parallel

    def groups(self) -> list[Layout]:
        """The parts that start and end on their own. Replicas that spread experts are one group;
        other replicas share nothing."""
        if self.spreads_experts:
            return [self]
        return [Layout(self.tensor_parallel)] * self.data_parallel


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank's number in the layout of its group, and the paths of files that the group shares.

    An engine of several groups numbers its ranks through: see `engine_rank`.
    """

    rank: int = 0
    layout: Layout = Layout()
    # Where groups find their members: a file, or HOST:PORT if they are on several machines. A lone
    # rank needs none.
    store: str = ""
    collectives: str = ""  # see contract.CollectiveLog; empty: the rank's own memory
    first_rank: int = 0  # the engine's number of this layout's rank 0
    num_others: int = 0  # ranks of the engine's other groups
    first_local: int = 0  # the engine's number of this node's first rank
    num_local: int = 0  # 0: all ranks of the engine
    address: str = ""  # where other nodes reach this rank; empty: its group is on one node
    store_fd: int | None = None  # the rank that serves HOST:PORT has this listening socket

    @property
    def engine_rank(self) -> int:
        return self.first_rank + self.rank

    @property
    def num_engine_ranks(self) -> int:
        return self.layout.num_ranks + self.num_others

    @property
    def local_rank(self) -> int:
        """This rank's number among those of its node, which is the number of its GPU."""
        return self.engine_rank - self.first_local

    @property
    def num_local_ranks(self) -> int:
        return self.num_local or self.num_engine_ranks

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


@dataclass(frozen=True, slots=True)
class NodePart:
    """The ranks of one machine, by their numbers in the engine."""

    number: int = 0  # of the machine; 0 has the front
    ranks: tuple[int, ...] = ()


def node_part(config: EngineConfig) -> NodePart:
    """What this machine has. Without options for several machines: all ranks."""
    nodes, layout = config.nodes, layout_of(config)
    count = nodes.data_parallel_size_local
    count = even_share(layout, nodes.nnodes) if count is None else count * layout.tensor_parallel
    if nodes.data_parallel_start_rank is None:
        first = (nodes.node_rank or 0) * count
    else:
        first = nodes.data_parallel_start_rank * layout.tensor_parallel
    number = nodes.node_rank if nodes.node_rank is not None else -(-first // max(count, 1))
    if first + count > layout.num_ranks or count < 1:
        raise ConfigError(
            f"node {number} would have {count} ranks from {first} on, and tensor_parallel_size x "
            f"data_parallel_size is {layout.num_ranks}."
        )
    if nodes.headless != (number > 0) or nodes.headless != (first > 0):
        raise ConfigError(
            f"node {number} has the ranks from {first} on. Node 0 has the first ranks and serves "
            "HTTP; every other node needs --headless, and --node-rank or "
            "--data-parallel-start-rank."
        )
    return NodePart(number, tuple(range(first, first + count)))


def even_share(layout: Layout, num_nodes: int) -> int:
    """Ranks of each machine: those of whole replicas, or an even part of one replica."""
    if layout.data_parallel % num_nodes == 0:
        return layout.num_ranks // num_nodes
    nodes_per_replica, rest = divmod(num_nodes, layout.data_parallel)
    if rest or layout.tensor_parallel % nodes_per_replica:
        raise ConfigError(
            f"data_parallel_size {layout.data_parallel} does not divide over nnodes {num_nodes}, "
            f"nor tensor_parallel_size {layout.tensor_parallel} over the nodes of a replica. Use "
            "a multiple of nnodes, or give --data-parallel-size-local on each node."
        )
    return layout.tensor_parallel // nodes_per_replica


def layout_of(config: EngineConfig) -> Layout:
    """The layout asked for. It may spread experts although the model has none."""
    device = config.device
    return Layout(
        device.tensor_parallel_size, device.data_parallel_size, device.enable_expert_parallel
    )
