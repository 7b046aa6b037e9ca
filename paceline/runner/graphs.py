"""Captured steps: one CUDA graph per key, all in one memory pool. Captures and replays, no policy.

A key is a shape, a sampling mode and a part of the step; what a graph does is in the function that
it was captured from.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from paceline.kernels.step_rows import StepShape
from paceline.sampling.verify import SamplingMode

logger = logging.getLogger(__name__)


class Part(IntEnum):
    """Which half of a step a graph holds. Steps that wait for masks run as two."""

    WHOLE = 0
    A = 1
    B = 2


@dataclass(frozen=True, slots=True)
class GraphKey:
    shape: StepShape
    mode: SamplingMode
    part: Part = Part.WHOLE

    @property
    def halves(self) -> tuple[GraphKey, ...]:
        """What runs, in order, until this part has run. A and B are captured together: B reads
        what A has left."""
        if self.part is Part.B:
            return replace(self, part=Part.A), self
        return (self,)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Freeing some old graph or pinned memory would end the capture under way."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Graphs:
    """Graphs of a step function by key. Every method is called by the loop thread."""

    def __init__(self, run: Callable[[GraphKey], None], device: torch.device) -> None:
        self._run = run
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self.num_replays = 0
        self.capture_s = 0.0

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def close(self) -> None:
        """Free all graphs. None of them is running."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def replay(self, key: GraphKey) -> None:
        self.num_replays += 1
        self._graphs[key].replay()

    def find(self, key: GraphKey) -> GraphKey | None:
        """The key itself, or one with a larger mode that does the same and more."""
        for mode in SamplingMode:
            if mode >= key.mode and (found := replace(key, mode=mode)) in self._graphs:
                return found
        return None

    def capture(self, key: GraphKey) -> None:
        """Record what `run(key)` does. The function ran once before: everything is compiled."""
        started_s = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(): it collects garbage and waits for the device each time.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), _no_garbage_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._run(key)
            except BaseException:
                with suppress(RuntimeError):  # report the first error
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._graphs[key] = graph
        self.capture_s += time.perf_counter() - started_s
        logger.debug("captured %s in %.3f s", key, time.perf_counter() - started_s)
