"""Runners that go wrong on one rank, by name: another shape, another seed, one that is slow.

For tests/parallel/test_failures.py.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.parallel.collectives import Group
from paceline.parallel.placement import RankPlace
from paceline.runner.load_models import Loader, Progress
from paceline.runner.startup import build_runner
from paceline.step import InFlightStep, Runner, StepPlan
from tests.parallel.factories import build_fixed

OTHER_SHAPE = f"{__name__}:build_other_shape"
OTHER_SEED = f"{__name__}:build_other_seed"
SLOW_LEADER = f"{__name__}:build_slow_leader"
SLOW_LOADER = f"{__name__}:build_slow_loader"
STUCK_DEVICE = f"{__name__}:build_stuck_device"
STUCK_LEADER = f"{__name__}:build_stuck_leader"
STEP = 5


def build_other_shape(config: EngineConfig, progress: Progress, place: RankPlace) -> Runner:
    """Rank 1 brings one row more to the collectives of a step."""
    runner: Any = build_runner(config, progress, place)
    groups = runner._device.groups
    if place.rank == 1:
        for group in (groups.tp, groups.dp):
            _spoil(group)
    return runner  # type: ignore[no-any-return]


def _spoil(group: Group) -> None:
    def with_one_row_more(collective: Any) -> Any:
        def run(x: Tensor) -> Tensor:
            if group.contract.step == STEP:
                x = torch.cat((x, x[:1]))
            return collective(x)  # type: ignore[no-any-return]

        return run

    spoilt: Any = group
    spoilt.all_gather = with_one_row_more(group.all_gather)
    spoilt.all_reduce = with_one_row_more(group.all_reduce)


def build_slow_leader(config: EngineConfig, progress: Progress, place: RankPlace) -> Runner:
    """Fixed shapes, where a launch ends with its collectives; rank 0 is late with each next one."""
    runner: Any = build_fixed(config, progress, place)
    if place.rank == 0:
        launch = runner.launch

        def late(plan: StepPlan) -> InFlightStep:
            step = launch(plan)
            time.sleep(0.1)
            return step  # type: ignore[no-any-return]

        runner.launch = late
    return runner  # type: ignore[no-any-return]


def build_stuck_leader(config: EngineConfig, progress: Progress, place: RankPlace) -> Runner:
    """Rank 0 hangs between two steps, outside of any collective."""
    runner: Any = build_runner(config, progress, place)
    if place.rank == 0:
        launch = runner.launch

        def stuck(plan: StepPlan) -> InFlightStep:
            if plan.step == STEP:
                launch(plan).wait()
                time.sleep(600)
            return launch(plan)  # type: ignore[no-any-return]

        runner.launch = stuck
    return runner  # type: ignore[no-any-return]


def build_stuck_device(config: EngineConfig, progress: Progress, place: RankPlace) -> Runner:
    """The device thread never comes back from a step."""
    runner: Any = build_runner(config, progress, place)
    launch = runner.launch

    def stuck(plan: StepPlan) -> InFlightStep:
        if plan.step == STEP:
            runner._stream._jobs.put(lambda: time.sleep(600))
        return launch(plan)  # type: ignore[no-any-return]

    runner.launch = stuck
    return runner  # type: ignore[no-any-return]


def build_slow_loader(config: EngineConfig, progress: Progress, place: RankPlace) -> Runner:
    """Rank 1 needs longer to read each model than the others would wait for it in a step."""
    if place.rank == 1:
        loader: Any = Loader
        load = loader._decoder

        def load_late(*arguments: Any) -> Any:
            time.sleep(1.25 * config.device.stall_timeout)
            return load(*arguments)

        loader._decoder = load_late
    return build_runner(config, progress, place)


def build_other_seed(config: EngineConfig, progress: Progress, place: RankPlace) -> Runner:
    """Rank 1 draws from another seed."""
    runner: Any = build_runner(config, progress, place)
    if place.rank == 1:
        launch = runner.launch

        def launch_otherwise(plan: StepPlan) -> InFlightStep:
            plan.admissions = [
                replace(x, request=replace(x.request, params=replace(x.request.params, seed=999)))
                for x in plan.admissions
            ]
            return launch(plan)  # type: ignore[no-any-return]

        runner.launch = launch_otherwise
    return runner  # type: ignore[no-any-return]
