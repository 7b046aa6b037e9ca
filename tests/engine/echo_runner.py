"""A runner without a model, for tests of the front: every request repeats its own prompt for ever.

Keeps slots as the device does (lengths, done codes, drafts that are all right) and answers with
the same StepResults. What it should do beyond that is in the config's model name: "delay_s=0.01
fail_at=3 k=2".
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from paceline.config import EngineConfig
from paceline.errors import CheckpointError, CollectiveError
from paceline.parallel.placement import RankPlace
from paceline.request import Done, EngineRequest
from paceline.step import (
    LateMasks,
    Runner,
    RunnerInfo,
    SlotInit,
    StepPlan,
    StepResult,
    StepSize,
    TokenLogprobs,
)

VOCAB_SIZE = 260


@dataclass(slots=True)
class Behaviour:
    """How the runner behaves, read from the model name."""

    delay_s: float = 0.0  # per step
    load_s: float = 0.0
    fail_at: int = 0  # the step that raises
    miss_at: int = 0  # the step that waits in vain for another rank, on all but `at_rank`
    hang_at: int = 0  # the step that never ends
    hang_file: str = ""  # the first step that finds this file never ends
    spin_at: int = 0  # the step that computes for `spin_s`
    spin_s: float = 0.0
    k: int = 0
    pages: int = 4096
    slots: int = 8
    max_len: int = 512
    refuse: str = ""  # CheckpointError while loading
    needs_rest: int = 0  # steps raise where the collector still walks through what was loaded
    at_rank: int = -1  # the only rank that fails, hangs or refuses; -1: every rank

    @classmethod
    def read(cls, text: str) -> Behaviour:
        pairs = dict(pair.split("=", 1) for pair in text.split())
        kinds = {name: type(getattr(cls(), name)) for name in pairs}
        return cls(**{name: kinds[name](value) for name, value in pairs.items()})


@dataclass(slots=True)
class Slot:
    request: EngineRequest
    prompt_len: int
    num_tokens: int
    num_computed: int
    max_len: int
    done: Done = Done.RUNNING

    def token_at(self, position: int) -> int:
        return int(self.request.prompt_token_ids[position % self.prompt_len])


@dataclass(slots=True)
class Finished:
    """A step that was computed when it was launched."""

    result: StepResult

    def bind(self, late: LateMasks) -> None:
        raise AssertionError("no late rows here")

    def is_over(self, within_s: float) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.result


class EchoRunner:
    has_spare_work = False
    lockstep = None

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.info = RunnerInfo(
            num_pages=behaviour.pages,
            page_size=16,
            num_slots=behaviour.slots,
            max_model_len=behaviour.max_len,
            vocab_size=VOCAB_SIZE,
            max_k=behaviour.k,
            draft_lookahead=0,
            model_name="echo",
        )
        self._slots: dict[int, Slot] = {}

    def launch(self, plan: StepPlan) -> Finished:
        started = time.perf_counter()
        if plan.step == self.behaviour.fail_at:
            raise RuntimeError("the device caught fire")
        if self.behaviour.needs_rest and gc.get_freeze_count() < self.behaviour.needs_rest:
            raise RuntimeError("the collector walks through everything")
        if plan.step == self.behaviour.miss_at:
            raise CollectiveError("waited in vain for another rank")
        has_file = bool(self.behaviour.hang_file) and os.path.exists(self.behaviour.hang_file)
        if plan.step == self.behaviour.hang_at or has_file:
            time.sleep(600)
        if plan.step == self.behaviour.spin_at:
            while time.perf_counter() - started < self.behaviour.spin_s:
                pass
        time.sleep(self.behaviour.delay_s)
        for init in plan.admissions:
            self._slots[init.slot] = _occupy(init)
        width = plan.k + 1
        rows = plan.num_rows
        result = StepResult(
            step=plan.step,
            uid_B=plan.uid_B,
            count_B=np.zeros(rows, np.int32),
            token_BW=np.full((rows, width), -1, np.int32),
            done_B=np.zeros(rows, np.int32),
            num_drafts_B=plan.k_B.astype(np.int32),
            num_accepted_B=np.zeros(rows, np.int32),
            device_start_s=started,
            device_end_s=time.perf_counter(),
        )
        for row in range(rows):
            self._run_row(plan, row, result)
        return Finished(result)

    def use_spare_time(self) -> bool:
        return False

    def heartbeat(self) -> None:
        pass

    def step_size(self, plan: StepPlan) -> StepSize:
        return plan.step_size()

    def close(self) -> None:
        self._slots.clear()

    def _run_row(self, plan: StepPlan, row: int, result: StepResult) -> None:
        slot = self._slots[int(plan.slot_B[row])]
        if slot.done:
            result.done_B[row] = slot.done
            return
        start = slot.num_computed
        slot.num_computed += int(plan.query_len_B[row])
        if slot.request.params.prompt_logprobs is not None and start < slot.prompt_len - 1:
            top = slot.request.params.prompt_logprobs
            end = min(slot.num_computed, slot.prompt_len - 1)
            entry = _logprobs(slot, row, range(start + 1, end + 1), top)
            result.prompt_logprobs = [*result.prompt_logprobs, entry]
        if not plan.samples_B[row]:
            return
        first = slot.num_tokens
        for place in range(1 + int(plan.k_B[row])):
            token = slot.token_at(slot.num_tokens)
            result.token_BW[row, place] = token
            result.count_B[row] += 1
            slot.num_tokens += 1
            slot.done = _end_of(slot, token)
            if slot.done:
                break
        slot.num_computed = slot.num_tokens - 1
        result.done_B[row] = slot.done
        result.num_accepted_B[row] = min(int(result.count_B[row]), int(plan.k_B[row]))
        if slot.request.params.logprobs is not None:
            top = slot.request.params.logprobs
            entry = _logprobs(slot, row, range(first, slot.num_tokens), top)
            result.logprobs = [*result.logprobs, entry]


def _occupy(init: SlotInit) -> Slot:
    return Slot(init.request, init.prompt_len, len(init.tokens), init.num_cached, init.max_len)


def _end_of(slot: Slot, token: int) -> Done:
    if slot.num_tokens - slot.prompt_len >= slot.request.params.min_tokens:
        if token in slot.request.eos_token_ids:
            return Done.EOS
        if token in (slot.request.params.stop_token_ids or ()):
            return Done.STOP_TOKEN
    return Done.LENGTH if slot.num_tokens >= slot.max_len else Done.RUNNING


def _logprobs(slot: Slot, row: int, positions: range, top: int) -> TokenLogprobs:
    """The token itself is always second best, -1.5; the best is its successor, -0.5."""
    ids = np.zeros((len(positions), 1 + top), np.int32)
    values = np.zeros((len(positions), 1 + top), np.float32)
    for i, position in enumerate(positions):
        token = slot.token_at(position)
        best = [
            (token + 1) % VOCAB_SIZE,
            token,
            *((token + 2 + j) % VOCAB_SIZE for j in range(top)),
        ]
        ids[i] = [token, *best[:top]]
        values[i] = [-1.5, *(-0.5 - j for j in range(top))]
    return TokenLogprobs(row, ids, values, np.full(len(positions), 2, np.int32))


def build_echo(
    config: EngineConfig, progress: Callable[[str, float], None], place: RankPlace
) -> Runner:
    """The factory: `tests.engine.echo_runner:build_echo`."""
    behaviour = Behaviour.read(config.model.model)
    if behaviour.at_rank == place.engine_rank:
        behaviour = replace(behaviour, miss_at=0)
    elif behaviour.at_rank != -1:
        behaviour = replace(behaviour, fail_at=0, hang_at=0, hang_file="", refuse="")
    progress("loading", 0.0)
    time.sleep(behaviour.load_s)
    if behaviour.refuse:
        raise CheckpointError(f"{behaviour.refuse} is no checkpoint.")
    progress("loading", 1.0)
    return EchoRunner(behaviour)
