"""Collectives over a group of ranks: the only module that calls torch.distributed for tensors.

On gloo only bytes travel; sums are made here, in rank order, so that every rank has the same bits.
A group of one returns its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.contract import Contract

_LOADING_S = 1800  # one rank may read weights for so long while another waits for it


class Group:
    """The ranks that take part, and this rank's place among them. See `alone` and `open_group`."""

    def __init__(
        self, name: str, ranks: Sequence[int], rank: int, contract: Contract, wire: Wire | None
    ) -> None:
        self.name = name
        self.ranks = list(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.contract = contract
        self._wire = wire

    @property
    def is_active(self) -> bool:
        """Whether anything travels: there are others, or one rank is made to talk to itself."""
        return self._wire is not None

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in rank order. May be written over `x`."""
        if self._wire is None:
            return x
        wire = self._enter("all_reduce", x)
        return self._guarded(lambda: wire.all_reduce(x.contiguous()))

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, ...]: what every rank has, in rank order. Shapes and types agree."""
        if self._wire is None:
            return x.unsqueeze(0)
        wire = self._enter("all_gather", x)
        return self._guarded(lambda: wire.all_gather(x.contiguous()))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size, ...] -> [...]: the sum over ranks, in rank order, of what they hold for me."""
        if self._wire is None:
            return x.squeeze(0)
        wire = self._enter("reduce_scatter", x)
        return self._guarded(lambda: wire.reduce_scatter(x.contiguous()))

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Rows of `x` to each rank, `send` of them each; what comes back is in rank order."""
        if self._wire is None:
            return x
        # Counts differ by rank; what must agree is the rest of the shape.
        wire = self._enter("all_to_all", x[:0])
        return self._guarded(lambda: wire.all_to_all(x.contiguous(), list(send), list(receive)))

    def close(self) -> None:
        """Nothing may travel any more, and no graph may hold a collective of this group."""
        if self._wire is not None:
            self._wire.close()

    def _enter(self, operation: str, x: Tensor) -> Wire:
        assert self._wire is not None
        what = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        self.contract.enter(self.name, self.ranks, operation, what)
        return self._wire

    def _guarded(self, run: Callable[[], Tensor]) -> Tensor:
        try:
            return run()
        except RuntimeError as error:
            raise self.contract.stalled(self.ranks, str(error).splitlines()[0]) from error


class GlooWire:
    """Bytes over gloo. Tensors of a GPU go by way of pinned memory: slow, and works anywhere."""

    def __init__(self, group: Any, size: int, timeout_s: float) -> None:
        self._group = group
        self._size = size
        self._timeout = timedelta(seconds=timeout_s)

    def all_reduce(self, x: Tensor) -> Tensor:
        return _sum(self.all_gather(x))

    def all_gather(self, x: Tensor) -> Tensor:
        out = torch.empty((self._size, *x.shape), dtype=x.dtype, pin_memory=x.is_cuda)
        if x.numel():
            self._wait(self._group._allgather_base(_bytes(out), _bytes(_to_host(x))))
        return out.to(x.device, non_blocking=True)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        if x.numel():
            self._wait(self._group.alltoall_base(_bytes(out), _bytes(_to_host(x)), [], []))
        return _sum(out.to(x.device, non_blocking=True))

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        out = torch.empty((sum(receive), *x.shape[1:]), dtype=x.dtype, pin_memory=x.is_cuda)
        row = x[:1].numel() * x.element_size() or out[:1].numel() * x.element_size()
        counts = ([n * row for n in receive], [n * row for n in send])
        self._wait(self._group.alltoall_base(_bytes(out), _bytes(_to_host(x)), *counts))
        return out.to(x.device, non_blocking=True)

    def close(self) -> None:
        """Sockets go with the object."""

    def _wait(self, work: Any) -> None:
        work.wait(self._timeout)


class NcclWire:
    """Tensors over NCCL, on the current stream: may be captured. One GPU for each rank."""

    def __init__(self, group: Any, size: int) -> None:
        self._group = group
        self._size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty((self._size, *x.shape))
        self._group._allgather_base(out.flatten(), x.flatten()).wait()
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[1:])
        self._group._reduce_scatter_base(out.flatten(), x.flatten()).wait()
        return out

    def all_to_all(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        out = x.new_empty((sum(receive), *x.shape[1:]))
        self._group.alltoall_base(out, x, receive, send).wait()
        return out

    def close(self) -> None:
        """While the store still exists, which threads of NCCL's look into; others may be gone."""
        self._group.abort()


Wire = GlooWire | NcclWire


def _sum(x: Tensor) -> Tensor:
    """Over the first axis, one after the other: the order of additions is that of the ranks."""
    total = x[0].clone()
    for part in x[1:]:
        total += part
    return total


def _to_host(x: Tensor) -> Tensor:
    return x.cpu() if x.is_cuda else x


def _bytes(x: Tensor) -> Tensor:
    """The same memory, flat: gloo knows few types, and copies anything."""
    return x.view(-1).view(torch.uint8)


SOLO = Group("tp", [0], 0, Contract(), None)


def open_store(folder: str, num_ranks: int) -> Any:
    """Where ranks of one machine find each other: a file, so that no port can be taken.

    One alone has nobody to find, and keeps what it says to itself.
    """
    stores: Any = vars(dist)  # exported, but not to type checkers
    if num_ranks == 1:
        return stores["HashStore"]()
    store = stores["FileStore"](f"{folder}/store", num_ranks)
    store.set_timeout(timedelta(seconds=_LOADING_S))
    return store


def gloo_wire(store: Any, name: str, ranks: Sequence[int], rank: int, timeout_s: float) -> GlooWire:
    """Opened by all of `ranks` at the same time."""
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [_loopback()]
    group = kind(_prefixed(store, name, ranks), list(ranks).index(rank), len(ranks), options)
    return GlooWire(group, len(ranks), timeout_s)


@cache
def _loopback() -> Any:
    """One for all groups of a process: each has a thread that wakes every 10 ms, asleep or not.

    Everybody is on this machine.
    """
    kind: Any = dist.ProcessGroupGloo
    return kind.create_device(hostname="127.0.0.1")


def nccl_wire(store: Any, name: str, ranks: Sequence[int], rank: int, timeout_s: float) -> NcclWire:
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=timeout_s)
    group = kind(_prefixed(store, name, ranks), list(ranks).index(rank), len(ranks), options)
    return NcclWire(group, len(ranks))


def _prefixed(store: Any, name: str, ranks: Sequence[int]) -> Any:
    prefix_store: Any = vars(dist)["PrefixStore"]
    return prefix_store(f"{name}:{','.join(map(str, ranks))}", store)
