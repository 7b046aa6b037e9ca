"""Plans steps and commits their results: continuous batching with run-ahead.

Never sees a device or text. It reads no token of a step in flight, only bounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.request import Done, EngineRequest
from paceline.scheduler.allocator import Allocator
from paceline.scheduler.constraints import Constraints
from paceline.scheduler.continuations import NO_ROWS
from paceline.scheduler.events import Ended, Events, MaskFiller, TokenConstraint
from paceline.scheduler.inflight import Flight, Rows
from paceline.scheduler.live_request import LiveRequest
from paceline.scheduler.request_table import RequestTable
from paceline.scheduler.snapshots import SnapshotStats
from paceline.step import (
    Bools,
    Ints,
    LateMasks,
    RunnerInfo,
    SlotInit,
    StepPlan,
    StepResult,
    TokenLogprobs,
)


class Scheduler:
    """plan() may be called before the results of earlier plans are committed.

    Every plan must be launched, and results must reach commit() in the order of the plans.
    """

    def __init__(
        self, config: EngineConfig, info: RunnerInfo, filler: MaskFiller | None = None
    ) -> None:
        self.info = info
        self.budget = config.scheduler.max_num_batched_tokens or info.max_num_batched_tokens
        if self.budget < info.num_slots * (info.max_k + 1):
            raise ConfigError(
                f"max_num_batched_tokens {self.budget} cannot hold {info.num_slots} rows of "
                f"{info.max_k + 1} tokens; raise it or lower --max-num-seqs."
            )
        self._events = Events()
        self._requests = RequestTable(info.num_slots)
        self._allocator = Allocator(config, info, self._requests, self._events)
        self._constraints = Constraints(
            self._requests, self._allocator, self._events, info.vocab_size, filler
        )
        self.continuations = self._allocator.continuations
        self.table = self._allocator.slots
        self._pages = self._allocator.pages
        self._marks = self._pages.marks
        self._draft_lengths = self._allocator.draft_lengths
        self._is_priority = config.scheduler.scheduling_policy == "priority"
        self._wasted_rows = 0  # since take_wasted_rows()
        self._draft_k_S: Ints = np.zeros(info.num_slots, np.int32)  # k without host drafts
        self.num_steps = 0
        self.num_wasted_rows = 0

    # ---- requests

    def add(self, request: EngineRequest, constraint: TokenConstraint | None = None) -> None:
        """Queue a request, which the engine has checked."""
        tokens: Ints = np.array(request.token_ids, np.int32)
        assert 0 < len(tokens) < self.max_len, f"a prompt of {len(tokens)} tokens can never run"
        max_tokens, limit = request.params.max_tokens, self.max_len
        prompt_len = len(request.prompt_token_ids)
        max_len = limit if max_tokens is None else min(prompt_len + max_tokens, limit)
        key = (request.priority if self._is_priority else 0, request.uid)
        live = LiveRequest(request, key, tokens, max_len, constraint)
        self._requests.add(live)

    def refuse(self, uid: int, reason: str, error: str, param: str | None = None) -> None:
        """Report a request that was not added."""
        self._events.ended.append(Ended(uid, Done.ERROR, reason, error, param))

    def abort(self, uid: int) -> bool:
        """End a request now. Results of its rows in flight are dropped when they arrive.

        False: there is no such request.
        """
        live = self._requests.by_uid.get(uid)
        if live is None:
            return False
        self._allocator.end(live)
        self.report_abort(uid)
        return True

    def report_abort(self, uid: int) -> None:
        """Tell that a request is over because it was aborted."""
        self._events.ended.append(Ended(uid, Done.ABORT))

    def drop_unwanted_steps(self) -> None:
        """If no request is left that has a row in flight: let the device end these steps early.

        Pages that they were to fill leave the prefix cache. A request that had found them there
        would have a row in flight itself.
        """
        flights = self.table.in_flight
        if any(uid in self._requests.by_uid for f in flights for uid in f.plan.uid_B.tolist()):
            return
        for flight in flights:
            flight.plan.unwanted[0] = 1
            self._pages.cache.forget(flight.fresh_pages)
            if self._marks is not None:
                self._marks.forget(flight)

    def end_all(self, done: Done, reason: str) -> None:
        """The device failed: no step in flight will deliver a result."""
        self.table.in_flight.clear()
        for live in list(self._requests.by_uid.values()):
            self._allocator.end(live)
            self._events.ended.append(Ended(live.uid, done, reason, "EngineDead"))

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> None:
        """Forget all cached prefixes. Running requests keep their pages, or are preempted and
        computed again from their tokens."""
        self._pages.cache.reset()
        for live in self._requests.running():
            self._pages.stop_registering(live)
            if preempt_running:
                self._allocator.preempt(live)

    # ---- plan

    def plan(self) -> StepPlan | None:
        """The next step, or None if no row can run before another result is committed."""
        table, requests, allocator = self.table, self._requests, self._allocator
        left_S = table.last_S - table.lower_S
        ready_S = left_S >= 0
        # A draft past the length limit could never be emitted, so it is not verified.
        k_S = np.minimum(self._wanted_drafts(self.num_steps + 1, ready_S), left_S)
        if (draft_len := self.info.draft_max_len) is not None:
            k_S = np.minimum(k_S, np.maximum(draft_len - table.lower_S, 0))
        self._draft_k_S = k_S
        if self.continuations:
            k_S = self.continuations.widen(k_S, left_S, self._spare_tokens(k_S, ready_S))
        bound_S = table.upper_S + k_S
        short = (bound_S > table.page_room_S).nonzero()[0]
        num_before = allocator.num_preemptions
        if len(short):
            allocator.grow(short[ready_S[short]], bound_S)
        if self._is_priority:
            allocator.make_room_for_head()
        if allocator.num_preemptions != num_before:
            ready_S &= table.last_S >= 0
        width_S = (k_S + 1) * ready_S
        chunks: list[tuple[LiveRequest, int]] = []
        admissions: list[SlotInit] = []
        if requests.waiting.count or requests.prefilling:
            chunks, admissions = self._prefill(self.budget - int(np.add.reduce(width_S)))
        slots = ready_S.nonzero()[0]
        if not len(slots) and not chunks:
            return None
        self.num_steps += 1
        flight = self._assemble(slots, k_S, bound_S, chunks, ready_S, width_S)
        flight.plan.admissions = admissions
        flight.plan.page_appends = self._pages.take_appends()
        flight.fresh_pages = self._pages.take_fresh()
        if self._marks is not None:
            flight.plan.marks = self._marks.launch(flight)
        table.launch(flight)
        return flight.plan

    def _spare_tokens(self, k_S: Ints, ready_S: Bools) -> int:
        """Tokens of the step that host drafts may take. Prompts get at least half of the rest."""
        spare = self.budget - int(np.add.reduce((k_S + 1) * ready_S))
        has_prompts = self._requests.waiting.count or self._requests.prefilling
        return spare // 2 if has_prompts else spare

    def _wanted_drafts(self, step: int, ready_S: Bools) -> Ints:
        is_mixed = bool(self._requests.waiting.count or self._requests.prefilling)
        num_rows = int(np.count_nonzero(ready_S))
        return self._draft_lengths.wanted(step, num_rows, is_mixed=is_mixed)

    def plan_empty(self) -> StepPlan:
        """A step without rows, when plan() gave None and another replica has rows: its collectives
        need every rank."""
        self.num_steps += 1
        no_slots, zeros_S = np.empty(0, np.intp), np.zeros(self.info.num_slots, np.int32)
        flight = self._assemble(no_slots, zeros_S, zeros_S, [], zeros_S.astype(np.bool_), zeros_S)
        flight.plan.page_appends = self._pages.take_appends()
        self.table.launch(flight)
        return flight.plan

    def _prefill(self, budget: int) -> tuple[list[tuple[LiveRequest, int]], list[SlotInit]]:
        """The prompt chunks of this step as (request, length), and the admissions they need."""
        requests, allocator = self._requests, self._allocator
        chunks: list[tuple[LiveRequest, int]] = []
        admissions: list[SlotInit] = []
        started = sorted(requests.prefilling.values(), key=lambda live: live.key, reverse=True)
        while budget > 0:
            head = requests.waiting.head() if requests.waiting.count else None
            hit = allocator.room_for(head) if head is not None else None
            if started and (head is None or hit is None or started[-1].key < head.key):
                live = started.pop()
            elif head is not None and hit is not None:
                live = head
                admissions.append(allocator.admit(live, hit))
            else:
                break
            length = min(len(live.tokens) - live.num_launched, budget)
            length = self._pages.place_marks(live, length)
            budget -= length
            if live.wants_prompt_logprobs:
                live.chunk_starts[self.num_steps + 1] = live.num_launched
            live.num_launched += length
            self._pages.register_launched(live)
            chunks.append((live, length))
        return chunks, admissions

    def _assemble(
        self,
        slots: Rows,
        k_S: Ints,
        bound_S: Ints,
        chunks: list[tuple[LiveRequest, int]],
        samples_S: Bools,
        width_S: Ints,
    ) -> Flight:
        """The plan: rows that decode or verify (`slots`), then prompt chunks."""
        table = self.table
        k_B = k_S.take(slots)
        query_len_B = k_B + 1
        bound_B = np.minimum(bound_S.take(slots), self.info.max_model_len)
        host_drafts, is_forced_R = self.continuations.drafts(slots, k_B)
        samples_B: Bools = np.ones(len(slots) + len(chunks), np.bool_)
        k = int(k_B.max()) if len(slots) else 0
        wanted_B = k_B if self._draft_k_S is k_S else self._draft_k_S.take(slots)
        draft_k_B = self._draft_lengths.proposed(wanted_B, slots)
        if chunks:
            more_k: list[int] = []
            wanted_S = self._wanted_drafts(self.num_steps, samples_S)
            for row, (live, _) in enumerate(chunks, len(slots)):
                is_final = live.num_launched == len(live.tokens)
                samples_B[row] = samples_S[live.slot] = is_final
                more_k.append(int(wanted_S[live.slot]) if is_final else 0)
                if is_final:
                    width_S[live.slot] = 1
                    table.last_S[live.slot] = live.max_len - 1
                    self._pages.set_room(live)
                    self._constraints.begin(live)
                    del self._requests.prefilling[live.uid]
            slots = _extended(slots, [live.slot for live, _ in chunks])
            k_B = _extended(k_B, [0] * len(chunks))
            draft_k_B = _extended(draft_k_B, more_k)
            query_len_B = _extended(query_len_B, [length for _, length in chunks])
            bound_B = _extended(bound_B, [live.num_launched for live, _ in chunks])
        draft_k = int(draft_k_B.max(initial=0))
        plan = StepPlan(
            step=self.num_steps,
            k=max(k, draft_k),
            draft_k=draft_k,
            draft_k_B=draft_k_B,
            uid_B=table.uid_S.take(slots),
            slot_B=slots.astype(np.int32),
            query_len_B=query_len_B,
            k_B=k_B,
            samples_B=samples_B,
            length_bound_B=bound_B,
            host_drafts=host_drafts,
        )
        plan.late_B = self._constraints.late_rows(slots, samples_B)
        return Flight(plan, slots, samples_S, width_S, is_forced_R=is_forced_R)

    # ---- commit

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Take in the oldest result, and drop its rows whose requests have ended."""
        table = self.table
        flight = table.in_flight[0]
        assert flight.plan is plan, "results out of order"
        assert result.step == plan.step, f"result {result.step} for plan {plan.step}"
        if result.prompt_logprobs:
            result.prompt_logprobs = self._new_prompt_logprobs(result)
        if flight.strays and (wasted := self._settle_strays(flight, result)):
            result.drop(wasted)
        is_asked = self._draft_lengths.learns or any(flight.is_forced_R)
        taken = self.continuations.taken(flight) if is_asked else NO_ROWS
        result.num_forced_B = _num_forced(taken, flight, result)
        table.commit(flight, result)
        if self._marks is not None:
            for slot, marks in self._marks.passed(flight, result):
                self._pages.register_passed(self._requests.owner(slot), marks)
        self._draft_lengths.learn(flight.slots, plan.k_B, result, taken)
        if self._draft_lengths.is_auto:
            slots = flight.slots[plan.samples_B & (flight.slots != table.num_slots)]
            kv_tokens = int(table.committed_S[slots].sum())
            self._draft_lengths.measure(plan, slots, result, kv_tokens)
        if plan.late_B is not None:
            self._constraints.accept_late_rows(flight, result)
        if np.count_nonzero(result.done_B):
            for slot in flight.slots[result.done_B.nonzero()[0]].tolist():
                if slot != table.num_slots:
                    self._allocator.end(self._requests.owner(slot), is_complete=True)
        self._allocator.lookups.commit(flight, result)
        if self.info.kv_window is not None:
            self._pages.free_behind_window(self._requests.running())

    def _new_prompt_logprobs(self, result: StepResult) -> list[TokenLogprobs]:
        found = []
        for entry in result.prompt_logprobs:
            live = self._requests.by_uid.get(int(result.uid_B[entry.row]))
            new = live.new_prompt_logprobs(result.step, entry) if live is not None else None
            if new is not None:
                found.append(new)
        return found

    def _settle_strays(self, flight: Flight, result: StepResult) -> list[int]:
        """Rows whose requests left their slots after the launch. Output of a preempted request is
        kept; rows of ended requests are wasted. Returns the wasted rows."""
        wasted = []
        for row in flight.strays:
            live = self._requests.by_uid.get(int(flight.plan.uid_B[row]))
            if live is None:
                wasted.append(row)
                continue
            assert live.num_draining > 0, f"request {live.uid} runs again and was not drained"
            tokens = result.token_BW[row, : result.count_B[row]].tolist()
            live.drained += tokens
            live.num_draining -= 1
            is_done = bool(result.done_B[row])
            is_accepted = self._constraints.accept(live, tokens, is_done)
            if is_done:
                self._allocator.end(live)
            elif is_accepted and live.num_draining == 0:
                live.absorb_drained()
        self._wasted_rows += len(wasted)
        self.num_wasted_rows += len(wasted)
        return wasted

    def late_masks(self, plan: StepPlan) -> LateMasks:
        """Masks of a plan with late rows; every earlier result has been committed."""
        flight = self.table.in_flight[0]
        assert flight.plan is plan, "masks before the previous commit"
        return self._constraints.masks(plan, self.continuations.taken_tokens(flight))

    # ---- figures

    @property
    def max_len(self) -> int:
        """The longest sequence (prompt and output) that the KV cache and the model can hold."""
        return self._pages.max_len

    @property
    def num_unfinished(self) -> int:
        return len(self._requests.by_uid)

    @property
    def num_running(self) -> int:
        return self._requests.num_running

    @property
    def num_preemptions(self) -> int:
        return self._allocator.num_preemptions

    @property
    def num_waiting(self) -> int:
        return self._requests.waiting.count

    @property
    def num_hit_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache."""
        return self._pages.cache.num_hit_tokens

    @property
    def kv_usage(self) -> float:
        return self._pages.pool.usage

    @property
    def snapshots(self) -> SnapshotStats:
        return SnapshotStats() if self._marks is None else self._marks.stats()

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> Events:
        return self._events.take()

    def take_wasted_rows(self) -> int:
        count, self._wasted_rows = self._wasted_rows, 0
        return count


def _num_forced(taken: Rows, flight: Flight, result: StepResult) -> Ints:
    """Forced tokens among the drafts that each row accepted."""
    forced_B: Ints = np.zeros(len(result.uid_B), np.int32)
    if len(taken) and any(flight.is_forced_R):
        host = flight.plan.host_drafts
        assert host is not None
        rows = np.intersect1d(host.row_R[flight.is_forced_R], taken)
        forced_B[rows] = result.num_accepted_B[rows]
    return forced_B


def _extended(values: Any, more: list[int]) -> Any:
    return np.concatenate([values, np.array(more, values.dtype)])
