"""Plans steps and commits their results: continuous batching with run-ahead.

Never sees a device or text. It reads no token of a step in flight, only bounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.config import EngineConfig
from paceline.errors import ConfigError, InvalidRequest, PromptTooLong
from paceline.request import Done, EngineRequest
from paceline.scheduler.allocator import Allocator
from paceline.scheduler.commit import trim_prompt_logprobs, without_rows
from paceline.scheduler.constraints import Constraints
from paceline.scheduler.events import Emitted, Ended, Events, TokenConstraint
from paceline.scheduler.inflight import Flight, Rows
from paceline.scheduler.live_request import LiveRequest
from paceline.scheduler.request_table import RequestTable
from paceline.step import Bools, Ints, LateMasks, RunnerInfo, SlotInit, StepPlan, StepResult


class Scheduler:
    """plan() may be called before the results of earlier plans are committed.

    Every plan must be launched, and results must reach commit() in the order of the plans.
    """

    def __init__(self, config: EngineConfig, info: RunnerInfo) -> None:
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
            self._requests, self._allocator, self._events, info.vocab_size
        )
        self.table = self._allocator.slots
        self._pages = self._allocator.pages
        self._draft_lengths = self._allocator.draft_lengths
        self._is_priority = config.scheduler.scheduling_policy == "priority"
        self._wasted_rows = 0  # since take_wasted_rows()
        self.num_steps = 0
        self.num_wasted_rows = 0

    # ---- requests

    def add(self, request: EngineRequest, constraint: TokenConstraint | None = None) -> None:
        """Queue a request; raises InvalidRequest if it could never run."""
        tokens: Ints = np.array(request.prompt_token_ids, np.int32)
        self._check_length(len(tokens))
        max_tokens, limit = request.params.max_tokens, self.max_len
        max_len = limit if max_tokens is None else min(len(tokens) + max_tokens, limit)
        key = (request.priority if self._is_priority else 0, request.uid)
        live = LiveRequest(request, key, tokens, len(tokens), max_len, constraint)
        self._requests.add(live)

    def _check_length(self, length: int) -> None:
        if length == 0:
            raise InvalidRequest("the prompt is empty; give at least one token.", param="prompt")
        if length >= self.info.max_model_len:
            raise PromptTooLong(
                f"prompt has {length} tokens; this model serves {self.info.max_model_len} with at "
                "least one for the output. Shorten it or raise --max-model-len.",
                param="prompt",
            )
        if length >= self.max_len:
            raise PromptTooLong(
                f"prompt has {length} tokens; the KV cache of {self.info.num_pages} pages of "
                f"{self.info.page_size} holds one request of {self.max_len} with at least "
                "one for the output. Shorten it or raise --kv-cache-memory-bytes.",
                param="prompt",
            )

    def refuse(self, uid: int, reason: str, error: str) -> None:
        """Report a request for which add() raised."""
        self._events.ended.append(Ended(uid, Done.ERROR, reason, error))

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
        k_S = np.minimum(self._draft_lengths.wanted(self.num_steps + 1), left_S)
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
        table.launch(flight)
        return flight.plan

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
                    self._pages.set_room(live)
                    k = max(k, int(wanted_S[live.slot]))
                    del self._requests.prefilling[live.uid]
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
        plan.late_B = self._constraints.late_rows(slots, samples_B)
        return Flight(plan, slots, samples_S, width_S)

    # ---- commit

    def commit(self, plan: StepPlan, result: StepResult) -> Emitted:
        """Take in the oldest result. Returns the rows whose requests have not ended."""
        table = self.table
        flight = table.in_flight[0]
        assert flight.plan is plan, "results out of order"
        assert result.step == plan.step, f"result {result.step} for plan {plan.step}"
        if result.prompt_logprobs:
            result.prompt_logprobs = trim_prompt_logprobs(plan, result, self._requests.by_uid)
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
            self._constraints.accept_late_rows(flight, result)
        if np.count_nonzero(result.done_B):
            for slot in flight.slots[result.done_B.nonzero()[0]].tolist():
                if slot != table.num_slots:
                    self._allocator.end(self._requests.owner(slot))
        if self.info.kv_window is not None:
            self._pages.free_behind_window(self._requests.running())
        return emitted

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
        assert self.table.in_flight[0].plan is plan, "masks before the previous commit"
        return self._constraints.masks(plan)

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
    def kv_usage(self) -> float:
        return self._pages.pool.usage

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> Events:
        return self._events.take()

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


def _extended(values: Any, more: list[int]) -> Any:
    return np.concatenate([values, np.array(more, values.dtype)])
