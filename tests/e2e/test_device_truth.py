"""The device holds the truth: what enters the models, what a slot's new owner sees, late masks."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from paceline.layers.attention import ForwardInputs
from paceline.models.decoder import Decoder
from paceline.models.heads.eagle import EagleModel
from paceline.sampling.processors import pack_bits
from paceline.step import Ints, StepPlan, StepResult
from tests.e2e.engines import NGRAM, draft_model, eagle, run, tokens
from tests.e2e.ladder import PROMPTS, Workshop
from tests.e2e.loop import add_all, finish, request, tiny_engine
from tests.tiny import VOCAB


@dataclass
class Recorder:
    """Sees every forward of target and draft, and checks what goes in."""

    smallest: int = VOCAB
    num_forwards: int = 0
    tokens: list[tuple[Decoder | EagleModel, list[int]]] = field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for kind in (Decoder, EagleModel):
            self._watch(monkeypatch, kind)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> None:
        forward = kind.forward

        def recorded(model: Any, inputs: ForwardInputs, *rest: Any) -> torch.Tensor:
            self.num_forwards += 1
            self.smallest = min(self.smallest, int(inputs.token_T.min()))
            assert int(inputs.token_T.max()) < VOCAB
            assert int(inputs.page_slot_T.min()) >= 0
            self.tokens.append((model, inputs.token_T.tolist()))
            hidden: torch.Tensor = forward(model, inputs, *rest)
            return hidden

        monkeypatch.setattr(kind, "forward", recorded)


@pytest.mark.trap("A1", "A9", "A11")
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "eagle"])
def test_no_placeholder_ever_enters_an_embedding(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, drafter: str, depth: int
) -> None:
    """Chunks, rejected rows and accepted rows in one batch; ids and page slots stay valid."""
    recorder = Recorder()
    recorder.watch(monkeypatch)
    specs = {"ngram": NGRAM, "draft_model": draft_model(workshop), "eagle": eagle(workshop)}
    engine, runner, published = tiny_engine(workshop, specs[drafter], run_ahead=depth)
    add_all(engine, [request(i, p) for i, p in enumerate(PROMPTS)])
    finish(engine)
    runner.close()
    assert recorder.smallest >= 0
    if drafter == "eagle":
        assert any(isinstance(model, EagleModel) for model, _ in recorder.tokens)
    expected = [t[:20] for t in workshop.expected("llama")]
    assert [published[i] for i in range(len(PROMPTS))] == expected


@pytest.mark.trap("A1")
def test_a_draft_model_reads_the_last_committed_tokens_and_no_others(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's first pass ends with the token the target just committed."""
    recorder = Recorder()
    recorder.watch(monkeypatch)
    engine, runner, published = tiny_engine(workshop, draft_model(workshop, 2), run_ahead=1)
    recorder.tokens.clear()  # of the steps that warm up
    add_all(engine, [request(0, PROMPTS[2], ignore_eos=True)])
    finish(engine)
    runner.close()
    history = [*PROMPTS[2], *published[0]]
    pairs = {tuple(history[i : i + 2]) for i in range(len(history) - 1)}
    target = runner._device.model
    firsts = [t for model, t in recorder.tokens if model is not target and len(t) == 2]
    assert firsts
    assert all(tuple(t) in pairs for t in firsts)


@pytest.mark.trap("A5", "B9")
def test_a_reused_slot_shows_nothing_of_its_former_owner(workshop: Workshop) -> None:
    """Every slot is filled, finished and taken again by requests with a full prefix hit."""
    spec = draft_model(workshop, 3)
    prompts = [PROMPTS[i % 4 + 7] for i in range(16)]
    crowd = run(workshop, prompts, greedy(), spec, max_num_seqs=2, max_num_batched_tokens=32)
    alone = run(workshop, prompts[:4], greedy(), None)
    assert tokens(crowd) == tokens(alone) * 4
    assert sum(o.num_cached_tokens for o in crowd) > 0


@pytest.mark.trap("A5")
def test_admission_clears_drafts_and_codes(workshop: Workshop) -> None:
    engine, runner, _ = tiny_engine(workshop, NGRAM, max_num_seqs=1)
    slots = runner._device.slots
    add_all(engine, [request(0, PROMPTS[11])])
    finish(engine)
    slots.drafts_SK[0] = 7
    slots.drafts_onehot_S[0] = False
    slots.done_S[0] = 3
    add_all(engine, [request(1, PROMPTS[2], max_tokens=1)])
    plan = engine.scheduler.plan()
    assert plan is not None
    runner.launch(plan).wait()
    assert int(slots.num_tokens_S[0]) >= len(PROMPTS[2])
    runner.close()
    assert bool(slots.drafts_onehot_S[0])
    assert 7 not in slots.drafts_SK[0].tolist()


@pytest.mark.trap("A2", "A3")
@pytest.mark.parametrize("depth", [1, 2])
def test_random_host_delays_change_no_token(workshop: Workshop, depth: int) -> None:
    rng = random.Random(depth)

    def delay(stage: str) -> None:
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.004)

    engine, runner, published = tiny_engine(
        workshop, draft_model(workshop, 3), delay=delay, run_ahead=depth
    )
    add_all(engine, [request(i, p) for i, p in enumerate(PROMPTS)])
    finish(engine)
    runner.close()
    expected = [t[:20] for t in workshop.expected("llama")]
    assert [published[i] for i in range(len(PROMPTS))] == expected


@pytest.mark.trap("I15", "A12")
def test_results_read_late_are_not_touched_by_later_steps(workshop: Workshop) -> None:
    """Sustained traffic at depth 3: each result is snapshot when it appears and read at the end."""
    engine, runner, published = tiny_engine(workshop, draft_model(workshop, 3), run_ahead=3)
    snapshots: list[tuple[StepResult, Ints, Ints]] = []
    commit = engine.scheduler.commit

    def watched(plan: StepPlan, result: StepResult) -> Any:
        snapshots.append((result, result.token_BW.copy(), result.count_B.copy()))
        return commit(plan, result)

    engine.scheduler.commit = watched  # type: ignore[method-assign]
    waiting = [request(i, PROMPTS[i % len(PROMPTS)]) for i in range(48)]
    turns_without_step = 0
    while waiting or engine.num_unfinished:
        while waiting and engine.num_unfinished < 8:  # twice the slots
            add_all(engine, [waiting.pop(0)])
        before = len(snapshots) + len(published)
        engine.turn()
        idle = len(snapshots) + len(published) == before
        turns_without_step = turns_without_step + 1 if idle else 0
        assert turns_without_step < 8, "the step counter stands still"
    runner.close()
    for result, token_BW, count_B in snapshots:
        assert np.array_equal(result.token_BW, token_BW)
        assert np.array_equal(result.count_B, count_B)
    expected = [t[:20] for t in workshop.expected("llama")]
    assert [published[i] for i in range(48)] == expected * 4


@dataclass
class Counting:
    """A toy grammar: tokens must rise by 1, 2 or 3 (mod 60), from 10 on."""

    state: int = 10
    seen: list[int] = field(default_factory=list)

    def masks(self, draft_ids: list[int]) -> Ints:
        rows, state = [], self.state
        for draft in [*draft_ids, None]:
            rows.append(pack_bits([10 + (state - 10 + i) % 60 for i in (1, 2, 3)], VOCAB))
            state = state if draft is None else draft
        return np.stack(rows)

    def accept(self, tokens: list[int]) -> None:
        for token in tokens:
            assert (token - self.state) % 60 in (1, 2, 3), f"{token} cannot follow {self.state}"
            self.state = token
            self.seen.append(token)

    def forced(self) -> list[int]:
        return []


@pytest.mark.trap("A9", "B8")
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model", "eagle"])
def test_late_rows_obey_their_masks_and_leave_the_others_alone(
    workshop: Workshop, drafter: str, depth: int
) -> None:
    specs: dict[str, Any] = {
        "none": None,
        "ngram": NGRAM,
        "draft_model": draft_model(workshop, 3),
        "eagle": eagle(workshop, 3),
    }
    results = []
    for spec in (None, specs[drafter]):
        engine, runner, published = tiny_engine(workshop, spec, run_ahead=depth)
        requests = [request(i, p, ignore_eos=True) for i, p in enumerate(PROMPTS[:8])]
        constraints = {1: Counting(), 4: Counting()}
        add_all(engine, requests, dict(constraints.items()))
        finish(engine)
        runner.close()
        assert all(c.seen == published[uid] for uid, c in constraints.items())
        assert all(len(published[i]) == 20 for i in range(8))
        results.append(published)
    assert results[0] == results[1]


class Poison:
    """A custom processor that breaks the logits of the requests that choose it."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        pass

    def __call__(self, logits_V: torch.Tensor, slot: Any, position: int) -> torch.Tensor:
        broken = slot.extra_args.get("at", 0) <= position
        return logits_V.fill_(float("nan")) if broken else logits_V


@pytest.mark.trap("E7")
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_nan_logits_end_only_their_own_request(workshop: Workshop, drafter: str) -> None:
    name = f"{__name__}:Poison"
    healthy = [greedy() for _ in PROMPTS[:6]]
    sick = greedy().replace(logits_processors=[name], extra_args={"at": 20})
    params = [*healthy[:3], sick, *healthy[4:]]
    spec = NGRAM if drafter == "ngram" else None
    outputs = run(workshop, PROMPTS[:6], params, spec, logits_processors=[name])
    plain = run(workshop, PROMPTS[:6], healthy, None)
    assert outputs[3].outputs[0].finish_reason == "error"
    kept = [0, 1, 2, 4, 5]
    assert [tokens(outputs)[i] for i in kept] == [tokens(plain)[i] for i in kept]


def greedy() -> Any:
    from paceline import SamplingParams

    return SamplingParams(temperature=0, max_tokens=16, detokenize=False)


def _wait(event: threading.Event) -> None:
    event.wait(60)


def test_a_step_whose_requests_all_left_is_not_computed_and_the_next_is_right(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt is another one's as well, who must not find pages that were never filled."""
    prompt = [5 + i % 40 for i in range(50)]
    logits, num_sampled = Decoder.logits, 0

    def counted(model: Decoder, hidden_ND: torch.Tensor) -> torch.Tensor:
        nonlocal num_sampled
        num_sampled += 1
        return logits(model, hidden_ND)

    monkeypatch.setattr(Decoder, "logits", counted)
    found = []
    for has_left in (False, True):
        engine, runner, published = tiny_engine(workshop, run_ahead=1)
        num_before, is_free = num_sampled, threading.Event()
        if has_left:
            runner._stream._jobs.put(partial(_wait, is_free))  # type: ignore[attr-defined]
            engine.add(request(1, prompt))
            engine.turn()
            engine.let_go([1])
        engine.add(request(2, prompt))
        is_free.set()
        finish(engine)
        runner.close()
        found.append((published, num_sampled - num_before))
    assert found[0] == found[1]
