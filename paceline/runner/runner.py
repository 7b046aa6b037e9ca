"""The CPU runner: plans in, results out, the device step in one worker thread.

The thread is the stream: steps run in launch order while the loop thread plans the next one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import torch

from paceline.runner.device_step import Device, Forwarded, step_a, step_b
from paceline.sampling.params import slot_rows, tail_of
from paceline.sampling.verify import Tail
from paceline.state.staging import StagedWrites, Staging
from paceline.step import (
    Extent,
    InFlightStep,
    LateMasks,
    Lockstep,
    RunnerInfo,
    StepPlan,
    StepResult,
)

logger = logging.getLogger(__name__)


class CpuRunner:
    """Owns the worker thread and the device; see step.Runner."""

    has_spare_work = False

    def __init__(
        self,
        device: Device,
        info: RunnerInfo,
        num_threads: int,
        lockstep: Lockstep | None = None,
    ) -> None:
        self._device = device
        self._info = info
        self.lockstep = lockstep
        self.results = device.groups.results
        self._staging = Staging(device.slots, device.pages)
        # Host copy, by slot: which tail of B a slot needs.
        self._tail_S = [Tail.GREEDY] * (info.num_slots + 1)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._work, args=(num_threads,), name="paceline-device", daemon=True
        )
        self._thread.start()

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def extent(self, plan: StepPlan) -> Extent:
        return plan.extent()

    def launch(self, plan: StepPlan) -> InFlightStep:
        is_probabilistic = self._device.drafter.is_probabilistic
        admissions = []
        for init in plan.admissions:
            row = slot_rows(
                init.request, init.max_len, init.prompt_len, vocab_size=self._info.vocab_size
            )
            admissions.append((init, row))
            self._tail_S[init.slot] = tail_of(init.request, sampled_drafts=is_probabilistic)
        writes = StagedWrites(admissions, plan.page_appends)
        tail = max((self._tail_S[s] for s in plan.slot_B.tolist()), default=Tail.GREEDY)
        if plan.late_B is not None:
            tail = Tail.FULL
        step = _CpuStep(self, self._device, plan, tail)
        self.submit(step, lambda: step.run_a(writes, self._staging))
        if plan.late_B is None:
            self.submit(step, lambda: step.run_b(None))
        return step

    def use_spare_time(self) -> bool:
        return False

    def rest(self) -> None:
        pass

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=30)

    def submit(self, step: _CpuStep, stage: Callable[[], None]) -> None:
        """Queue a stage of a step. A failed stage poisons the runner: the state is not known."""

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

    def _work(self, num_threads: int) -> None:
        # OpenMP settings belong to the thread that computes.
        torch.set_num_threads(num_threads)
        torch.set_grad_enabled(False)
        while (job := self._jobs.get()) is not None:
            job()


class _CpuStep:
    """One launched step: A and B run on the worker thread; the result is waited for elsewhere."""

    def __init__(self, runner: CpuRunner, device: Device, plan: StepPlan, tail: Tail) -> None:
        self._runner = runner
        self._device = device
        self._plan = plan
        self._tail = tail
        self._ready = threading.Event()
        self._forwarded: Forwarded | None = None
        self._result: StepResult | None = None
        self._error: BaseException | None = None
        self._started_s = 0.0

    def bind(self, late: LateMasks) -> None:
        assert self._plan.late_B is not None, "bind() is for plans with late rows"
        self._runner.submit(self, lambda: self.run_b(late))

    def wait(self) -> StepResult:
        self._ready.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        if self._runner.results is not None:
            self._runner.results.compare(self._result)
        return self._result

    def run_a(self, writes: StagedWrites, staging: Staging) -> None:
        self._started_s = time.perf_counter()
        staging.apply(writes)
        if self._device.custom is not None:
            # In stream order, like every write to a slot: a former owner may be in flight.
            for init, _ in writes.admissions:
                params = init.request.params
                names = tuple(params.logits_processors or ())
                self._device.custom.assign(init.slot, names, params.extra_args)
        self._forwarded = step_a(self._device, self._plan)

    def run_b(self, late: LateMasks | None) -> None:
        assert self._forwarded is not None
        step_b(self._device, self._plan, self._forwarded, self._tail, late, self._deliver)
        self._forwarded = None
        assert self._result is not None
        self._result.device_end_s = time.perf_counter()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._ready.set()

    def _deliver(self, result: StepResult) -> None:
        # The end moves once more when drafting is over; the next step's result finds it final.
        result.device_start_s, result.device_end_s = self._started_s, time.perf_counter()
        self._result = result
        self._ready.set()
