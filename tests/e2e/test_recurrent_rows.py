"""Recurrent state and the rows of a step: which rows move it, and to exactly which length.

The state of a slot is compared with the state after a prompt of the same tokens.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.engine.engine import Engine
from paceline.runner import startup
from paceline.runner.runner import StepRunner
from paceline.step import InFlightStep, StepPlan, StepResult, StepSize
from tests.e2e.engines import NGRAM
from tests.e2e.ladder import PROMPTS, Workshop
from tests.e2e.loop import finish, request, tiny_engine
from tests.e2e.test_fixed_steps import padded_on_cpu
from tests.tiny import VOCAB

K = 3
MTP = {"method": "mtp", "num_speculative_tokens": K, "adaptive": False}
WINDOWS = {**NGRAM, "num_speculative_tokens": K, "adaptive": False}


@dataclass
class Observed:
    """An engine that runs step by step, with its plans, results and device state."""

    engine: Engine
    runner: StepRunner
    published: dict[int, list[int]]
    plans: list[StepPlan] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        launch, wait = self.runner.launch, self.runner.wait

        def launch_and_note(plan: StepPlan) -> InFlightStep:
            self.plans.append(plan)
            return launch(plan)

        def wait_and_note(step: Any) -> StepResult:
            self.results.append(wait(step))
            return self.results[-1]

        self.runner.launch = launch_and_note  # type: ignore[method-assign]
        self.runner.wait = wait_and_note  # type: ignore[method-assign]

    def run(self, uid: int, prompt: list[int], **params: Any) -> list[int]:
        self.engine.add(request(uid, prompt, **params))
        finish(self.engine)
        return self.published[uid]

    def state(self, slot: int) -> tuple[int, Tensor]:
        """How many positions it covers, and all layers of it."""
        device = self.runner._device
        assert device.recurrent is not None
        length = int(device.slots.state_len_S[slot])
        return length, device.recurrent.state_LSNVK[:, slot].clone()

    def tensors(self) -> list[Tensor]:
        """Everything recurrent of real slots, and all snapshots."""
        device = self.runner._device
        assert device.recurrent is not None
        kept = device.recurrent
        slots = device.slots.padding_slot
        by_slot = (kept.state_LSNVK[:, :slots], kept.input_LSRP[:, :slots])
        saved = (kept.saved_state_LENVK, kept.saved_input_LEJP)
        return [x.clone() for x in (*by_slot, *saved, device.slots.state_len_S[:slots])]


Open = Callable[..., Observed]


@pytest.fixture(params=["compact", "fixed"])
def open_engine(
    request: pytest.FixtureRequest, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> Open:
    """In the CPU's own rows, and in the fixed shapes that CUDA captures."""
    if request.param == "fixed":
        monkeypatch.setattr(startup, "CpuPlatform", padded_on_cpu)

    def open_one(spec: dict[str, Any] | None, **options: Any) -> Observed:
        folder = workshop.head_folder("qwen3.5", "mtp")
        values = {"model": folder, "run_ahead": 0, **options}
        return Observed(*tiny_engine(workshop, spec, **values))

    return open_one


def assert_same_state(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.trap("I30")
def test_the_state_covers_the_accepted_tokens_and_no_others(open_engine: Open) -> None:
    """After every step of a request with drafts: no rejected draft has left a trace."""
    drafting = open_engine(MTP, enable_prefix_caching=False)
    plain = open_engine(None, enable_prefix_caching=False, max_num_seqs=1)
    prompt = PROMPTS[5]
    drafting.engine.add(request(0, prompt, max_tokens=24, ignore_eos=True))
    tokens, counts = list(prompt), set()
    for turn in itertools.count(1):
        if not drafting.engine.turn():
            break
        length, state = drafting.state(int(drafting.plans[-1].slot_B[0]))
        assert length == len(tokens), "the tokens that this step emitted are not applied yet"
        plain.run(turn, tokens, max_tokens=1)
        assert_same_state(state, plain.state(0)[1])
        count = int(drafting.results[-1].count_B[0])
        tokens += drafting.results[-1].token_BW[0, :count].tolist()
        counts.add(count)
    assert len(tokens) == len(prompt) + 24
    assert len(counts) > 2, "different numbers of drafts were accepted"


@pytest.mark.trap("A7")
def test_a_slot_whose_last_step_accepted_every_draft_starts_anew(
    open_engine: Open, workshop: Workshop
) -> None:
    """One slot: the next request must not replay what the last one accepted."""
    spec = {**MTP, "num_speculative_tokens": 1}
    drafting = open_engine(spec, max_num_seqs=1, enable_prefix_caching=False)
    expected = workshop.expected("qwen3.5")
    num_full = 0
    for uid, (index, max_tokens) in enumerate(itertools.product((2, 4, 5, 11), range(4, 17, 2))):
        found = drafting.run(uid, PROMPTS[index], max_tokens=max_tokens)
        assert found == expected[index][:max_tokens], f"request {uid}"
        num_full += int(drafting.results[-1].count_B[0]) == 2
    assert num_full >= 5


def empty_plan(step: int, agreed: StepSize) -> StepPlan:
    none_B = np.empty(0, np.int32)
    return StepPlan(
        step=step,
        k=agreed.k,
        uid_B=np.empty(0, np.int64),
        slot_B=none_B,
        query_len_B=none_B,
        k_B=none_B,
        samples_B=np.empty(0, np.bool_),
        length_bound_B=none_B,
        agreed=agreed,
    )


@pytest.mark.trap("C8")
def test_a_step_without_rows_moves_no_state(open_engine: Open, workshop: Workshop) -> None:
    """An idle replica steps along in the shape of a busy one, between two turns of a conversation
    and between two steps of a request."""
    observed = open_engine(MTP, block_size=4, state_snapshot_interval=4)
    runner = observed.runner
    shapes = [(1, K + 1), (4, K + 1), (2, 1)]
    sizes = [StepSize(rows * width, 2 * rows, rows, width - 1) for rows, width in shapes]
    sizes.append(StepSize(64, 64, 4, K, is_uniform=False))

    def idle() -> None:
        before = observed.tensors()
        for size in sizes:
            runner.wait(runner.launch(empty_plan(observed.plans[-1].step, size)))  # type: ignore[arg-type]
        for found, wanted in zip(observed.tensors(), before, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)

    expected = workshop.expected("qwen3.5")[5]
    first = observed.run(0, PROMPTS[5], max_tokens=9)
    assert first == expected[:9]
    idle()
    observed.engine.add(request(1, [*PROMPTS[5], *first], max_tokens=len(expected) - 9))
    while observed.engine.turn():
        idle()
    assert observed.engine.scheduler.snapshots.num_hits == 1
    assert observed.published[1] == expected[9:]


KINDS = ("chunk", "chunk of one", "plain", "window")


def kinds_of(plan: StepPlan) -> list[str]:
    """Rows with a K of 0, and with one; prompts of one token, and of several."""
    found = []
    prefilled = {init.slot for init in plan.admissions}
    for slot, count, k in zip(
        plan.slot_B.tolist(), plan.query_len_B.tolist(), plan.k_B.tolist(), strict=True
    ):
        if slot in prefilled or (count > 1 and count != k + 1):
            found.append("chunk of one" if count == 1 else "chunk")
        else:
            found.append("window" if k else "plain")
    return sorted(found)


@pytest.mark.trap("G4")
@pytest.mark.parametrize("spec", [MTP, WINDOWS], ids=["mtp", "ngram"])
def test_rows_of_every_kind_meet_in_threes(open_engine: Open, spec: dict[str, Any]) -> None:
    rng = random.Random(0)
    alone = open_engine(None, max_num_seqs=1, enable_prefix_caching=False)
    mixed = open_engine(spec, enable_prefix_caching=False)
    seen = set()
    uid = 0
    for mix in itertools.combinations_with_replacement(KINDS, 3):
        # Requests that decode come first; prompts join them when they do.
        for is_prompt in (False, True):
            for kind in mix:
                if kind.startswith("chunk") is is_prompt:
                    length = 1 if kind == "chunk of one" else rng.randint(2, 15)
                    prompt = [rng.randrange(3, VOCAB) for _ in range(length)]
                    mixed.engine.add(
                        request(
                            uid,
                            prompt,
                            max_tokens=8,
                            ignore_eos=True,
                            num_speculative_tokens=0 if kind == "plain" else K,
                        )
                    )
                    alone.run(uid, prompt, max_tokens=8, ignore_eos=True)
                    uid += 1
            if not mixed.engine.turn():  # no request decodes in this mix
                continue
            seen.add(tuple(kinds_of(mixed.plans[-1])))
        finish(mixed.engine)
    assert seen >= set(itertools.combinations_with_replacement(KINDS, 3))
    assert mixed.published == alone.published


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_aborts_in_flight_and_a_changing_k_change_no_token(
    open_engine: Open, workshop: Workshop, depth: int
) -> None:
    """Three slots that change their owners while steps of the former ones are still in flight."""
    rng = random.Random(depth)
    spec = {**MTP, "adaptive": True}
    engine = open_engine(spec, run_ahead=depth, max_num_seqs=3)
    expected = workshop.expected("qwen3.5")
    asked = {uid: rng.randrange(len(PROMPTS)) for uid in range(60)}
    for uid, index in asked.items():
        engine.engine.add(request(uid, PROMPTS[index], max_tokens=rng.randint(4, 20)))
        for _ in range(rng.randint(1, 3)):
            engine.engine.turn()
        if uid % 3 == 0:
            engine.engine.abort(uid - rng.randint(0, 2))
    finish(engine.engine)
    for uid, index in asked.items():
        found = engine.published.get(uid, [])
        assert found == expected[index][: len(found)], f"request {uid}"
    assert sum(map(len, engine.published.values())) > 300
    assert len({plan.k for plan in engine.plans}) > 1, "K changed"
