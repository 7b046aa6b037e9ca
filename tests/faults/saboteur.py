"""A runner whose process can be hurt from outside: each signal here is a fault.

The handlers run in the loop's thread, between two instructions, so at any point of a step.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import time
from types import FrameType
from typing import Any

from paceline.config import EngineConfig
from paceline.parallel.placement import RankPlace
from paceline.runner.load_models import Progress
from paceline.runner.startup import build_runner
from paceline.step import InFlightStep, Runner, StepPlan

FACTORY = f"{__name__}:build"
CLOSE_SOCKETS, SLOW_DOWN, JUMP_AHEAD, HANG = (signal.SIGRTMIN + i for i in range(1, 5))
_SLOW_STEPS, _SLOW_S = 20, 0.1
_JUMP_S = 3600.0


def build(config: EngineConfig, progress: Progress, place: RankPlace) -> Runner:
    runner: Any = build_runner(config, progress, place)
    launch, slow = runner.launch, [0]

    def maybe_late(plan: StepPlan) -> InFlightStep:
        if slow[0]:
            slow[0] -= 1
            time.sleep(_SLOW_S)
        return launch(plan)  # type: ignore[no-any-return]

    def slow_down(number: int, frame: FrameType | None) -> None:
        slow[0] = _SLOW_STEPS

    runner.launch = maybe_late
    signal.signal(SLOW_DOWN, slow_down)
    signal.signal(CLOSE_SOCKETS, _close_sockets)
    signal.signal(JUMP_AHEAD, _jump_ahead)
    signal.signal(HANG, lambda number, frame: time.sleep(3600))
    return runner  # type: ignore[no-any-return]


def _close_sockets(number: int, frame: FrameType | None) -> None:
    """Every connection of this rank ends: to the front, to its peers, to the other replicas."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # it was the folder itself, or is not connected


def _jump_ahead(number: int, frame: FrameType | None) -> None:
    for name in ("time", "monotonic"):
        now = getattr(time, name)
        setattr(time, name, lambda now=now: now() + _JUMP_S)
