"""Collectives over a group of ranks: the only module that calls torch.distributed for tensors.

gloo only moves bytes; sums are computed here in rank order, so that all ranks get the same bits.
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
from paceline.parallel.placement import RankPlace

LOOPBACK = "127.0.0.1"
_LOADING_S = 1800  # how long a rank waits at start-up for another that still reads weights


class Group:
    """The ranks of a collective, and this rank's index among them."""

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
        """Whether data is exchanged: there are other ranks, or a group of one is forced to."""
        return self._wire is not None

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in rank order. May overwrite `x`."""
        if self._wire is None:
            return x
        wire = self._enter("all_reduce", x)
        return self._guarded(lambda: wire.all_reduce(x.contiguous()))

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, ...]: the tensors of all ranks, in rank order. Shapes and types must agree."""
        if self._wire is None:
            return x.unsqueeze(0)
        wire = self._enter("all_gather", x)
        return self._guarded(lambda: wire.all_gather(x.contiguous()))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size, ...] -> [...]: the sum over ranks, in rank order, of their part for this rank."""
        if self._wire is None:
            return x.squeeze(0)
        wire = self._enter("reduce_scatter", x)
        return self._guarded(lambda: wire.reduce_scatter(x.contiguous()))

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send `send[r]` rows of `x` to each rank r. Returns the received rows, in rank order."""
        if self._wire is None:
            return x
        # Row counts may differ by rank; the rest of the shape must agree.
        wire = self._enter("all_to_all", x[:0])
        return self._guarded(lambda: wire.all_to_all(x.contiguous(), list(send), list(receive)))

    def close(self) -> None:
        """No collective may be running, and no CUDA graph may contain one of this group."""
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
    """Bytes over gloo. GPU tensors are copied through pinned memory: slow, but works anywhere."""

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
        """Nothing to do: sockets are closed when the object is freed."""

    def _wait(self, work: Any) -> None:
        work.wait(self._timeout)


class NcclWire:
    """Tensors over NCCL on the current stream; CUDA graphs can capture it. One GPU per rank."""

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
        """Must run while the store exists, which NCCL's threads read. Other ranks may be gone."""
        self._group.abort()


Wire = GlooWire | NcclWire


def _sum(x: Tensor) -> Tensor:
    """The sum over the first axis, added in rank order."""
    total = x[0].clone()
    for part in x[1:]:
        total += part
    return total


def _to_host(x: Tensor) -> Tensor:
    return x.cpu() if x.is_cuda else x


def _bytes(x: Tensor) -> Tensor:
    """The same memory as flat bytes: gloo knows few types."""
    return x.view(-1).view(torch.uint8)


SOLO = Group("tp", [0], 0, Contract(), None)


def open_store(place: RankPlace) -> Any:
    """The rendezvous of the ranks of one machine is a file, so that no port is needed. A single
    rank uses memory; ranks of several machines a server, see `_tcp_store`."""
    stores: Any = vars(dist)  # these classes are missing from the type stubs
    if place.layout.num_ranks == 1:
        return stores["HashStore"]()
    if place.address:
        return _tcp_store(place.store, place.store_fd)
    store = stores["FileStore"](place.store, place.layout.num_ranks)
    store.set_timeout(timedelta(seconds=_LOADING_S))
    return store


@cache
def _tcp_store(address: str, listener: int | None) -> Any:
    """One for each process. The rank with the listener serves it, until its process ends. It
    listens where that socket is bound, not on every interface as torch would."""
    kind: Any = vars(dist)["TCPStore"]
    host, _, port = address.rpartition(":")
    served = {} if listener is None else {"is_master": True, "master_listen_fd": listener}
    limit = timedelta(seconds=_LOADING_S)
    return kind(host, int(port), timeout=limit, wait_for_workers=False, **served)


def gloo_wire(
    store: Any, name: str, ranks: Sequence[int], place: RankPlace, timeout_s: float
) -> GlooWire:
    """All of `ranks` must call this at the same time."""
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [_device(place.address or LOOPBACK)]
    index = list(ranks).index(place.rank)
    group = kind(_prefixed(store, name, ranks), index, len(ranks), options)
    return GlooWire(group, len(ranks), timeout_s)


@cache
def _device(address: str) -> Any:
    """One device for all groups of a process, because each has a thread that wakes every 10 ms."""
    kind: Any = dist.ProcessGroupGloo
    return kind.create_device(hostname=address)


def nccl_wire(
    store: Any, name: str, ranks: Sequence[int], place: RankPlace, timeout_s: float
) -> NcclWire:
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=timeout_s)
    index = list(ranks).index(place.rank)
    group = kind(_prefixed(store, name, ranks), index, len(ranks), options)
    return NcclWire(group, len(ranks))


def _prefixed(store: Any, name: str, ranks: Sequence[int]) -> Any:
    prefix_store: Any = vars(dist)["PrefixStore"]
    return prefix_store(f"{name}:{','.join(map(str, ranks))}", store)
