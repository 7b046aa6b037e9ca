"""The runner: plans in, results out. Chooses per step how it runs: as a graph, eagerly, or late.

CPU and CUDA share it. They differ in the rows (compact or padded), in the stream that runs stages
(a thread, or the GPU's own), and in whether there are graphs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from paceline.kernels.processors.reference import LateBits
from paceline.kernels.step_rows import StepRows
from paceline.runner.captures import Captures
from paceline.runner.graphs import GraphKey, Part
from paceline.runner.prompt_logprobs import PromptScores, score_prompts
from paceline.runner.step import Device, Forwarded, RowBuilder, step_a, step_b
from paceline.runner.streams import Stream, syncs_forbidden
from paceline.sampling.custom import CustomProcessors
from paceline.sampling.params import mode_of, slot_rows
from paceline.sampling.verify import Extras, SamplingMode
from paceline.state.readback import RingReader
from paceline.state.staging import SlotRow
from paceline.state.step_buffers import RING_ENTRIES
from paceline.step import (
    InFlightStep,
    LateMasks,
    Lockstep,
    RunnerInfo,
    SlotInit,
    StepPlan,
    StepResult,
    StepSize,
    TokenLogprobs,
)

_ANY_SIZE = StepSize()
Admissions = Sequence[tuple[SlotInit, SlotRow]]


class RowSource(Protocol):
    """Stages what plans change, and makes the row builders of their steps."""

    has_shapes: bool  # rows are padded to a shape that the plan's step_size decides
    max_late: int  # see RunnerInfo.max_late_drafter_rows

    def stage(
        self, entry: int, plan: StepPlan, admissions: Admissions, step_size: StepSize
    ) -> None:
        """What the plan changes in slots and page tables. In stream order, before its step."""

    def builder(self, plan: StepPlan, step_size: StepSize) -> RowBuilder: ...

    def key(self, step_size: StepSize) -> GraphKey | None:
        """The graph that holds such a step, or its first half; None: none could."""

    def write_masks(
        self, plan: StepPlan, step_size: StepSize, rows: StepRows | None, late: LateMasks | None
    ) -> LateBits:
        """Put the masks of a plan where B reads them, in stream order. `rows` are those of a step
        that runs eagerly; without `late` no row has a mask."""


@dataclass(slots=True)
class _SlotNeeds:
    """Host copy, by slot: what a step with this slot must do beside the plain one."""

    mode: SamplingMode = SamplingMode.GREEDY
    has_custom: bool = False
    num_logprobs: int = -1
    prompt: PromptScores | None = None

    @property
    def is_eager(self) -> bool:
        return self.has_custom or self.prompt is not None


class StepRunner:
    """See step.Runner. Every method is called by the loop thread.

    `make_stream` gets the reader of the ring; `captures` are None where steps are never captured.
    `checks_syncs`: a step of a kind that ran before must not wait for the GPU.
    """

    def __init__(
        self,
        device: Device,
        info: RunnerInfo,
        source: RowSource,
        make_stream: Callable[[RingReader], Stream],
        *,
        custom: CustomProcessors | None = None,
        lockstep: Lockstep | None = None,
        captures: Captures | None = None,
        checks_syncs: bool = False,
    ) -> None:
        self._device = device
        self._info = info
        self._source = source
        self._custom = custom
        self.lockstep = lockstep
        self._captures = captures
        self._needs_S = [_SlotNeeds() for _ in range(info.num_slots + 1)]
        self._turn = 0  # steps queued, the empty ones included; the device counts the same
        self.reader = RingReader(device.ring, device.logprobs, self._is_idle)
        self._stream = make_stream(self.reader)
        self._newest: tuple[int, StepResult] | None = None  # its end is not known yet
        self.num_eager = 0
        self._checks_syncs = checks_syncs
        self._ran: set[GraphKey] = set()  # kinds of steps that were compiled and captured

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def stats(self) -> dict[str, float]:
        counts = {} if self._captures is None else self._captures.stats
        return {"num_eager": self.num_eager, **counts}

    def close(self) -> None:
        self._stream.close()
        # NCCL waits for every graph that holds a collective of a group before it lets go of it.
        if self._captures is not None:
            self._captures.close()
        self._device.groups.close()

    # ---- launching

    def step_size(self, plan: StepPlan) -> StepSize:
        admitted = {init.slot: self._needs_of(init) for init in plan.admissions}
        needs = [admitted.get(slot) or self._needs_S[slot] for slot in plan.slot_B.tolist()]
        mode, has_graph = _kind(plan, needs)
        return replace(plan.step_size(), sampling_mode=mode, has_graph=has_graph)

    def launch(self, plan: StepPlan) -> InFlightStep:
        entry = self._turn % RING_ENTRIES
        self._turn += 1
        admissions = self._admit(plan)
        needs = [self._needs_S[slot] for slot in plan.slot_B.tolist()]
        mode, has_graph = _kind(plan, needs)
        step_size = plan.agreed
        if step_size is None:
            step_size = plan.step_size() if self._source.has_shapes else _ANY_SIZE
            step_size = replace(step_size, sampling_mode=mode, has_graph=has_graph)
        step = _Step(self, plan, entry, step_size, [n.prompt for n in needs])
        if step.mode is SamplingMode.FULL:
            step.asked = [(i, n.num_logprobs) for i, n in enumerate(needs) if n.num_logprobs >= 0]
        if self._captures is not None and step_size.has_graph and has_graph:
            step.key = self._source.key(step_size)
        if self._captures is not None and step.key is not None:
            self._captures.meet(step.key)

        def run() -> None:
            self._stage(step, admissions)
            self._run_a(step)
            if plan.late_B is None:
                self._run_b(step, None)

        is_checked = self._checks_syncs and step.key in self._ran
        with syncs_forbidden() if is_checked else nullcontext():
            self._stream.submit(step, run)
        if self._checks_syncs and step.key is not None:
            self._ran.add(step.key)
        if not has_graph:
            self._forget_scored(plan)
        return step

    def bind(self, step: _Step, late: LateMasks) -> None:
        assert step.plan.late_B is not None, "bind() is for plans with late rows, once"
        self._stream.submit(step, lambda: self._run_b(step, late))

    def _admit(self, plan: StepPlan) -> Admissions:
        admissions = []
        for init in plan.admissions:
            row = slot_rows(
                init.request, init.max_len, init.prompt_len, vocab_size=self._info.vocab_size
            )
            if (synthetic := self._device.synthetic) is not None:
                row["rates_SK"] = synthetic.row(init.request.params.synthetic_acceptance_rates)
            admissions.append((init, row))
            self._needs_S[init.slot] = self._needs_of(init)
        return admissions

    def _needs_of(self, init: SlotInit) -> _SlotNeeds:
        params, most = init.request.params, self._info.vocab_size
        is_probabilistic = self._device.drafter.is_probabilistic
        return _SlotNeeds(
            mode=mode_of(init.request, sampled_drafts=is_probabilistic),
            has_custom=bool(params.logits_processors),
            num_logprobs=-1 if params.logprobs is None else min(params.logprobs, most),
            prompt=PromptScores.of(init),
        )

    def _forget_scored(self, plan: StepPlan) -> None:
        """From its last prompt position on, a request is like any other."""
        for slot, end in zip(plan.slot_B.tolist(), plan.length_bound_B.tolist(), strict=True):
            prompt = self._needs_S[slot].prompt
            if prompt is not None and end >= prompt.last:
                self._needs_S[slot].prompt = None

    # ---- stages, in stream order

    def _stage(self, step: _Step, admissions: Admissions) -> None:
        self._device.groups.contract.launch(step.plan.step)
        if self._custom is not None:
            for init, _ in admissions:  # in stream order: a former owner may be in flight
                params = init.request.params
                names = tuple(params.logits_processors or ())
                self._custom.assign(init.slot, names, params.extra_args)
        self._source.stage(step.entry, step.plan, admissions, step.step_size)

    def _run_a(self, step: _Step) -> None:
        """A, or the whole step where its graph holds both."""
        if self._captures is not None and step.key is not None:
            self.num_eager += not self._captures.replay(step.key)
            return
        builder = self._source.builder(step.plan, step.step_size)
        # Prompt scores read all hidden states; all ranks must know whether there are any.
        keeps_all, is_late = not step.step_size.has_graph, step.plan.late_B is not None
        forwarded = step_a(self._device, builder, keeps_all=keeps_all, is_late=is_late)
        if forwarded.hidden_TD is not None and any(step.scores):
            rows = builder.rows
            step.prompt_logprobs = score_prompts(
                self._device.model, step.plan, step.scores, rows, forwarded.hidden_TD
            )
        step.forwarded = forwarded

    def _run_b(self, step: _Step, late: LateMasks | None) -> None:
        if self._captures is not None and step.key is not None:
            if step.key.part is Part.A:
                self._source.write_masks(step.plan, step.step_size, None, late)
                self.num_eager += not self._captures.replay(replace(step.key, part=Part.B))
            return
        self.num_eager += 1
        forwarded, step.forwarded = step.forwarded, None
        assert forwarded is not None, "B runs once, after A"
        extras, is_late = Extras(self._custom), late is not None
        if late is not None:
            where = (step.plan, step.step_size, forwarded.builder.rows)
            extras = Extras(self._custom, self._source.write_masks(*where, late))
        on_result = None if is_late else step.deliver
        step_b(self._device, forwarded, step.mode, extras, on_result, is_late=is_late)
        if is_late:
            step.deliver()
        if step.result is not None:  # the loop thread read it before the drafts were made
            step.result.device_end_s = self.reader.end_s(step.entry)

    # ---- results

    def is_over(self, step: _Step, within_s: float) -> bool:
        return self._stream.is_over(step, within_s)

    def wait(self, step: _Step) -> StepResult:
        self._stream.wait(step)
        plan, entry, reader = step.plan, step.entry, self.reader
        result = reader.result(entry, plan)
        if self._device.groups.results is not None:
            self._device.groups.results.compare(result)
        result.prompt_logprobs = step.prompt_logprobs
        result.logprobs = reader.logprobs(entry, result, step.asked)
        if plan.late_B is not None:
            result.draft_BK = reader.drafts(entry, plan)  # the next masks depend on them
            result.mask_wait_s = reader.mask_wait_s(entry)
        if self._newest is not None:
            # This step has begun, so the one before it has ended.
            newest_entry, newest = self._newest
            newest.device_end_s = reader.end_s(newest_entry)
        result.device_end_s = max(result.device_start_s, reader.end_s(entry))
        step.result = result
        self._newest = (entry, result)
        return result

    def _is_idle(self, waited_s: float) -> bool:
        contract = self._device.groups.contract
        if contract.log is not None and waited_s > contract.timeout_s:
            # Collectives wait on the device for ever: this is where a rank that is late shows.
            raise contract.stalled(contract.log.ranks, waited_s=waited_s)
        is_gpu = self._device.slots.device.type == "cuda"
        return not is_gpu or torch.cuda.current_stream().query()

    # ---- preparing

    def run_empty(self, key: GraphKey) -> None:
        """A step of some shape without rows: to warm up, to capture, to set the clock."""
        assert self._captures is not None
        self._captures.write_empty(self._turn % RING_ENTRIES)
        self._turn += 1
        for half in key.halves:
            self._captures.run(half)

    def prepare(self, progress: Callable[[str, float], None]) -> None:
        """Compile and capture what must be there before the first request; the rest when idle."""
        if self._captures is None:
            return
        self._captures.compile(progress)
        self._set_clock()
        self._captures.prepare(self.run_empty, progress)

    @property
    def has_spare_work(self) -> bool:
        return self._captures is not None and self._captures.has_more

    def use_spare_time(self) -> bool:
        """Capture one more graph while no request waits. False: there is nothing left to do."""
        return self._captures is not None and self._captures.capture_next(self.run_empty)

    def heartbeat(self) -> None:
        pass

    def _set_clock(self) -> None:
        """Where the device's clock stands against the host's, by a step without rows."""
        assert self._captures is not None
        key, reader = self._captures.smallest_key(), self.reader
        self.run_empty(key)
        entry = self._turn % RING_ENTRIES
        before_s = time.perf_counter()
        self.run_empty(key)
        if self._device.slots.device.type == "cuda":
            torch.cuda.synchronize()
        reader.clock_offset_s = 0.0
        if reader.end_s(entry) > 0:
            middle_s = (before_s + time.perf_counter()) / 2
            device_s = (reader.start_s(entry) + reader.end_s(entry)) / 2
            reader.clock_offset_s = middle_s - device_s


def _kind(plan: StepPlan, needs: list[_SlotNeeds]) -> tuple[SamplingMode, bool]:
    """The mode of a step, and whether a graph can hold it."""
    mode = max((n.mode for n in needs), default=SamplingMode.GREEDY)
    if plan.late_B is not None:
        mode = SamplingMode.FULL
    # Prompt scores and custom processors read the device.
    return mode, not any(n.is_eager for n in needs)


@dataclass(slots=True)
class _Step:
    """One launched step; see step.InFlightStep."""

    runner: StepRunner
    plan: StepPlan
    entry: int
    step_size: StepSize
    scores: list[PromptScores | None]  # prompts to score, by plan row
    asked: list[tuple[int, int]] = field(default_factory=list)  # rows that want logprobs
    key: GraphKey | None = None  # None: the step runs eagerly
    forwarded: Forwarded | None = None  # between A and B
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    result: StepResult | None = None
    ready: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    @property
    def mode(self) -> SamplingMode:
        return SamplingMode(self.step_size.sampling_mode)

    def bind(self, late: LateMasks) -> None:
        self.runner.bind(self, late)

    def is_over(self, within_s: float) -> bool:
        return self.runner.is_over(self, within_s)

    def wait(self) -> StepResult:
        return self.runner.wait(self)

    def deliver(self) -> None:
        """The results are in the ring."""
        self.ready.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.ready.set()
