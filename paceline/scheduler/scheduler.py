"""Which rows a step holds, and what its result means. Plans out, results in.

Never sees a device or text; never reads a token of a step in flight, only bounds.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.request import Done, EngineRequest
from paceline.scheduler.commit import late_masks, trim_prompt_logprobs, without_rows
from paceline.scheduler.events import Emitted, Ended, Events, TokenConstraint
from paceline.scheduler.inflight import Flight, Rows
from paceline.scheduler.live import LiveRequest
from paceline.scheduler.roster import Roster
from paceline.step import Bools, Ints, LateMasks, RunnerInfo, SlotInit, StepPlan, StepResult

logger = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching with run-ahead: plan() may be called before earlier commits.

    Every plan must be launched, and results come back to commit() in the same order.
    """

    def __init__(self, config: EngineConfig, info: RunnerInfo) -> None:
        self.info = info
        self.budget = config.scheduler.max_num_batched_tokens or info.max_num_batched_tokens
        if self.budget < info.num_slots * (info.max_k + 1):
            raise ConfigError(
                f"max_num_batched_tokens {self.budget} cannot hold {info.num_slots} rows of "
                f"{info.max_k + 1} tokens; raise it or lower --max-num-seqs."
            )
        self._roster = Roster(config, info)
        self.table = self._roster.table
        self._pages = self._roster.pages
        self._draft_lengths = self._roster.draft_lengths
        self._is_priority = config.scheduler.scheduling_policy == "priority"
        self._wasted_rows = 0
        self.num_steps = 0
        self.num_wasted_rows = 0

    # ---- requests

    def add(self, request: EngineRequest, constraint: TokenConstraint | None = None) -> None:
        """Queue a request; raises InvalidRequest when it could never run."""
        self._roster.add(request, constraint)

    def refuse(self, uid: int, reason: str, error: str) -> None:
        """Report a request that add() raised for."""
        self._roster.events.ended.append(Ended(uid, Done.ERROR, reason, error))

    def abort(self, uid: int) -> None:
        """End a request now. Rows in flight are dropped when they come."""
        live = self._roster.requests.get(uid)
        if live is not None:
            self._roster.end(live)
            self._roster.events.ended.append(Ended(uid, Done.ABORT))

    def end_all(self, done: Done, reason: str) -> None:
        """The device failed: nothing in flight will come back."""
        self.table.in_flight.clear()
        for live in list(self._roster.requests.values()):
            self._roster.end(live)
            self._roster.events.ended.append(Ended(live.uid, done, reason, "EngineDead"))

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> None:
        """Forget all cached prefixes. Running requests finish on their own pages, or are all
        computed again from their tokens."""
        self._pages.cache.reset()
        for live in self._roster.running():
            self._pages.stop_registering(live)
            if preempt_running:
                self._roster.preempt(live)

    # ---- plan

    def plan(self) -> StepPlan | None:
        """The next step, or None when no row can run before another result is committed."""
        table, roster = self.table, self._roster
        left_S = table.last_S - table.lower_S
        ready_S = left_S >= 0
        # Drafts past the limit could never be emitted, whatever the true length is.
        k_S = np.minimum(self._draft_lengths.wanted(self.num_steps + 1), left_S)
        bound_S = table.upper_S + k_S
        short = (bound_S > table.page_room_S).nonzero()[0]
        num_before = roster.num_preemptions
        if len(short):
            roster.grow(short[ready_S[short]], bound_S)
        if self._is_priority:
            roster.make_room_for_head()
        if roster.num_preemptions != num_before:
            ready_S &= table.last_S >= 0
        width_S = (k_S + 1) * ready_S
        chunks: list[tuple[LiveRequest, int]] = []
        admissions: list[SlotInit] = []
        if roster.waiting.count or roster.prefilling:
            chunks, admissions = self._prefill(self.budget - int(np.add.reduce(width_S)))
        slots = ready_S.nonzero()[0]
        if not len(slots) and not chunks:
            return None
        self.num_steps += 1
        flight = self._assemble(slots, k_S, bound_S, chunks, ready_S, width_S)
        flight.plan.admissions = admissions
        flight.plan.page_appends = self._pages.take_appends()
        table.launch(flight)
        return flight.plan

    def plan_empty(self) -> StepPlan:
        """A step without rows, for the sake of other replicas. Follows a plan() that gave None."""
        self.num_steps += 1
        nobody, slots = np.zeros(self.info.num_slots, np.bool_), np.empty(0, np.intp)
        none_S = np.zeros(self.info.num_slots, np.int32)
        flight = self._assemble(slots, none_S, none_S, [], nobody, none_S)
        flight.plan.page_appends = self._pages.take_appends()
        self.table.launch(flight)
        return flight.plan

    def _prefill(self, budget: int) -> tuple[list[tuple[LiveRequest, int]], list[SlotInit]]:
        """(request, chunk length) by order, of prompts under way and of admitted requests."""
        roster = self._roster
        chunks: list[tuple[LiveRequest, int]] = []
        admissions: list[SlotInit] = []
        started = sorted(roster.prefilling.values(), key=lambda live: live.key, reverse=True)
        while budget > 0:
            head = roster.waiting.head() if roster.waiting.count else None
            hit = roster.room_for(head) if head is not None else None
            if started and (head is None or hit is None or started[-1].key < head.key):
                live = started.pop()
            elif head is not None and hit is not None:
                live = head
                admissions.append(roster.admit(live, hit))
            else:
                break
            length = min(len(live.tokens) - live.num_launched, budget)
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
        """Rows in order: those that decode or verify, then chunks."""
        table = self.table
        k_B = k_S.take(slots)
        query_len_B = k_B + 1
        bound_B = np.minimum(bound_S.take(slots), self.info.max_model_len)
        samples_B: Bools = np.ones(len(slots) + len(chunks), np.bool_)
        k = int(k_B.max()) if len(slots) else 0
        if chunks:
            wanted_S = self._draft_lengths.wanted(self.num_steps)
            for row, (live, _) in enumerate(chunks, len(slots)):
                is_final = live.num_launched == len(live.tokens)
                samples_B[row] = samples_S[live.slot] = is_final
                if is_final:
                    width_S[live.slot] = 1
                    table.last_S[live.slot] = live.max_len - 1
                    self._pages.begin_decode(live)
                    k = max(k, int(wanted_S[live.slot]))
                    del self._roster.prefilling[live.uid]
            slots = _extended(slots, [live.slot for live, _ in chunks])
            k_B = _extended(k_B, [0] * len(chunks))
            query_len_B = _extended(query_len_B, [length for _, length in chunks])
            bound_B = _extended(bound_B, [live.num_launched for live, _ in chunks])
        plan = StepPlan(
            step=self.num_steps,
            k=k,
            uid_B=table.uid_S.take(slots),
            slot_B=slots.astype(np.int32),
            query_len_B=query_len_B,
            k_B=k_B,
            samples_B=samples_B,
            length_bound_B=bound_B,
        )
        if self._roster.num_constrained:
            plan.late_B = self._late_rows(slots, samples_B)
        return Flight(plan, slots, samples_S, width_S)

    def _late_rows(self, slots: Rows, samples_B: Bools) -> Bools | None:
        owners = [self._roster.owner(slot) for slot in slots.tolist()]
        late_B: Bools = np.array([live.constraint is not None for live in owners])
        late_B &= samples_B
        return late_B if late_B.any() else None

    # ---- commit

    def commit(self, plan: StepPlan, result: StepResult) -> Emitted:
        """A result arrived. Returns the rows that somebody still waits for."""
        table = self.table
        flight = table.in_flight[0]
        assert flight.plan is plan, "results out of order"
        assert result.step == plan.step, f"result {result.step} for plan {plan.step}"
        if result.prompt_logprobs:
            result.prompt_logprobs = trim_prompt_logprobs(plan, result, self._roster.requests)
        emitted = Emitted(
            result.step,
            plan.uid_B,
            result.count_B,
            result.token_BW,
            result.done_B,
            result.num_drafts_B,
            result.num_accepted_B,
            result.logprobs,
            result.prompt_logprobs,
        )
        if flight.strays:
            emitted = without_rows(emitted, self._settle_strays(flight, result))
        table.commit(flight, result)
        self._draft_lengths.learn(flight.slots, plan.k_B, result)
        if plan.late_B is not None:
            self._accept_constrained(flight, result)
        if np.count_nonzero(result.done_B):
            for slot in flight.slots[result.done_B.nonzero()[0]].tolist():
                if slot != table.num_slots:
                    self._roster.end(self._roster.owner(slot))
        if self.info.kv_window is not None:
            self._pages.free_behind_window(self._roster.running())
        return emitted

    def _settle_strays(self, flight: Flight, result: StepResult) -> list[int]:
        """Rows of requests that left their slots: output of preempted ones is kept, the rest is
        wasted. Returns the rows that nobody waits for."""
        wasted = []
        for row in flight.strays:
            live = self._roster.requests.get(int(flight.plan.uid_B[row]))
            if live is None:
                wasted.append(row)
                continue
            assert live.num_draining > 0, f"request {live.uid} runs again and was not drained"
            tokens = result.token_BW[row, : result.count_B[row]].tolist()
            live.drained += tokens
            live.num_draining -= 1
            is_done = bool(result.done_B[row])
            is_accepted = self._accepts(live, tokens, is_done)
            if is_done:
                self._roster.end(live)
            elif is_accepted and live.num_draining == 0:
                live.absorb_drained()
        self._wasted_rows += len(wasted)
        self.num_wasted_rows += len(wasted)
        return wasted

    def _accept_constrained(self, flight: Flight, result: StepResult) -> None:
        late_B = flight.plan.late_B
        assert late_B is not None
        assert result.draft_BK is not None, "a late step delivers its drafts"
        for row in late_B.nonzero()[0].tolist():
            slot = int(flight.slots[row])
            if slot == self.table.num_slots:
                continue
            live = self._roster.owner(slot)
            tokens = result.token_BW[row, : result.count_B[row]].tolist()
            if self._accepts(live, tokens, bool(result.done_B[row])):
                drafts = result.draft_BK[row].tolist()
                live.drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts

    def _accepts(self, live: LiveRequest, tokens: list[int], is_done: bool) -> bool:
        """Tell a request's constraint what was committed. Its failure ends that request only,
        and does not matter when the request is over anyway."""
        if live.constraint is not None and tokens:
            try:
                live.constraint.accept(tokens)
            except Exception as error:
                if not is_done:
                    self._fail(live, error)
                return False
        return True

    def late_masks(self, plan: StepPlan) -> LateMasks:
        """Masks of a late plan; every earlier result has been committed."""
        assert self.table.in_flight[0].plan is plan, "masks before the previous commit"
        masks, failed = late_masks(plan, self._roster.requests, self.info.vocab_size)
        for live, error in failed:
            self._fail(live, error)
        return masks

    def _fail(self, live: LiveRequest, error: Exception) -> None:
        logger.warning("the constraint of request %d failed", live.uid, exc_info=error)
        self._roster.end(live)
        reason = f"the constraint of the request failed: {type(error).__name__}: {error}"
        self._roster.events.ended.append(Ended(live.uid, Done.ERROR, reason))

    # ---- what others may know

    @property
    def max_len(self) -> int:
        """The longest sequence, prompt and output, that can run here."""
        return self._pages.max_len

    @property
    def num_unfinished(self) -> int:
        return len(self._roster.requests)

    @property
    def num_running(self) -> int:
        return self._roster.num_running

    @property
    def num_preemptions(self) -> int:
        return self._roster.num_preemptions

    @property
    def num_waiting(self) -> int:
        return self._roster.waiting.count

    @property
    def kv_usage(self) -> float:
        return self._pages.pool.usage

    @property
    def has_events(self) -> bool:
        return bool(self._roster.events)

    def take_events(self) -> Events:
        events, self._roster.events = self._roster.events, Events()
        return events

    def take_wasted_rows(self) -> int:
        count, self._wasted_rows = self._wasted_rows, 0
        return count

    def stats(self) -> dict[str, float]:
        cache = self._pages.cache
        return {
            "num_running": self.num_running,
            "num_waiting": self.num_waiting,
            "kv_usage": self.kv_usage,
            "num_steps": self.num_steps,
            "num_preemptions": self.num_preemptions,
            "num_wasted_rows": self.num_wasted_rows,
            "prefix_cache_queried_tokens": cache.num_queried_tokens,
            "prefix_cache_hit_tokens": cache.num_hit_tokens,
        }

    def pages_of(self, uid: int) -> list[int]:
        """For tests: the pages that a request holds, in order."""
        return list(self._roster.requests[uid].pages)

    def check(self) -> None:
        """For tests: everything the host keeps agrees with itself."""
        self._roster.check()


def _extended(values: Any, more: list[int]) -> Any:
    return np.concatenate([values, np.array(more, values.dtype)])
