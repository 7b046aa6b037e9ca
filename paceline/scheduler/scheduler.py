"""Policy: who gets a slot, which rows a step holds, who gives way. Plans out, results in.

Never sees a device or text; never reads a token of a step in flight, only bounds.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from paceline.config import EngineConfig
from paceline.errors import ConfigError, InvalidRequest, PromptTooLong
from paceline.request import Done, EngineRequest
from paceline.scheduler.adaptive import DraftLengths
from paceline.scheduler.commit import late_masks, trim_prompt_logprobs, without_rows
from paceline.scheduler.events import Emitted, Ended, Events, TokenConstraint
from paceline.scheduler.inflight import Flight, Rows, SlotTable
from paceline.scheduler.live import LiveRequest, WaitingQueue
from paceline.scheduler.sequence_pages import SequencePages
from paceline.step import (
    Bools,
    Ints,
    LateMasks,
    RunnerInfo,
    SlotInit,
    StepPlan,
    StepResult,
)


class Scheduler:
    """Continuous batching with run-ahead: plan() may be called before earlier commits.

    Every plan must be launched, and results come back to commit() in the same order.
    """

    def __init__(self, config: EngineConfig, info: RunnerInfo) -> None:
        self.info = info
        self.budget = config.scheduler.max_num_batched_tokens
        if self.budget < info.num_slots * (info.max_k + 1):
            raise ConfigError(
                f"max_num_batched_tokens {self.budget} cannot hold {info.num_slots} rows of "
                f"{info.max_k + 1} tokens; raise it or lower --max-num-seqs."
            )
        self._is_priority = config.scheduler.scheduling_policy == "priority"
        self.table = SlotTable(info)
        self._pages = SequencePages(config, info, self.table)
        self._draft_lengths = DraftLengths(info, config.speculative)
        self._requests: dict[int, LiveRequest] = {}
        self._by_slot: list[LiveRequest | None] = [None] * info.num_slots
        self._free_slots = list(range(info.num_slots - 1, -1, -1))
        self._waiting = WaitingQueue(self._waiting_request)
        self._prefilling: dict[int, LiveRequest] = {}  # by uid
        self._events = Events()
        # (uid, pool releases) of a head that found no room: no need to look again before a release
        self._blocked_at: tuple[int, int] | None = None
        self._num_constrained = 0  # running ones
        self._wasted_rows = 0
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_wasted_rows = 0

    # ---- requests

    def add(self, request: EngineRequest, constraint: TokenConstraint | None = None) -> None:
        """Queue a request; raises InvalidRequest when it could never run."""
        assert request.uid not in self._requests, f"request {request.uid} was added twice"
        tokens: Ints = np.array(request.prompt_token_ids, np.int32)
        self._check_length(len(tokens))
        max_tokens = request.params.max_tokens
        limit = self._pages.max_len
        max_len = limit if max_tokens is None else min(len(tokens) + max_tokens, limit)
        key = (request.priority if self._is_priority else 0, request.uid)
        live = LiveRequest(request, key, tokens, len(tokens), max_len, constraint)
        self._requests[request.uid] = live
        self._waiting.push(live)

    def _check_length(self, length: int) -> None:
        if length == 0:
            raise InvalidRequest("the prompt is empty; give at least one token.", param="prompt")
        if length >= self.info.max_model_len:
            raise PromptTooLong(
                f"prompt has {length} tokens; this model serves {self.info.max_model_len} with at "
                "least one for the output. Shorten it or raise --max-model-len.",
                param="prompt",
            )
        if length >= self._pages.max_len:
            raise PromptTooLong(
                f"prompt has {length} tokens; the KV cache of {self.info.num_pages} pages of "
                f"{self.info.page_size} holds one request of {self._pages.max_len} with at least "
                "one for the output. Shorten it or raise --kv-cache-memory-bytes.",
                param="prompt",
            )

    def refuse(self, uid: int, reason: str, error: str) -> None:
        """Report a request that add() raised for."""
        self._events.ended.append(Ended(uid, Done.ERROR, reason, error))

    def abort(self, uid: int) -> None:
        """End a request now. Rows in flight are dropped when they come."""
        live = self._requests.get(uid)
        if live is not None:
            self._end(live)
            self._events.ended.append(Ended(uid, Done.ABORT))

    def end_all(self, done: Done, reason: str) -> None:
        """The device failed: nothing in flight will come back."""
        self.table.in_flight.clear()
        for live in list(self._requests.values()):
            self._end(live)
            self._events.ended.append(Ended(live.uid, done, reason))

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> None:
        """Forget all cached prefixes. Running requests finish on their own pages, or are all
        computed again from their tokens."""
        self._pages.cache.reset()
        for live in self._running():
            self._pages.stop_registering(live)
            if preempt_running:
                self._preempt(live)

    def _waiting_request(self, uid: int) -> LiveRequest | None:
        live = self._requests.get(uid)
        return live if live is not None and live.slot < 0 else None

    def _running(self) -> list[LiveRequest]:
        return [live for live in self._by_slot if live is not None]

    # ---- plan

    def plan(self) -> StepPlan | None:
        """The next step, or None when no row can run before another result is committed."""
        table = self.table
        left_S = table.last_S - table.lower_S
        ready_S = left_S >= 0
        # Drafts past the limit could never be emitted, whatever the true length is.
        k_S = np.minimum(self._draft_lengths.wanted(self.num_steps + 1), left_S)
        bound_S = table.upper_S + k_S
        short = (bound_S > table.page_room_S).nonzero()[0]
        num_before = self.num_preemptions
        if len(short):
            self._grow(short[ready_S[short]], bound_S)
        if self._is_priority:
            self._make_room_for_head()
        if self.num_preemptions != num_before:
            ready_S &= table.last_S >= 0
        width_S = (k_S + 1) * ready_S
        chunks: list[tuple[LiveRequest, int]] = []
        admissions: list[SlotInit] = []
        if self._waiting.count or self._prefilling:
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

    def _grow(self, slots: Rows, bound_S: Ints) -> None:
        """Pages for rows that cross into new ones; the last in order give way if they must."""
        pages = self._pages
        wanted = [
            (self._owner(slot), length)
            for slot, length in zip(slots.tolist(), bound_S[slots].tolist(), strict=True)
        ]
        num_ahead = pages.num_ahead(self.num_running)
        if num_ahead == 1:
            missing = sum(pages.num_missing(live, length) for live, length in wanted)
            if missing > pages.pool.num_available:
                wanted.sort(key=lambda pair: pair[0].key)
        for live, length in wanted:
            while live.slot >= 0 and not pages.grow(live, length, num_ahead):
                self._preempt(max(self._running(), key=lambda other: other.key))

    def _make_room_for_head(self) -> None:
        """Priority order: a waiting request may push out running ones of lower priority."""
        head = self._waiting.head()
        if head is None or head.num_draining:
            return
        running = self._running()
        victims = [live for live in running if live.key[0] > head.key[0]]
        if not victims or self._room_for(head) is not None:
            return
        pool = self._pages.pool
        gain = sum(pool.num_refs(page) == 1 for live in victims for page in live.pages)
        headroom = len(running) - len(victims) - gain
        if not self._pages.fits(head, self._pages.find_hit(head), headroom):
            return  # not even without all of them
        victims.sort(key=lambda live: live.key)
        while victims and self._room_for(head) is None:
            self._preempt(victims.pop())

    def _room_for(self, head: LiveRequest) -> list[int] | None:
        """The head's cached pages when it can be admitted now, else None.

        Each running request keeps a page to grow into, so that an admission does not cause a
        preemption soon after.
        """
        if not self._free_slots or head.num_draining:
            return None
        state = (head.uid, self._pages.pool.num_releases)
        if state == self._blocked_at:
            return None
        hit = self._pages.find_hit(head)
        headroom = self.info.num_slots - len(self._free_slots)
        if self._pages.fits(head, hit, headroom):
            return hit
        self._blocked_at = state
        return None

    def _prefill(self, budget: int) -> tuple[list[tuple[LiveRequest, int]], list[SlotInit]]:
        """(request, chunk length) by order, of prompts under way and of admitted requests."""
        chunks: list[tuple[LiveRequest, int]] = []
        admissions: list[SlotInit] = []
        started = sorted(self._prefilling.values(), key=lambda live: live.key, reverse=True)
        while budget > 0:
            head = self._waiting.head() if self._waiting.count else None
            hit = self._room_for(head) if head is not None else None
            if started and (head is None or hit is None or started[-1].key < head.key):
                live = started.pop()
            elif head is not None and hit is not None:
                live = head
                admissions.append(self._admit(live, hit))
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

    def _admit(self, live: LiveRequest, hit: list[int]) -> SlotInit:
        self._waiting.pop()
        live.slot = slot = self._free_slots.pop()
        self._by_slot[slot] = live
        self._prefilling[live.uid] = live
        self.table.occupy(slot, live.uid, live.tokens)
        self._draft_lengths.start(slot, live.request.params.num_speculative_tokens)
        self._num_constrained += live.constraint is not None
        self._pages.admit(live, hit)
        self._events.admitted.append((live.uid, live.num_launched))
        return SlotInit(
            slot=slot,
            request=live.request,
            tokens=live.tokens,
            prompt_len=live.prompt_len,
            num_cached=live.num_launched,
            max_len=live.max_len,
            pages=self._pages.table_of(live),
        )

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
                    del self._prefilling[live.uid]
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
        if self._num_constrained:
            plan.late_B = self._late_rows(slots, samples_B)
        return Flight(plan, slots, samples_S, width_S)

    def _late_rows(self, slots: Rows, samples_B: Bools) -> Bools | None:
        late_B = np.array([self._owner(slot).constraint is not None for slot in slots.tolist()])
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
            result.prompt_logprobs = trim_prompt_logprobs(plan, result, self._requests)
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
        self._draft_lengths.learn(flight.slots, result)
        if plan.late_B is not None:
            self._accept_constrained(flight, result)
        if np.count_nonzero(result.done_B):
            for slot in flight.slots[result.done_B.nonzero()[0]].tolist():
                if slot != table.num_slots:
                    self._end(self._owner(slot))
        return emitted

    def _settle_strays(self, flight: Flight, result: StepResult) -> list[int]:
        """Rows of requests that left their slots: output of preempted ones is kept, the rest is
        wasted. Returns the rows that nobody waits for."""
        wasted = []
        for row in flight.strays:
            live = self._requests.get(int(flight.plan.uid_B[row]))
            if live is None:
                wasted.append(row)
                continue
            assert live.num_draining > 0, f"request {live.uid} runs again and was not drained"
            tokens = result.token_BW[row, : result.count_B[row]].tolist()
            live.drained += tokens
            live.num_draining -= 1
            if live.constraint is not None and tokens:
                live.constraint.accept(tokens)
            if result.done_B[row]:
                self._end(live)
            elif live.num_draining == 0:
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
            live = self._owner(slot)
            assert live.constraint is not None
            live.constraint.accept(result.token_BW[row, : result.count_B[row]].tolist())
            drafts = result.draft_BK[row].tolist()
            live.drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts

    def late_masks(self, plan: StepPlan) -> LateMasks:
        """Masks of a late plan; every earlier result has been committed."""
        assert self.table.in_flight[0].plan is plan, "masks before the previous commit"
        return late_masks(plan, self._requests, self.info.vocab_size)

    # ---- leaving a slot

    def _owner(self, slot: int) -> LiveRequest:
        live = self._by_slot[slot]
        assert live is not None, f"slot {slot} is free"
        return live

    def _preempt(self, live: LiveRequest) -> None:
        """Give slot and pages back now; compute again from the tokens later."""
        live.tokens, live.num_draining = self.table.committed_tokens(live.slot), self._leave(live)
        self.num_preemptions += 1
        self._events.preempted.append(live.uid)
        self._waiting.push(live)

    def _end(self, live: LiveRequest) -> None:
        del self._requests[live.uid]
        if live.slot >= 0:
            self._leave(live)
        else:
            self._waiting.left()

    def _leave(self, live: LiveRequest) -> int:
        """Slot and pages are free for the next plan. Returns the rows still in flight."""
        self._pages.release(live)
        num_in_flight = self.table.vacate(live.slot)
        self._by_slot[live.slot] = None
        self._free_slots.append(live.slot)
        self._prefilling.pop(live.uid, None)
        self._num_constrained -= live.constraint is not None
        live.drafts = []
        live.slot = -1
        return num_in_flight

    # ---- what others may know

    @property
    def max_len(self) -> int:
        """The longest sequence, prompt and output, that can run here."""
        return self._pages.max_len

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def num_running(self) -> int:
        return self.info.num_slots - len(self._free_slots)

    @property
    def num_waiting(self) -> int:
        return self._waiting.count

    @property
    def kv_usage(self) -> float:
        return self._pages.pool.usage

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> Events:
        events, self._events = self._events, Events()
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

    def check(self) -> None:
        """For tests: slots, pages, counts and queues agree with each other."""
        running = self._running()
        assert sorted(self._free_slots + [live.slot for live in running]) == list(
            range(self.info.num_slots)
        )
        for live in running:
            assert self._by_slot[live.slot] is live
            assert self._requests[live.uid] is live
            assert self.table.uid_S[live.slot] == live.uid
        assert self._waiting.count == sum(live.slot < 0 for live in self._requests.values())
        assert self._num_constrained == sum(live.constraint is not None for live in running)
        owners = Counter(page for live in running for page in live.pages)
        pool = self._pages.pool
        assert all(pool.num_refs(page) == owners[page] for page in range(pool.num_pages))
        pool.check()


def _extended(values: Any, more: list[int]) -> Any:
    return np.concatenate([values, np.array(more, values.dtype)])
