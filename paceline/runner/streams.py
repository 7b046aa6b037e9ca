"""What runs the stages of steps in launch order: a thread on CPU, the GPU's own stream on CUDA.

A stage is a function of no arguments. Never looks into one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from paceline.state.readback import RingReader
from paceline.step import StepPlan

logger = logging.getLogger(__name__)


class Launched(Protocol):
    """A launched step, as a stream sees it."""

    @property
    def plan(self) -> StepPlan: ...
    @property
    def entry(self) -> int: ...
    @property
    def ready(self) -> threading.Event:
        """Set when its results are in the ring, or when it failed."""

    @property
    def error(self) -> BaseException | None: ...
    def fail(self, error: BaseException) -> None: ...


class Stream(Protocol):
    def submit(self, step: Launched, stage: Callable[[], None]) -> None:
        """Run a stage of a step after all that was submitted before."""

    def is_over(self, step: Launched, within_s: float) -> bool:
        """Wait up to `within_s` for a step. On CUDA, where steps are short, always True."""

    def wait(self, step: Launched) -> None:
        """Return when the results of a step are in the ring. Raises what a stage raised."""

    def close(self) -> None: ...


class DirectStream:
    """Stages run in the caller's thread; on CUDA they only queue kernels."""

    def __init__(self, reader: RingReader) -> None:
        self._reader = reader

    def submit(self, step: Launched, stage: Callable[[], None]) -> None:
        stage()

    def is_over(self, step: Launched, within_s: float) -> bool:
        return True

    def wait(self, step: Launched) -> None:
        self._reader.wait(step.entry, step.plan.step)

    def close(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


@contextmanager
def syncs_forbidden() -> Iterator[None]:
    """Within the block, torch raises where the host would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class ThreadStream:
    """Stages run in one worker thread, so that the caller plans meanwhile."""

    def __init__(self, num_threads: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._work, args=(num_threads,), name="paceline-device", daemon=True
        )
        self._thread.start()

    def submit(self, step: Launched, stage: Callable[[], None]) -> None:
        """A failed stage fails every later step too: the device's state is unknown after it."""

        def job() -> None:
            if self._failure is None:
                try:
                    stage()
                except Exception as error:
                    logger.exception("the device step failed")
                    self._failure = error
            if self._failure is not None:
                step.fail(self._failure)

        self._jobs.put(job)

    def is_over(self, step: Launched, within_s: float) -> bool:
        return step.ready.wait(within_s)

    def wait(self, step: Launched) -> None:
        step.ready.wait()
        if step.error is not None:
            raise step.error

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=30)

    def _work(self, num_threads: int) -> None:
        # OpenMP settings belong to the thread that computes.
        torch.set_num_threads(num_threads)
        torch.set_grad_enabled(False)
        while (job := self._jobs.get()) is not None:
            job()
