"""A rank's place among others, from its seat: groups of the target and of the draft, lock step.

Opened once at start-up, by all ranks in the same order. Never computes anything.
"""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.models.spec import ModelSpec
from paceline.parallel.groups import ALONE, Backend, GroupOptions, Groups, open_groups
from paceline.parallel.lockstep import HostLockstep, check_same, meet, open_lockstep, smallest
from paceline.parallel.placement import LONE_SEAT, Layout, Seat

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Whom this rank talks to."""

    seat: Seat = LONE_SEAT
    groups: Groups = ALONE
    draft_groups: Groups = ALONE
    lockstep: HostLockstep | None = None

    def of(self, index: int) -> Groups:
        """The groups of the target (0) or of the draft (1)."""
        return self.draft_groups if index else self.groups

    @property
    def num_on_gpu(self) -> int:
        """How many ranks share a GPU: one, unless they were asked to."""
        return -(-self.seat.layout.num_ranks // max(torch.cuda.device_count(), 1))

    def smallest(self, name: str, value: int) -> int:
        """The least that some rank has."""
        return smallest(self.seat, name, value)

    def meet(self, name: str) -> None:
        """Before the first collective after a load, which one rank may be much later to end."""
        meet(self.seat, name)


def open_ranks(
    config: EngineConfig, seat: Seat, specs: Sequence[ModelSpec], backend: Backend
) -> Ranks:
    """`specs`: of the target, then of the draft."""
    device = config.device
    if seat.layout.num_ranks == 1 and not device.force_collectives:
        return Ranks()
    if not seat.folder:  # a lone rank that talks to itself; others are given one by the front
        seat = replace(seat, folder=tempfile.mkdtemp(prefix="paceline-"))
        atexit.register(shutil.rmtree, seat.folder, ignore_errors=True)
    options = GroupOptions(
        backend=backend,
        timeout_s=device.stall_timeout,
        checks=device.check_collectives,
        forces=device.force_collectives,
        exchange=device.all2all_backend,
    )
    if seat.layout.spreads_experts and not any(spec.moe for spec in specs):
        logger.warning("enable_expert_parallel changes nothing: no model here has experts")
    if backend == "nccl" and seat.layout.num_ranks > 1:
        check_same(seat, "GPU", torch.cuda.get_device_name())  # kernels are chosen by its name
    groups = open_groups(seat, options)
    lockstep = None
    if steps_together(seat.layout, specs) and seat.is_leader:
        lockstep = open_lockstep(seat, options)
    return Ranks(seat, groups, groups.for_draft(config.draft_tensor_parallel_size), lockstep)


def steps_together(layout: Layout, specs: Sequence[ModelSpec]) -> bool:
    """Whether any model has a collective across replicas; else each of them runs for itself."""
    has_experts = any(spec.moe is not None for spec in specs)
    return layout.data_parallel > 1 and layout.spreads_experts and has_experts


def cuda_device(config: EngineConfig, seat: Seat) -> tuple[torch.device, Backend]:
    """The GPU of a rank, and how ranks of GPUs talk. NCCL takes one rank for each GPU."""
    count, needed = torch.cuda.device_count(), seat.layout.num_ranks
    if count >= needed:
        return torch.device("cuda", seat.rank), "nccl"
    if not config.device.share_gpu:
        raise ConfigError(
            f"{needed} ranks (tensor_parallel_size {seat.layout.tensor_parallel} x "
            f"data_parallel_size {seat.layout.data_parallel}) need {needed} GPUs, {count} are "
            "here; lower the sizes, or give --share-gpu to try a layout on fewer, slowly."
        )
    return torch.device("cuda", seat.rank % count), "gloo"
