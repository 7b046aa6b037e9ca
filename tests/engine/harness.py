"""Drives an Engine over a FakeRunner and collects what it publishes, checking every message.

Never looks into the engine except through its own consistency checks and its bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.messages import StepMessage, decode
from paceline.request import Done, EngineRequest, SamplingParams
from paceline.scheduler.events import MaskFiller, TokenConstraint
from paceline.scheduler.sequence_pages import NO_PAGE
from paceline.step import Ints, RunnerInfo, StepPlan
from tests.fake_model import reference_output
from tests.fakes import FakeRunner
from tests.scheduler.consistency import check_scheduler, pages_of


def engine_config(info: RunnerInfo, *, depth: int = 0, **keywords: Any) -> EngineConfig:
    """A config that agrees with the runner's own numbers."""
    adaptive, is_auto = keywords.pop("adaptive", False), keywords.pop("is_auto", False)
    if info.max_k and "speculative_config" not in keywords:
        keywords["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": info.max_k,
            "adaptive": adaptive or is_auto,
            "is_auto": is_auto,
        }
    keywords.setdefault("max_num_batched_tokens", max(64, info.num_slots * (info.max_k + 1)))
    return EngineConfig.from_keywords(max_num_seqs=info.num_slots, run_ahead=depth, **keywords)


def request(
    uid: int,
    prompt: list[int],
    *,
    max_tokens: int | None = 8,
    eos: tuple[int, ...] = (),
    priority: int = 0,
    **params: Any,
) -> EngineRequest:
    params.setdefault("seed", 0)
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return EngineRequest(uid, prompt, sampling, eos_token_ids=eos, priority=priority)


class ModThree:
    """A toy grammar: each token is one more than the one before, modulo three."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._last = 0
        self.accepted: list[int] = []

    def masks(self, draft_ids: list[int]) -> Ints:
        rows, last = [], self._last
        for draft in [*draft_ids, 0]:
            rows.append(mod_three_mask(self._vocab, last))
            last = draft
        return np.stack(rows)

    def accept(self, tokens: list[int]) -> None:
        for token in tokens:
            assert token % 3 == (self._last + 1) % 3, "a token that the mask forbade"
            self._last = token
        self.accepted += tokens

    def forced(self) -> list[int]:
        return []


class Runs:
    """A toy grammar with forced tokens: a token that is not the last of its block of `block` ids is
    followed by the next id (modulo the vocabulary), others by any even id."""

    def __init__(self, vocab: int, block: int) -> None:
        self._vocab, self._block = vocab, block
        self._last: int | None = None
        self.accepted: list[int] = []

    def allowed(self, last: int | None) -> list[int]:
        if last is not None and last % self._block != self._block - 1:
            return [(last + 1) % self._vocab]
        return list(range(0, self._vocab, 2))

    def mask(self, last: int | None) -> Ints:
        return packed(self.allowed(last), self._vocab)

    def masks(self, draft_ids: list[int]) -> Ints:
        return np.stack([self.mask(last) for last in (self._last, *draft_ids)])

    def accept(self, tokens: list[int]) -> None:
        for token in tokens:
            assert token in self.allowed(self._last), "a token that the mask forbade"
            self._last = token
        self.accepted += tokens

    def forced(self) -> list[int]:
        run: list[int] = []
        while len(choices := self.allowed(run[-1] if run else self._last)) == 1 and len(run) < 40:
            run += choices
        return run

    def reference(self, output: list[int]) -> Ints:
        return self.mask(output[-1] if output else None)


def packed(tokens: Iterable[int], vocab: int) -> Ints:
    words = np.zeros((vocab + 31) // 32, np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def mod_three_mask(vocab: int, last: int) -> Ints:
    return packed(range((last + 1) % 3, vocab, 3), vocab)


def mod_three_reference(vocab: int) -> Callable[[list[int]], Ints]:
    return lambda output: mod_three_mask(vocab, output[-1] if output else 0)


@dataclass
class Stream:
    """What the front has seen of one request."""

    tokens: list[int] = field(default_factory=list)
    done: Done = Done.RUNNING
    num_cached: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_forced: int = 0
    logprob_ids: list[int] = field(default_factory=list)
    prompt_logprob_ids: list[int] = field(default_factory=list)
    reason: str = ""


class Front:
    """The other end of the engine's messages."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.num_messages = 0
        self.last: StepMessage | None = None
        self.num_wasted_rows = 0
        self.bubble_s = 0.0

    def receive(self, data: bytes) -> None:
        message = decode(data)
        assert isinstance(message, StepMessage)
        self.num_messages += 1
        self.last = message
        self.num_wasted_rows += message.gauges.num_wasted_rows
        self.bubble_s += sum(max(t.idle_s, 0.0) for t in message.gauges.times)
        for uid, num_cached in message.events.admitted:
            self.streams[uid].num_cached.append(num_cached)
        for uid in message.events.preempted:
            self.streams[uid].num_preemptions += 1
        for row in range(len(message.result.uid_B)):
            if message.result.uid_B[row] >= 0:
                self._receive_row(message, row)
        for entry in message.result.logprobs:
            stream = self.streams[int(message.result.uid_B[entry.row])]
            stream.logprob_ids += entry.ids[:, 0].tolist()
        for entry in message.result.prompt_logprobs:
            stream = self.streams[int(message.result.uid_B[entry.row])]
            stream.prompt_logprob_ids += entry.ids[:, 0].tolist()
        for ended in message.events.ended:
            stream = self.streams[ended.uid]
            if stream.done and ended.done == Done.ABORT:
                continue  # the answer to an abort that came too late
            assert not stream.done, f"request {ended.uid} ended twice"
            stream.done = Done(ended.done)
            stream.reason = ended.reason

    def _receive_row(self, message: StepMessage, row: int) -> None:
        stream = self.streams[int(message.result.uid_B[row])]
        count = int(message.result.count_B[row])
        tokens = message.result.token_BW[row].tolist()
        assert not stream.done, f"output after the end of request {message.result.uid_B[row]}"
        assert -1 not in tokens[:count]
        assert tokens[count:] == [-1] * (len(tokens) - count)
        assert 0 <= message.result.num_accepted_B[row] <= message.result.num_drafts_B[row]
        assert message.result.num_accepted_B[row] <= count
        stream.tokens += tokens[:count]
        stream.done = Done(int(message.result.done_B[row]))
        stream.num_steps += 1
        stream.num_drafts += int(message.result.num_drafts_B[row])
        stream.num_accepted += int(message.result.num_accepted_B[row])
        assert message.result.num_forced_B is not None
        assert message.result.num_forced_B[row] <= message.result.num_accepted_B[row]
        stream.num_forced += int(message.result.num_forced_B[row])


class Harness:
    """An engine, its fake device and its front."""

    def __init__(
        self,
        info: RunnerInfo,
        *,
        depth: int = 0,
        runner: FakeRunner | None = None,
        delay: Callable[[str], None] | None = None,
        seed: int = 0,
        filler: MaskFiller | None = None,
        **keywords: Any,
    ) -> None:
        self.info = info
        self.runner = runner or FakeRunner(info, seed=seed)
        self.front = Front()
        self.config = engine_config(info, depth=depth, **keywords)
        self.engine = Engine(
            self.runner, self.config, self.front.receive, filler=filler, delay=delay
        )
        self.requests: dict[int, EngineRequest] = {}
        self.constrained: dict[int, Callable[[list[int]], Ints]] = {}  # masks by uid
        self.max_in_flight = 0
        self._last_checked: StepPlan | None = None
        # Another one is somewhere in the middle of things when we look.
        self._checks_bounds = self.runner.runs_at_launch

    @property
    def num_in_flight(self) -> int:
        return len(self.engine.scheduler.table.in_flight)

    @property
    def num_preemptions(self) -> int:
        return self.engine.scheduler.num_preemptions

    def add(self, req: EngineRequest, constraint: TokenConstraint | None = None) -> Stream:
        self.engine.add(req, constraint=constraint)
        self.requests[req.uid] = req
        if constraint is not None:
            masks = mod_three_reference(self.info.vocab_size)
            if isinstance(constraint, Runs):
                masks = Runs.reference.__get__(constraint)
            self.constrained[req.uid] = masks
        stream = self.front.streams[req.uid] = Stream()
        return stream

    def turn(self) -> bool:
        is_busy = self.engine.turn()
        check_scheduler(self.engine.scheduler)
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        if self._checks_bounds:
            self.check_bounds()
        return is_busy

    def check_bounds(self) -> None:
        """The device ran everything launched: its truth must lie between the host's bounds."""
        table = self.engine.scheduler.table
        lower_S, upper_S = table.lower_S, table.upper_S
        plan = self.runner.last_plan
        is_new = plan is not None and plan is not self._last_checked
        appends = plan.page_appends if plan is not None and is_new else None
        self._last_checked = plan
        for index, slot in enumerate(self.runner.slots):
            if slot.init is None or table.uid_S[index] != slot.init.request.uid:
                continue
            pages = pages_of(self.engine.scheduler, slot.init.request.uid)
            num_freed = pages.count(NO_PAGE)
            assert pages[num_freed:] == [slot.table[i] for i in range(num_freed, len(pages))]
            first_seen = self.runner.first_seen(slot.num_computed)
            assert num_freed * self.info.page_size <= first_seen, "freed what is still read"
            if appends is not None:
                mine = appends.slot == index
                for at, page in zip(appends.index[mine], appends.page[mine], strict=True):
                    assert pages[at] in (page, NO_PAGE), "sent a page that is not the request's"
            assert slot.written_end <= len(pages) * self.info.page_size, "wrote foreign pages"
            committed = int(table.committed_S[index])
            assert table.tokens_SL[index, :committed].tolist() == slot.tokens[:committed]
            if not slot.done:
                assert committed <= lower_S[index] <= len(slot.tokens) <= upper_S[index]

    def run(self, max_turns: int = 5000) -> None:
        """Until the engine is idle."""
        for _ in range(max_turns):
            if not self.turn():
                self.check_idle()
                return
        raise AssertionError(f"not idle after {max_turns} turns")

    def check_idle(self) -> None:
        """Nothing leaked: every slot is free, no page has an owner, every request was answered."""
        scheduler = self.engine.scheduler
        assert scheduler.num_unfinished == scheduler.num_running == scheduler.num_waiting == 0
        assert scheduler.kv_usage == 0.0
        assert all(stream.done for stream in self.front.streams.values())

    def reference(self, uid: int) -> tuple[list[int], Done]:
        vocab = self.info.vocab_size
        masks = self.constrained.get(uid)
        return reference_output(self.requests[uid], vocab, self.engine.scheduler.max_len, masks)

    def check_outputs(self) -> None:
        """Every request that was not aborted has the tokens of a run by itself."""
        for uid, stream in self.front.streams.items():
            tokens, done = self.reference(uid)
            params = self.requests[uid].params
            prompt = list(self.requests[uid].prompt_token_ids)
            if stream.done == Done.ABORT:
                assert stream.tokens == tokens[: len(stream.tokens)]
            else:
                assert stream.tokens == tokens, f"request {uid}"
                assert stream.done == done
                assert params.prompt_logprobs is None or stream.prompt_logprob_ids == prompt[1:]
            if params.logprobs is not None:
                assert stream.logprob_ids == stream.tokens


def golden(plan: StepPlan) -> dict[str, Any]:
    """A plan as plain values, for comparing traces."""
    appends = plan.page_appends
    return {
        "step": plan.step,
        "k": plan.k,
        "uid": plan.uid_B.tolist(),
        "slot": plan.slot_B.tolist(),
        "query_len": plan.query_len_B.tolist(),
        "k_row": plan.k_B.tolist(),
        "samples": plan.samples_B.astype(int).tolist(),
        "bound": plan.length_bound_B.tolist(),
        "admissions": [
            [init.slot, init.request.uid, len(init.tokens), init.num_cached, init.pages.tolist()]
            for init in plan.admissions
        ],
        "appends": []
        if appends is None
        else np.stack([appends.slot, appends.index, appends.page], 1).tolist(),
    }
