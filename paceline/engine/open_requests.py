"""The front's open requests: which replica runs which sequence, and what its messages mean.

Turns the rows of step messages into deltas. Never sends, never receives and calls no sink.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from paceline.engine.front import Front
from paceline.engine.messages import StepMessage
from paceline.engine.outputs import Delta, Generation, SequenceOutput
from paceline.engine.router import Router
from paceline.engine.stats import EngineStats
from paceline.errors import EngineDead, InvalidRequest, RequestFailed, error_class
from paceline.request import Done, EngineRequest
from paceline.scheduler.events import Ended, Events

Deltas = dict[Generation, list[Delta]]
# Engines that may end in a row under a sequence before they give it a token. A sequence that kills
# its engine reaches it, and must not use up all restarts.
MOST_FRUITLESS = 3
_DONE = tuple(Done)  # by code; a call of Done takes longer


class OpenRequests:
    """A sequence is open from `add` to its last delta.

    An aborted sequence is not open. It is leaving, and keeps its place in the router, until its
    replica says that it has ended. An open sequence is unplaced while no replica has it: it is new,
    or its replica has ended. `place` finds replicas for the unplaced ones.
    """

    def __init__(self, router: Router, front: Front, stats: EngineStats) -> None:
        self.router = router
        self.by_id: dict[str, Generation] = {}
        self.leaving: set[int] = set()
        self._front = front
        self._stats = stats
        self._open: dict[int, SequenceOutput] = {}
        self._unplaced: dict[int, None] = {}  # in order
        self._to_abort: dict[int, list[int]] = {}  # by replica
        self._deltas: Deltas = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_held(self) -> int:
        """Sequences that a replica has or that wait for one, with those that leave."""
        return self.router.num_held + len(self._unplaced)

    def add(self, generation: Generation, requests: Sequence[EngineRequest]) -> None:
        """Open the sequences of a request."""
        self.by_id[generation.request_id] = generation
        tokenizer, eos = self._front.tokenizer, self._front.eos_token_ids
        for index, request in enumerate(requests):
            self._open[request.uid] = SequenceOutput(generation, index, request, tokenizer, eos)
            self._unplaced[request.uid] = None
            generation.open_uids.add(request.uid)

    def place(self) -> list[tuple[int, EngineRequest]]:
        """Choose a replica for each unplaced sequence, in order. Returns what to send to which."""
        placed = []
        while self._unplaced:
            generation = self._open[next(iter(self._unplaced))].generation
            together = [uid for uid in sorted(generation.open_uids) if uid in self._unplaced]
            replica = self.router.assign(
                together, generation.prompt_token_ids, replica=generation.replica
            )
            if replica is None:
                break
            for uid in together:
                del self._unplaced[uid]
                placed.append((replica, self._open[uid].engine_request()))
        return placed

    def forget(self, generation: Generation, uids: Iterable[int]) -> None:
        """Close sequences; the request has finished if none is left."""
        for uid in list(uids):
            if uid in self._unplaced:
                del self._unplaced[uid]
            elif uid not in self.leaving:
                self.router.release(uid)
            del self._open[uid]
            generation.open_uids.discard(uid)
        if not generation.open_uids:
            generation.finished = True
            generation.metrics.finished_time = time.monotonic()
            del self.by_id[generation.request_id]

    def abort(self, request_id: str) -> None:
        """Close a request; `take_aborts` has its sequences. Unknown ids are ignored."""
        generation = self.by_id.get(request_id)
        if generation is None:
            return
        generation.is_aborted = True
        known = generation.open_uids - self._unplaced.keys()
        self.leaving |= known
        for uid in known:
            self._to_abort.setdefault(self.router.owner(uid), []).append(uid)
        self._stats.finished["abort"] += len(generation.open_uids)
        self.forget(generation, generation.open_uids)
        generation.drop_sinks()

    def take_aborts(self) -> dict[int, list[int]]:
        """Sequences that a replica must be told to abort, by replica."""
        to_abort, self._to_abort = self._to_abort, {}
        return to_abort

    def take_deltas(self) -> Deltas:
        """What the requests have gained since the last call."""
        deltas, self._deltas = self._deltas, {}
        return deltas

    # ---- what the engine says

    def take_step(self, replica: int, message: StepMessage) -> None:
        """Requests that ended because their engine failed stay open: they go on in another one, or
        the reason is known when all ranks have reported."""
        self._stats.take(message, replica)
        if message.events:
            self._take_events(replica, message.events)
        result = message.result
        uids: list[int] = result.uid_B.tolist()
        for entry in result.prompt_logprobs:
            if (output := self._open.get(uids[entry.row])) is not None:
                output.take_prompt_logprobs(entry)
        logprobs = {entry.row: entry for entry in result.logprobs}
        now = time.monotonic()
        rows = zip(
            uids,
            result.count_B.tolist(),
            result.token_BW.tolist(),
            result.done_B.tolist(),
            result.num_drafts_B.tolist(),
            result.num_accepted_B.tolist(),
            strict=True,
        )
        forced_B, num_generated = result.num_forced_B, 0
        for row, (uid, count, tokens, done, num_drafts, num_accepted) in enumerate(rows):
            output = self._open.get(uid)
            if output is None:
                continue  # the row was dropped, or its request was aborted here meanwhile
            metrics = output.generation.metrics
            metrics.num_steps += 1
            num_forced = 0
            if num_drafts:
                num_forced = 0 if forced_B is None else int(forced_B[row])
                metrics.count_drafts(num_drafts, num_accepted, num_forced)
            if not count and not done:
                continue
            if count and metrics.first_token_time is None:
                metrics.first_token_time = now
            delta = output.take(tokens[:count], _DONE[done], logprobs.get(row))
            output.name_sources(delta, num_accepted, num_forced)
            num_generated += len(delta.token_ids)
            self._add(uid, output, delta)
            if output.finished and not done:
                # A stop string ended it, which the engine does not know.
                self._to_abort.setdefault(replica, []).append(uid)
        self._stats.num_generated_tokens += num_generated
        self._stats.ranks[replica].num_generated_tokens += num_generated
        for ended in message.events.ended:
            self._let_go(ended.uid)
            if ended.error != EngineDead.__name__:
                self._end(ended)

    def lose(self, replica: int, error: EngineDead, *, retry: bool, num_slots: int) -> None:
        """A replica has ended. Its sequences are unplaced now; without `retry`, or if engines end
        under a sequence again and again, it ends with an error.

        The oldest `num_slots` may have caused it: they may have been running. A replica that died
        suddenly did not tell which ran.
        """
        for place, uid in enumerate(self.router.of(replica)):
            if uid in self.leaving:
                self._let_go(uid)
                continue
            output = self._open[uid]
            num_fruitless = output.lose_engine(may_have_run=place < num_slots)
            if retry and num_fruitless < MOST_FRUITLESS:
                self.router.release(uid)
                self._unplaced[uid] = None
                self._stats.num_resumed += 1
                continue
            output.generation.error = error
            if retry:
                output.generation.error = RequestFailed(
                    f"The engine ended {num_fruitless} times in a row before this request got its "
                    f"next token, so it is not tried again. {str(error).partition(chr(10))[0]}"
                )
            self._end(Ended(uid, Done.ERROR))
        self._unplaced = dict.fromkeys(sorted(self._unplaced))  # the oldest first
        self._to_abort.pop(replica, None)

    def end_all(self, error: EngineDead) -> None:
        """The engine has ended."""
        for uid in list(self.leaving):
            self._let_go(uid)
        for uid, output in list(self._open.items()):
            output.generation.error = error
            self._end(Ended(uid, Done.ERROR))

    def _take_events(self, replica: int, events: Events) -> None:
        for uid, num_cached in events.admitted:
            output = self._open.get(uid)
            # Only the first admission counts: a resumed request finds its own pages.
            if output is not None and not output.was_admitted:
                output.was_admitted = output.generation.was_admitted = True
                output.generation.metrics.num_cached_tokens += num_cached
                num_prompt = len(output.generation.prompt_token_ids)
                for stats in (self._stats, self._stats.ranks[replica]):
                    stats.num_cached_tokens += num_cached
                    stats.num_prompt_tokens += num_prompt
        for uid in events.preempted:
            if (output := self._open.get(uid)) is not None:
                output.generation.metrics.num_preemptions += 1

    def _end(self, ended: Ended) -> None:
        output = self._open.get(ended.uid)
        if output is None:
            return
        if ended.reason:
            kind = error_class(ended.error) or RequestFailed
            output.generation.error = error = kind(ended.reason)
            if isinstance(error, InvalidRequest):
                error.param = ended.param
        self._add(ended.uid, output, output.take([], Done(ended.done), None))

    def _add(self, uid: int, output: SequenceOutput, delta: Delta) -> None:
        generation = output.generation
        self._deltas.setdefault(generation, []).append(delta)
        if delta.finish_reason is not None:
            self._stats.finished[delta.finish_reason] += 1
            if delta.finish_reason in ("stop", "length") and uid not in self._unplaced:
                self.router.remember(uid, output.all_tokens)
            self.forget(generation, [uid])

    def _let_go(self, uid: int) -> None:
        """The engine has ended a sequence. If it was aborted here, its place is free now."""
        if uid in self.leaving:
            self.leaving.remove(uid)
            self.router.release(uid)
