"""What connects a rank to the others: groups of the target and of the draft, lock step.

Opened once at start-up, by all ranks in the same order. Never computes anything.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.models.spec import ModelSpec
from paceline.parallel.groups import ALONE, Backend, GroupOptions, Groups, open_groups
from paceline.parallel.lockstep import HostLockstep, check_same, meet, open_lockstep, smallest
from paceline.parallel.placement import ONLY_RANK, Layout, RankPlace

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The groups of ranks that this rank belongs to."""

    place: RankPlace = ONLY_RANK
    groups: Groups = ALONE
    draft_groups: Groups = ALONE
    lockstep: HostLockstep | None = None

    def of(self, index: int) -> Groups:
        """The groups of the target (0) or of the draft (1)."""
        return self.draft_groups if index else self.groups

    @property
    def num_on_gpu(self) -> int:
        """How many ranks share a GPU: more than one only with --share-gpu."""
        return -(-self.place.num_local_ranks // max(torch.cuda.device_count(), 1))

    def smallest(self, name: str, value: int) -> int:
        """The smallest value of all ranks."""
        return smallest(self.place, name, value)

    def meet(self, name: str) -> None:
        """Wait for all ranks: one may load much longer than a collective would wait."""
        meet(self.place, name)


def open_ranks(
    config: EngineConfig, place: RankPlace, specs: Sequence[ModelSpec], backend: Backend
) -> Ranks:
    """`specs`: of the target, then of the draft."""
    device = config.device
    if place.layout.num_ranks == 1 and not device.force_collectives:
        return Ranks(place)
    options = GroupOptions(
        backend=backend,
        timeout_s=device.stall_timeout,
        checks=device.check_collectives,
        forces=device.force_collectives,
        exchange=device.all2all_backend,
    )
    if place.layout.spreads_experts and not any(spec.has_experts for spec in specs):
        logger.warning("enable_expert_parallel changes nothing: no model here has experts")
    if backend == "nccl" and place.layout.num_ranks > 1:
        check_same(place, "GPU", torch.cuda.get_device_name())  # kernels are chosen by its name
    groups = open_groups(place, options)
    lockstep = None
    if steps_together(place.layout, specs) and place.is_leader:
        lockstep = open_lockstep(place, options)
    return Ranks(place, groups, groups.for_draft(config.draft_tensor_parallel_size), lockstep)


def steps_together(layout: Layout, specs: Sequence[ModelSpec]) -> bool:
    """Whether any model has a collective across replicas; else replicas step independently."""
    has_experts = any(spec.has_experts for spec in specs)
    return layout.data_parallel > 1 and layout.spreads_experts and has_experts


def cuda_device(config: EngineConfig, place: RankPlace) -> tuple[torch.device, Backend]:
    """The GPU of a rank, and how ranks of GPUs talk. NCCL takes one rank for each GPU."""
    count, needed = torch.cuda.device_count(), place.num_local_ranks
    if count >= needed:
        return torch.device("cuda", place.local_rank), "nccl"
    if not config.device.share_gpu:
        raise ConfigError(
            f"{needed} ranks (tensor_parallel_size {config.device.tensor_parallel_size} x "
            f"data_parallel_size {config.device.data_parallel_size}) need {needed} GPUs, {count} "
            "are here; lower the sizes, or give --share-gpu to try a layout on fewer, slowly."
        )
    return torch.device("cuda", place.local_rank % count), "gloo"
