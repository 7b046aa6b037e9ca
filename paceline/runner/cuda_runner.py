"""The runner of fixed-shape steps: a plan becomes a packet and one graph replay.

The stream runs steps in launch order; the host only writes packets and reads stamped results.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch

from paceline.kernels.gemv_table import BUCKETS as PRODUCT_ROWS
from paceline.kernels.triton_ahead import compiling_ahead
from paceline.runner.fixed_step import FixedDevice, Forwarded, step_a, step_b
from paceline.runner.graphs import GraphKey, Graphs
from paceline.runner.prompt_logprobs import PromptScores, score_prompts
from paceline.runner.shapes import Buckets, draft_starts, row_starts
from paceline.sampling.custom import CustomProcessors
from paceline.sampling.params import slot_rows, tail_of
from paceline.sampling.verify import Tail
from paceline.state.packets import PacketWriter
from paceline.state.readback import RingReader
from paceline.state.step_buffers import RING_ENTRIES
from paceline.step import (
    Extent,
    InFlightStep,
    LateMasks,
    Lockstep,
    RunnerInfo,
    SlotInit,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _SlotNeeds:
    """Host copy, by slot: what a step with this slot must do beside the plain one."""

    tail: Tail = Tail.GREEDY
    has_custom: bool = False
    num_logprobs: int = -1
    prompt: PromptScores | None = None

    @property
    def is_eager(self) -> bool:
        return self.has_custom or self.prompt is not None


class CudaRunner:
    """See step.Runner. Every method is called by the loop thread.

    Without graphs (`enforce_eager`, CPU tensors in tests) the same functions run eagerly.
    """

    def __init__(
        self,
        device: FixedDevice,
        info: RunnerInfo,
        buckets: Buckets,
        *,
        custom: CustomProcessors | None = None,
        lockstep: Lockstep | None = None,
        use_graphs: bool = True,
    ) -> None:
        self._device = device
        self._info = info
        self.lockstep = lockstep
        self._buckets = buckets
        self._custom = custom
        self._needs_S = [_SlotNeeds() for _ in range(info.num_slots + 1)]
        self._turn = 0  # steps queued, the empty ones included; the device counts the same
        self._writer = PacketWriter(device.slots, device.pages, device.ring, device.layout)
        self._reader = RingReader(device.ring, device.logprobs, self._is_idle)
        self._graphs = Graphs(self._run, device.slots.device) if use_graphs else None
        self._wanted: Iterator[GraphKey] = iter(())
        self._has_wanted = False
        self._newest: tuple[int, StepResult] | None = None  # its end is not known yet
        self.num_eager = 0

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def stats(self) -> dict[str, float]:
        graphs = self._graphs
        return {
            "num_replays": graphs.num_replays if graphs else 0,
            "num_captured": len(graphs) if graphs else 0,
            "capture_s": graphs.capture_s if graphs else 0.0,
            "num_eager": self.num_eager,
        }

    def close(self) -> None:
        if self._device.slots.device.type == "cuda":
            torch.cuda.synchronize()
        # NCCL waits for every graph that holds a collective of a group before it lets go of it.
        if self._graphs is not None:
            self._graphs.close()
        self._device.groups.close()

    # ---- steps

    def extent(self, plan: StepPlan) -> Extent:
        admitted = {init.slot: self._needs_of(init) for init in plan.admissions}
        needs = [admitted.get(slot) or self._needs_S[slot] for slot in plan.slot_B.tolist()]
        return _extent(plan, needs)

    def launch(self, plan: StepPlan) -> InFlightStep:
        entry = self._turn % RING_ENTRIES
        self._admit(entry, plan)
        needs = [self._needs_S[slot] for slot in plan.slot_B.tolist()]
        extent = plan.agreed or _extent(plan, needs)
        shape, tail = self._buckets.shape_of(extent), Tail(extent.tail)
        self._device.groups.contract.launch(plan.step)
        self._writer.write(entry, plan, row_starts(plan, shape), draft_starts(plan, shape))
        self._turn += 1
        step = _Step(self, plan, entry)
        if tail is Tail.FULL:
            step.asked = [(i, n.num_logprobs) for i, n in enumerate(needs) if n.num_logprobs >= 0]
        # Prompt scores read all hidden states; all ranks must know whether there are any.
        keeps_all = not extent.has_graph
        if plan.late_B is not None:
            step.forwarded = step_a(self._device, shape, keeps_all=keeps_all)
            return step
        key = GraphKey(shape, tail)
        if any(n.is_eager for n in needs):
            # Such steps wait for the device.
            scores = [n.prompt for n in needs]
            forwarded = step_a(self._device, shape, keeps_all=keeps_all)
            model, starts = self._device.model, row_starts(plan, shape).tolist()
            step.prompt_logprobs = score_prompts(model, plan, scores, starts, forwarded.hidden_TD)
            step_b(self._device, forwarded, tail, custom=self._custom)
            self.num_eager += 1
            self._forget_scored(plan)
        elif self._graphs is None or not extent.has_graph or not self._buckets.is_captured(shape):
            self.num_eager += 1
            step_b(self._device, step_a(self._device, shape, keeps_all=keeps_all), tail)
        else:
            self._replay(self._graphs, key)
        return step

    def _admit(self, entry: int, plan: StepPlan) -> None:
        admissions = []
        for init in plan.admissions:
            request, params = init.request, init.request.params
            vocab_size = self._info.vocab_size
            row = slot_rows(request, init.max_len, init.prompt_len, vocab_size=vocab_size)
            admissions.append((init, row))
            if self._custom is not None:
                names = tuple(params.logits_processors or ())
                self._custom.assign(init.slot, names, params.extra_args)
            self._needs_S[init.slot] = self._needs_of(init)
        self._writer.admit(entry, admissions)

    def _needs_of(self, init: SlotInit) -> _SlotNeeds:
        params, most = init.request.params, self._info.vocab_size
        is_probabilistic = self._device.drafter.is_probabilistic
        return _SlotNeeds(
            tail=tail_of(init.request, sampled_drafts=is_probabilistic),
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

    def _run(self, key: GraphKey) -> None:
        step_b(self._device, step_a(self._device, key.shape), key.tail)

    def _replay(self, graphs: Graphs, key: GraphKey) -> None:
        found = graphs.find(key)
        if found is not None:
            graphs.replay(found)
            return
        # Nobody foresaw this key: the step itself compiles what is missing, then it is captured,
        # so that a second step of the kind has its graph whatever the load.
        self.num_eager += 1
        self._run(key)
        graphs.capture(key)

    def bind(self, step: _Step, late: LateMasks) -> None:
        forwarded = step.forwarded
        assert forwarded is not None, "bind() is for plans with late rows, once"
        step.forwarded = None
        shape = forwarded.rows.shape
        bits_NV = np.full((shape.num_logits, late.mask_RWV.shape[2]), -1, np.int32)
        for row, mask_WV in zip(late.row_R.tolist(), late.mask_RWV, strict=True):
            first = row * shape.width
            bits_NV[first : first + len(mask_WV)] = mask_WV
        late_bits_NV = torch.from_numpy(bits_NV).to(self._device.slots.device)
        self.num_eager += 1
        step_b(self._device, forwarded, Tail.FULL, custom=self._custom, late_bits_NV=late_bits_NV)

    def wait(self, step: _Step) -> StepResult:
        plan, entry = step.plan, step.entry
        self._reader.wait(entry, plan.step)
        result = self._reader.result(entry, plan)
        if self._device.groups.results is not None:
            self._device.groups.results.compare(result)
        result.prompt_logprobs = step.prompt_logprobs
        result.logprobs = self._reader.logprobs(entry, result, step.asked)
        if plan.late_B is not None:
            # The host needs the drafts to build the next masks: this copy waits for drafting.
            slot_B = torch.from_numpy(plan.slot_B).to(self._device.slots.device)
            drafts_BK = self._device.slots.drafts_SK.index_select(0, slot_B)[:, : plan.k]
            result.draft_BK = drafts_BK.cpu().numpy()
        if self._newest is not None:
            # This step has begun, so the one before it has ended.
            newest_entry, newest = self._newest
            newest.device_end_s = self._reader.end_s(newest_entry)
        self._newest = (entry, result)
        return result

    def _is_idle(self, waited_s: float) -> bool:
        contract = self._device.groups.contract
        if contract.board is not None and waited_s > contract.timeout_s:
            # Collectives wait on the device for ever: this is where a rank that is late shows.
            raise contract.stalled(contract.board.ranks, waited_s=waited_s)
        is_gpu = self._device.slots.device.type == "cuda"
        return not is_gpu or torch.cuda.current_stream().query()

    # ---- graphs

    def prepare(self, progress: Callable[[str, float], None]) -> None:
        """Capture what must be there before the first request; the rest when idle."""
        first, rest = self._keys()
        if self._device.slots.device.type == "cuda":
            progress("compiling kernels", 0.0)
            with compiling_ahead():
                for key in (*first, *self._soon_met()):
                    self._run(key)
        self._set_clock()
        if self._graphs is None:
            return
        for number, key in enumerate(first):
            progress("capturing graphs", number / len(first))
            self._capture(self._graphs, key)
        self._wanted, self._has_wanted = iter(rest), True

    @property
    def has_spare_work(self) -> bool:
        return self._graphs is not None and self._has_wanted

    def use_spare_time(self) -> bool:
        """Capture one more graph while nobody waits. False: there is nothing left to do."""
        if self._graphs is None:
            return False
        key = next((k for k in self._wanted if k not in self._graphs), None)
        if key is None:
            self._has_wanted = False
            return False
        self._capture(self._graphs, key)
        return True

    def rest(self) -> None:
        pass

    def _keys(self) -> tuple[list[GraphKey], list[GraphKey]]:
        buckets = self._buckets
        tiers = buckets.k_tiers[::-1]
        first = [GraphKey(s, Tail.GREEDY) for s in buckets.decode_shapes(tiers[0])]
        rest = [
            GraphKey(shape, tail)
            for shapes in (buckets.decode_shapes, buckets.mixed_shapes)
            for tail in Tail
            for k in tiers
            for shape in shapes(k)
        ]
        return first, rest

    def _soon_met(self) -> Iterator[GraphKey]:
        """Steps of the first requests: prompts, which have other kernels by size, and sampling."""
        buckets, k = self._buckets, self._buckets.k_tiers[-1]
        yield GraphKey(next(buckets.decode_shapes(k)), Tail.SAMPLE)
        sizes = {*PRODUCT_ROWS, buckets.mixed_tokens[-1]}
        for tokens, shapes in groupby(buckets.mixed_shapes(k), lambda shape: shape.tokens):
            if tokens in sizes:
                yield GraphKey(next(shapes), Tail.GREEDY)

    def _capture(self, graphs: Graphs, key: GraphKey) -> None:
        self._run_empty(key)  # compiles and allocates whatever the key needs
        graphs.capture(key)

    def _run_empty(self, key: GraphKey) -> None:
        self._writer.write_empty(self._turn % RING_ENTRIES)
        self._turn += 1
        self._run(key)

    def _set_clock(self) -> None:
        """Where the device's clock stands against the host's, by a step without rows."""
        key = GraphKey(next(self._buckets.decode_shapes(0)), Tail.GREEDY)
        self._run_empty(key)
        entry = self._turn % RING_ENTRIES
        before_s = time.perf_counter()
        self._run_empty(key)
        if self._graphs is not None:
            torch.cuda.synchronize()
        self._reader.clock_offset_s = 0.0
        if self._reader.end_s(entry) > 0:
            middle_s = (before_s + time.perf_counter()) / 2
            device_s = (self._reader.start_s(entry) + self._reader.end_s(entry)) / 2
            self._reader.clock_offset_s = middle_s - device_s


def _extent(plan: StepPlan, needs: list[_SlotNeeds]) -> Extent:
    return replace(
        plan.extent(),
        tail=max((n.tail for n in needs), default=Tail.GREEDY),
        # Prompt scores, late masks and foreign code read the device.
        has_graph=plan.late_B is None and not any(n.is_eager for n in needs),
    )


@dataclass(slots=True)
class _Step:
    """One launched step; see step.InFlightStep."""

    runner: CudaRunner
    plan: StepPlan
    entry: int
    forwarded: Forwarded | None = None  # a late plan between its two halves
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    asked: list[tuple[int, int]] = field(default_factory=list)  # rows that want logprobs

    def bind(self, late: LateMasks) -> None:
        self.runner.bind(self, late)

    def wait(self) -> StepResult:
        return self.runner.wait(self)
