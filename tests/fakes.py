"""A runner with a made-up model and its own truth: it checks every plan that it is given.

Computes no tensor. The next token is a hash of all tokens before it, read through the pages.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.request import Done
from paceline.step import (
    Ints,
    LateMasks,
    Lockstep,
    RunnerInfo,
    SlotInit,
    StepPlan,
    StepResult,
    StepSize,
)
from tests.fake_model import chain, mix, next_token
from tests.fake_results import logprobs_of, mask_of

EMPTY = 0  # KV that was never written
GARBAGE = 1  # what drafters and rejected windows leave behind


def runner_info(
    *, max_k: int = 0, draft_lookahead: int | None = None, **changes: Any
) -> RunnerInfo:
    lookahead = max_k if draft_lookahead is None else draft_lookahead
    return replace(RunnerInfo(64, 4, 4, 96, 64, max_k, lookahead), **changes)


def rest_of(continuation: list[int], emitted: list[int]) -> list[int]:
    """What is left of a continuation after `emitted` tokens; nothing unless they are its
    beginning."""
    count = len(emitted)
    return continuation[count:] if continuation[:count] == emitted else []


@dataclass
class Slot:
    """The device's truth about one row."""

    init: SlotInit | None = None
    tokens: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)  # chain value of each position
    num_computed: int = 0
    done: Done = Done.RUNNING
    drafts: list[int] = field(default_factory=list)
    table: dict[int, int] = field(default_factory=dict)
    written_end: int = 0  # one past the last position ever written

    @property
    def prefill_len(self) -> int:
        assert self.init is not None
        return len(self.init.tokens)


@dataclass
class _Row:
    """Function A's outcome for one row: what B needs."""

    slot: Slot
    index: int
    drafts: list[int]
    samples: bool
    k: int = 0
    start: int = 0


class FakeRunner:
    """Implements step.Runner. Executes at launch, in a worker thread when `delay` is given, or as
    late as it can be when it `is_lazy`: then a step that is not wanted any more is left out.

    `acceptance` is the chance that a draft is right; `no_draft` that the drafter has no match.
    """

    has_spare_work = False
    lockstep: Lockstep | None = None

    def __init__(
        self,
        info: RunnerInfo,
        *,
        seed: int = 0,
        acceptance: float = 0.6,
        no_draft: float = 0.2,
        delay: Callable[[], None] | None = None,
        is_lazy: bool = False,
    ) -> None:
        self._info = info
        self._random = random.Random(seed)
        self.acceptance = acceptance
        self.no_draft = no_draft
        self.slots = [Slot() for _ in range(info.num_slots)]
        self.kv: npt.NDArray[np.int64] = np.zeros((info.num_pages, info.page_size), np.int64)
        self.plans: list[StepPlan] = []
        self.keeps_plans = True
        self.last_plan: StepPlan | None = None
        self.fail_at: int | None = None  # step whose wait() raises
        self.num_steps = 0
        self.num_left_out = 0  # steps
        self.num_accepted = 0
        self.is_lazy = is_lazy
        self._unbound: FakeStep | None = None
        self._delay = delay
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if delay is not None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def runs_at_launch(self) -> bool:
        return self._thread is None and not self.is_lazy

    def run_next(self) -> None:
        """The oldest thing that a lazy runner has put off."""
        job = self._jobs.get_nowait()
        assert job is not None
        job()

    def use_spare_time(self) -> bool:
        return False

    def heartbeat(self) -> None:
        pass

    def step_size(self, plan: StepPlan) -> StepSize:
        return plan.step_size()

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def launch(self, plan: StepPlan) -> FakeStep:
        assert self._unbound is None, "a late step was not bound before the next launch"
        step = FakeStep(self, plan)
        self.last_plan = plan
        if self.keeps_plans:
            self.plans.append(plan)
        self._submit(step.run_a)
        if plan.late_B is None:
            self._submit(step.run_b)
        else:
            self._unbound = step
        return step

    def bound(self, step: FakeStep) -> None:
        assert self._unbound is step
        self._unbound = None
        self._submit(step.run_b)

    def _submit(self, job: Callable[[], None]) -> None:
        if self.runs_at_launch:
            job()
        else:
            self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            assert self._delay is not None
            self._delay()
            job()

    # ---- A: inputs, pages and the target's forward

    def run_a(self, plan: StepPlan) -> list[_Row]:
        self.num_steps += 1
        assert plan.step == self.num_steps, f"step {plan.step} after {self.num_steps - 1}"
        self._check_shape(plan)
        self._apply_admissions(plan)
        self._take_host_drafts(plan)
        if plan.unwanted[0]:
            self.num_left_out += 1
            return []
        rows = []
        for index in range(plan.num_rows):  # every row writes before any row reads
            slot = self.slots[plan.slot_B[index]]
            assert slot.init is not None, "a row without a request"
            assert slot.init.request.uid == plan.uid_B[index], "the slot belongs to another request"
            rows.append(self._write_row(plan, index, slot))
        for row in rows:
            self._read_row(row)
        return rows

    def _check_shape(self, plan: StepPlan) -> None:
        info, rows = self._info, plan.num_rows
        if plan.agreed is None:
            assert rows > 0
        else:
            assert plan.k == plan.agreed.k, "drafts of another number than was agreed"
            assert plan.num_tokens <= plan.agreed.tokens
            assert rows <= plan.agreed.rows
        assert len(set(plan.slot_B.tolist())) == rows, "a slot has two rows"
        assert len(set(plan.uid_B.tolist())) == rows
        assert 0 <= plan.k <= info.window_k
        assert plan.k_B.max(initial=0) <= plan.k
        assert plan.k_B.min(initial=0) >= 0
        for array in (plan.slot_B, plan.query_len_B, plan.k_B, plan.length_bound_B):
            assert array.dtype == np.int32
            assert array.shape == (rows,)
        assert plan.uid_B.dtype == np.int64
        assert plan.samples_B.dtype == np.bool_
        assert plan.length_bound_B.max(initial=0) <= info.max_model_len

    def _apply_admissions(self, plan: StepPlan) -> None:
        info = self._info
        for init in plan.admissions:
            assert 0 < init.prompt_len <= len(init.tokens) < init.max_len <= info.max_model_len
            assert 0 <= init.num_cached < len(init.tokens), "a hit leaves a token to compute"
            assert init.num_cached % info.page_size == 0
            tokens = init.tokens.tolist()
            assert min(tokens) >= 0
            assert tokens[: init.prompt_len] == list(init.request.prompt_token_ids)
            assert init.slot in plan.slot_B, "admitted without a row"
            self.slots[init.slot] = Slot(
                init=init,
                tokens=tokens,
                states=chain(tokens),
                num_computed=init.num_cached,
                drafts=[],
                table=dict(enumerate(init.pages.tolist())),
            )
        appends = plan.page_appends
        if appends is not None:
            for slot, index, page in zip(appends.slot, appends.index, appends.page, strict=True):
                table = self.slots[slot].table
                assert slot in plan.slot_B, "pages for a slot without a row"
                assert index <= len(table), "a hole in a page table"
                for stale in range(int(index), len(table)):  # held in advance and taken back
                    del table[stale]
                table[int(index)] = int(page)
        if plan.unwanted[0]:  # after a step that was left out, num_computed is behind
            return
        for slot_index in plan.slot_B.tolist():
            slot = self.slots[slot_index]
            first = self.first_seen(slot.num_computed) // info.page_size
            pages = [page for index, page in slot.table.items() if index >= first]
            assert all(0 <= page < info.num_pages for page in pages)
            assert len(set(pages)) == len(pages), "a page twice in one table"

    def _take_host_drafts(self, plan: StepPlan) -> None:
        host = plan.host_drafts
        if host is None:
            return
        for r, (row, length) in enumerate(zip(host.row_R, host.length_R, strict=True)):
            assert 0 < plan.k_B[row] <= self._info.window_k
            slot = self.slots[plan.slot_B[row]]
            tokens = host.token_RC[r][host.token_RC[r] >= 0]
            rest = rest_of(tokens.tolist(), slot.tokens[length:])
            if len(rest) >= max(host.least_R[r], 1):
                slot.drafts = rest

    def _write_row(self, plan: StepPlan, index: int, slot: Slot) -> _Row:
        info = self._info
        length, k = int(plan.query_len_B[index]), int(plan.k_B[index])
        start = slot.num_computed
        is_prefill = start < slot.prefill_len
        samples = bool(plan.samples_B[index])
        if is_prefill:
            assert k == 0
            end = start + length
            assert end <= slot.prefill_len, "a chunk past the prompt"
            assert samples == (end == slot.prefill_len), "only final chunks sample"
            states, drafts = slot.states[start:end], []
        else:
            assert length == 1 + k
            assert samples
            assert slot.done or start == len(slot.tokens) - 1
            assert slot.init is not None
            drafts = slot.drafts[: max(min(k, slot.init.max_len - len(slot.tokens) - 1), 0)]
            if -1 in drafts:
                drafts = drafts[: drafts.index(-1)]
            states = slot.states[start : start + 1]
            for draft in drafts:
                states.append(mix(states[-1], draft))
            end = start + 1 + max(min(k, info.max_k), len(drafts))
        if not slot.done:
            assert plan.length_bound_B[index] >= min(end, info.max_model_len), "bound below truth"
            reserved = min(end + info.draft_lookahead, info.max_model_len)
            assert len(slot.table) * info.page_size >= reserved, "pages are not reserved"
            for position, state in enumerate(states, start):
                self._write(slot, position, state)
            for position in range(start + len(states), end):  # no draft there
                self._write(slot, position, GARBAGE)
        return _Row(slot, index, drafts, samples, k, start)

    def _write(self, slot: Slot, position: int, state: int) -> None:
        if position < self._info.max_model_len:
            size = self._info.page_size
            self.kv[slot.table[position // size], position % size] = state
            slot.written_end = max(slot.written_end, position + 1)

    def _read_row(self, row: _Row) -> None:
        """Attention sees every position of the window up to its own: all must hold this prefix."""
        slot, end = row.slot, row.start + 1
        if not slot.done:
            first = self.first_seen(row.start)
            seen = self.read(self.kv, slot, first, end)
            assert seen == slot.states[first:end], f"wrong KV in the pages of request {_uid(slot)}"

    def read(self, kv: npt.NDArray[np.int64], slot: Slot, first: int, end: int) -> list[int]:
        size = self._info.page_size
        pages = [slot.table[page] for page in range(first // size, -(-end // size))]
        skipped = first // size * size
        values: list[int] = kv[pages].reshape(-1)[first - skipped : end - skipped].tolist()
        return values

    def first_seen(self, position: int) -> int:
        """The first position that a query sees; those before may be gone."""
        window = self._info.kv_window
        return 0 if window is None else max(position + 1 - window, 0)

    # ---- B: verify, advance, draft

    def run_b(self, plan: StepPlan, rows: list[_Row], late: LateMasks | None) -> StepResult:
        num = plan.num_rows
        result = StepResult(
            step=plan.step,
            uid_B=plan.uid_B,
            count_B=np.zeros(num, np.int32),
            token_BW=np.full((num, plan.k + 1), -1, np.int32),
            done_B=np.zeros(num, np.int32),
            num_drafts_B=np.zeros(num, np.int32),
            num_accepted_B=np.zeros(num, np.int32),
            logprobs=[],
            prompt_logprobs=[],
        )
        if plan.late_B is not None:
            result.draft_BK = np.full((num, plan.k), -1, np.int32)
        for row in rows:
            self._finish_row(plan, row, result, late)
        result.device_start_s = result.device_end_s = time.perf_counter()
        return result

    def _finish_row(
        self, plan: StepPlan, row: _Row, result: StepResult, late: LateMasks | None
    ) -> None:
        slot, index = row.slot, row.index
        if slot.done:
            result.done_B[index] = slot.done
            return
        self._prompt_logprobs(plan, row, result)
        if row.samples:
            self._verify(row, result, mask_of(late, index))
            slot.num_computed = len(slot.tokens) - 1
            slot.drafts = []
            if not slot.done:
                slot.drafts = self.propose(slot, min(plan.k, self._info.max_k))
            if result.draft_BK is not None:
                result.draft_BK[index, : len(slot.drafts)] = slot.drafts
        else:
            slot.num_computed += int(plan.query_len_B[index])
        if not slot.done:  # the drafter writes past the newest token
            for position in range(self._info.draft_lookahead):
                self._write(slot, slot.num_computed + position, GARBAGE)

    def _verify(self, row: _Row, result: StepResult, mask_WV: Ints | None) -> None:
        slot = row.slot
        assert slot.init is not None
        request = slot.init.request
        emitted: list[int] = []
        accepted = 0
        while True:
            mask = mask_WV[len(emitted)] if mask_WV is not None else None
            bans_stops = len(slot.tokens) - slot.init.prompt_len < request.params.min_tokens
            token = self.sample(slot, bans_stops, mask)
            is_right = len(emitted) < len(row.drafts) and row.drafts[len(emitted)] == token
            emitted.append(token)
            slot.tokens.append(token)
            slot.states.append(mix(slot.states[-1], token))
            accepted += is_right
            if token in request.eos_token_ids:
                slot.done = Done.EOS
            elif token in (request.params.stop_token_ids or ()) and not bans_stops:
                slot.done = Done.STOP_TOKEN
            elif len(slot.tokens) >= slot.init.max_len:
                slot.done = Done.LENGTH
            if slot.done or not is_right:
                break
        self.num_accepted += accepted
        result.count_B[row.index] = len(emitted)
        result.token_BW[row.index, : len(emitted)] = emitted
        result.done_B[row.index] = slot.done
        result.num_drafts_B[row.index] = len(row.drafts)
        result.num_accepted_B[row.index] = accepted
        if request.params.logprobs is not None:
            result.logprobs = [*result.logprobs, logprobs_of(row.index, emitted)]

    def sample(self, slot: Slot, bans_stops: bool, mask: Ints | None) -> int:
        """The model's next token of a sequence."""
        assert slot.init is not None
        return next_token(
            slot.states[-1], slot.init.request, self._info.vocab_size, bans_stops, mask
        )

    def propose(self, slot: Slot, k: int) -> list[int]:
        assert slot.init is not None
        rng, vocab = self._random, self._info.vocab_size
        drafts: list[int] = []
        state = slot.states[-1]
        if rng.random() < self.no_draft:
            return [-1] * k
        while len(drafts) < k:
            token = next_token(state, slot.init.request, vocab, False)
            if rng.random() >= self.acceptance:
                token = rng.randrange(vocab)
            drafts.append(token)
            state = mix(state, token)
        return drafts

    def _prompt_logprobs(self, plan: StepPlan, row: _Row, result: StepResult) -> None:
        init = row.slot.init
        assert init is not None
        if init.request.params.prompt_logprobs is None or row.start >= row.slot.prefill_len:
            return
        end = row.start + int(plan.query_len_B[row.index])
        tokens = init.tokens[row.start + 1 : min(end + 1, init.prompt_len)].tolist()
        if tokens:
            result.prompt_logprobs = [*result.prompt_logprobs, logprobs_of(row.index, tokens)]


class FakeStep:
    """Implements step.InFlightStep."""

    def __init__(self, runner: FakeRunner, plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan
        self._rows: list[_Row] = []
        self._late: LateMasks | None = None
        self._done = threading.Event()
        self._result: StepResult | None = None
        self._error: BaseException | None = None

    def run_a(self) -> None:
        try:
            self._rows = self._runner.run_a(self._plan)
        except BaseException as error:
            self._error = error

    def run_b(self) -> None:
        try:
            if self._error is None:
                self._result = self._runner.run_b(self._plan, self._rows, self._late)
        except BaseException as error:
            self._error = error
        self._done.set()

    def bind(self, late: LateMasks) -> None:
        plan = self._plan
        assert plan.late_B is not None
        assert late.row_R.tolist() == np.flatnonzero(plan.late_B).tolist()
        words = (self._runner.info.vocab_size + 31) // 32
        assert late.mask_RWV.shape == (len(late.row_R), plan.k + 1, words)
        self._late = late
        self._runner.bound(self)

    def is_over(self, within_s: float) -> bool:
        return True

    def wait(self) -> StepResult:
        while self._runner.is_lazy and not self._done.is_set():
            self._runner.run_next()
        assert self._done.wait(timeout=30), "the step never ran (a late step without bind?)"
        if self._error is not None:
            raise self._error
        if self._runner.fail_at == self._plan.step:
            raise RuntimeError("the device is on fire")
        assert self._result is not None
        return self._result


def _uid(slot: Slot) -> int:
    assert slot.init is not None
    return slot.init.request.uid
