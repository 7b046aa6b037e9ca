"""Policy: who gets a slot, which rows a step holds, who gives way. Plans out, results in.

Never sees a device or text; never reads a token of a step in flight, only bounds.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from paceline.config import EngineConfig
from paceline.errors import ConfigError, InvalidRequest, PromptTooLong
from paceline.request import Done, EngineRequest
from paceline.scheduler.adaptive import DraftLengths
from paceline.scheduler.commit import drop_rows, late_masks, trim_prompt_logprobs
from paceline.scheduler.events import Emitted, Ended, Events, TokenConstraint
from paceline.scheduler.inflight import Rows, SlotTable
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
        self._in_flight: deque[StepPlan] = deque()
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
        self._in_flight.clear()
        for live in list(self._requests.values()):
            self._end(live)
            self._events.ended.append(Ended(live.uid, done, reason))

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> None:
        """Forget all cached prefixes. Running requests finish on their own pages, or are all
        computed again from their tokens."""
        self._pages.cache.reset()
        for live in self._running():
            if preempt_running:
                self._preempt(live)
            else:
                self._pages.stop_hashing(live)

    def _waiting_request(self, uid: int) -> LiveRequest | None:
        live = self._requests.get(uid)
        return live if live is not None and live.slot < 0 else None

    def _running(self) -> list[LiveRequest]:
        return [live for live in self._by_slot if live is not None]

    # ---- plan

    def plan(self) -> StepPlan | None:
        """The next step, or None when no row can run before another result is committed."""
        table = self.table
        slot_B = np.flatnonzero(table.is_decoding_S & (table.lower_S < table.max_len_S))
        k_B = self._draft_lengths.wanted(slot_B, self.num_steps + 1)
        # Drafts past the limit could never be emitted, whatever the true length is.
        np.minimum(k_B, table.max_len_S[slot_B] - table.lower_S[slot_B] - 1, out=k_B)
        bound_B = table.upper_S[slot_B] + k_B
        end_B = np.minimum(bound_B + self.info.draft_lookahead, table.page_need_S[slot_B])
        short = np.flatnonzero(end_B > table.page_room_S[slot_B])
        num_before = self.num_preemptions
        if len(short):
            self._grow(slot_B[short], end_B[short])
        if self._is_priority:
            self._make_room_for_head()
        if self.num_preemptions != num_before:
            stays_B = table.is_decoding_S[slot_B]
            slot_B, k_B, bound_B = slot_B[stays_B], k_B[stays_B], bound_B[stays_B]
        chunks, admissions = self._prefill(self.budget - len(slot_B) - int(k_B.sum()))
        if not len(slot_B) and not chunks:
            return None
        np.minimum(bound_B, self.info.max_model_len, out=bound_B)
        plan = self._assemble(slot_B, k_B, bound_B, chunks)
        plan.admissions = admissions
        plan.page_appends = self._pages.take_appends()
        self._in_flight.append(plan)
        return plan

    def _grow(self, slots: Rows, ends: Ints) -> None:
        """Pages for rows that cross into new ones; the last in order give way if they must."""
        lives = [self._by_slot[slot] for slot in slots.tolist()]
        wanted = [(live, end) for live, end in zip(lives, ends.tolist(), strict=True) if live]
        missing = sum(self._pages.num_missing(live, end) for live, end in wanted)
        if missing > self._pages.pool.num_available:
            wanted.sort(key=lambda pair: pair[0].key)
        for live, end in wanted:
            while live.slot >= 0 and not self._pages.grow(live, end):
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
        self.table.occupy(slot, live.uid, live.tokens, live.max_len)
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
        self, slot_B: Rows, k_B: Ints, bound_B: Ints, chunks: list[tuple[LiveRequest, int]]
    ) -> StepPlan:
        """Rows in order: those that decode or verify, then chunks. Moves the bounds."""
        table = self.table
        k = int(k_B.max()) if len(k_B) else 0
        width_B = k_B + 1
        table.launch(slot_B, width_B)
        samples_B: Bools = np.ones(len(slot_B) + len(chunks), np.bool_)
        if chunks:
            slots = np.array([live.slot for live, _ in chunks])
            lengths = np.array([length for _, length in chunks], np.int32)
            ends = np.array([live.num_launched for live, _ in chunks], np.int32)
            is_final = ends == table.committed_S[slots]
            samples_B[len(slot_B) :] = is_final
            final = slots[is_final]
            table.launch(final, 1)
            table.is_decoding_S[final] = True
            for slot in final.tolist():
                del self._prefilling[int(table.uid_S[slot])]
            if len(final):
                k = max(k, int(self._draft_lengths.wanted(final, self.num_steps + 1).max()))
            slot_B = np.concatenate([slot_B, slots])
            width_B = np.concatenate([width_B, lengths])
            k_B = np.concatenate([k_B, np.zeros(len(chunks), np.int32)])
            bound_B = np.concatenate([bound_B, ends])
        self.num_steps += 1
        late_B = self._late_rows(slot_B, samples_B) if self._num_constrained else None
        return StepPlan(
            step=self.num_steps,
            k=k,
            uid_B=table.uid_S[slot_B],
            slot_B=slot_B.astype(np.int32),
            query_len_B=width_B,
            k_B=k_B,
            samples_B=samples_B,
            length_bound_B=bound_B,
            late_B=late_B,
        )

    def _late_rows(self, slot_B: Rows, samples_B: Bools) -> Bools | None:
        lives = [self._by_slot[slot] for slot in slot_B.tolist()]
        late_B = np.array([live is not None and live.constraint is not None for live in lives])
        late_B &= samples_B
        return late_B if late_B.any() else None

    # ---- commit

    def commit(self, plan: StepPlan, result: StepResult) -> Emitted:
        """A result arrived. Returns the rows that somebody still waits for."""
        assert self._in_flight[0] is plan, "results out of order"
        assert result.step == plan.step, f"result {result.step} for plan {plan.step}"
        self._in_flight.popleft()
        if result.prompt_logprobs:
            result.prompt_logprobs = trim_prompt_logprobs(plan, result, self._requests)
        owns_B = self.table.uid_S[plan.slot_B] == plan.uid_B
        emitted_plan, emitted = plan, result
        if not owns_B.all():
            keep_B = self._settle_strays(plan, result, np.flatnonzero(~owns_B), owns_B)
            emitted_plan, emitted = drop_rows(plan, result, keep_B)
            plan, result = drop_rows(plan, result, owns_B)
        table = self.table
        table.commit(plan, result)
        self._draft_lengths.learn(plan, result)
        if plan.late_B is not None:
            self._accept_constrained(plan, result)
        full = table.committed_S[plan.slot_B] >= table.hash_at_S[plan.slot_B]
        if full.any():
            for slot in plan.slot_B[full].tolist():
                self._pages.register_committed(self._owner(slot))
        if result.done_B.any():
            for slot in plan.slot_B[result.done_B != 0].tolist():
                self._end(self._owner(slot))
        return Emitted(
            emitted.step,
            emitted_plan.uid_B,
            emitted.count_B,
            emitted.token_BW,
            emitted.done_B,
            emitted.num_drafts_B,
            emitted.num_accepted_B,
            emitted.logprobs,
            emitted.prompt_logprobs,
        )

    def _settle_strays(
        self, plan: StepPlan, result: StepResult, rows: Rows, owns_B: Bools
    ) -> Bools:
        """Rows of requests that left their slots: output of preempted ones is kept, the rest is
        wasted. Returns which rows of the step to publish."""
        keep_B = owns_B.copy()
        for row in rows.tolist():
            live = self._requests.get(int(plan.uid_B[row]))
            if live is None:
                self._wasted_rows += 1
                self.num_wasted_rows += 1
                continue
            assert live.num_draining > 0, f"request {live.uid} runs again and was not drained"
            keep_B[row] = True
            tokens = result.token_BW[row, : result.count_B[row]].tolist()
            live.drained += tokens
            live.num_draining -= 1
            if live.constraint is not None and tokens:
                live.constraint.accept(tokens)
            if result.done_B[row]:
                self._end(live)
            elif live.num_draining == 0:
                live.absorb_drained()
        return keep_B

    def _accept_constrained(self, plan: StepPlan, result: StepResult) -> None:
        assert plan.late_B is not None
        assert result.draft_BK is not None, "a late step delivers its drafts"
        for row in np.flatnonzero(plan.late_B).tolist():
            live = self._owner(int(plan.slot_B[row]))
            assert live.constraint is not None
            live.constraint.accept(result.token_BW[row, : result.count_B[row]].tolist())
            drafts = result.draft_BK[row].tolist()
            live.drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts

    def late_masks(self, plan: StepPlan) -> LateMasks:
        """Masks of a late plan; every earlier result has been committed."""
        assert self._in_flight[0] is plan, "masks before the previous commit"
        return late_masks(plan, self._requests, self.info.vocab_size)

    # ---- leaving a slot

    def _owner(self, slot: int) -> LiveRequest:
        live = self._by_slot[slot]
        assert live is not None, f"slot {slot} is free"
        return live

    def _preempt(self, live: LiveRequest) -> None:
        """Give slot and pages back now; compute again from the tokens later."""
        live.tokens = self.table.committed_tokens(live.slot)
        self._leave(live)
        live.num_draining = sum(bool((plan.uid_B == live.uid).any()) for plan in self._in_flight)
        self.num_preemptions += 1
        self._events.preempted.append(live.uid)
        self._waiting.push(live)

    def _end(self, live: LiveRequest) -> None:
        del self._requests[live.uid]
        if live.slot >= 0:
            self._leave(live)
        else:
            self._waiting.left()

    def _leave(self, live: LiveRequest) -> None:
        self._pages.release(live)
        self.table.vacate(live.slot)
        self._by_slot[live.slot] = None
        self._free_slots.append(live.slot)
        self._prefilling.pop(live.uid, None)
        self._num_constrained -= live.constraint is not None
        live.drafts = []
        live.slot = -1

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
