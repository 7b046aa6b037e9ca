"""Forced tokens and other host drafts on a real device: the tokens are those without any drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest

from paceline.engine.engine import Engine
from paceline.engine.messages import StepMessage, decode
from paceline.runner import startup
from paceline.sampling.processors import pack_bits
from paceline.scheduler.events import TokenConstraint
from paceline.step import Ints
from tests.e2e.engines import NGRAM, draft_model, eagle, head
from tests.e2e.ladder import PROMPTS, Workshop
from tests.e2e.loop import add_all, finish, request, tiny_engine
from tests.e2e.test_fixed_steps import padded_on_cpu
from tests.tiers import first_or_more
from tests.tiny import HYBRID_FAMILIES, VOCAB


@dataclass
class Stairs:
    """A toy grammar: a token of 10 ... 69 that is not the last of its `block` is followed by the
    next one, others by any token of 10 ... 69. After `length` tokens comes the end."""

    block: int = 6
    length: int | None = None
    seen: list[int] = field(default_factory=list)

    def allowed(self, seen: list[int]) -> list[int]:
        if self.length is not None and len(seen) >= self.length:
            return [2]
        if seen and (seen[-1] - 10) % self.block != self.block - 1:
            return [10 + (seen[-1] - 9) % 60]
        return list(range(10, 70))

    def masks(self, draft_ids: list[int]) -> Ints:
        prefixes = (self.seen + draft_ids[:j] for j in range(1 + len(draft_ids)))
        return np.stack([pack_bits(self.allowed(prefix), VOCAB) for prefix in prefixes])

    def accept(self, tokens: list[int]) -> None:
        for token in tokens:
            assert token in self.allowed(self.seen), f"{token} cannot follow {self.seen[-3:]}"
            self.seen.append(token)

    def forced(self) -> list[int]:
        run: list[int] = []
        while len(choices := self.allowed(self.seen + run)) == 1 and len(run) < 30:
            run += choices
        return run


Spec = dict[str, Any] | None


def spec_of(workshop: Workshop, drafter: str, k: int) -> Spec:
    if not k or drafter == "none":
        return None
    if drafter == "ngram":
        return {**NGRAM, "num_speculative_tokens": k}
    if drafter == "draft_model":
        return draft_model(workshop, k)
    return eagle(workshop, k) if drafter == "eagle" else head(workshop, drafter, k)


def answers(
    workshop: Workshop,
    spec: Spec,
    *,
    host_drafts: int = 7,
    params: dict[str, Any] | None = None,
    preempts: bool = False,
    **options: Any,
) -> tuple[dict[int, list[int]], Engine]:
    """Seven requests, four of them under grammars; two of the others have continuations."""
    engine, runner, published = tiny_engine(
        workshop, spec, host_draft_tokens=host_drafts, **options
    )
    num_forced, publish = 0, engine.publish

    def count(data: bytes) -> None:
        nonlocal num_forced
        message = decode(data)
        assert isinstance(message, StepMessage)
        assert message.result.num_forced_B is not None
        num_forced += int(message.result.num_forced_B.sum())
        publish(data)

    engine.publish = count
    values = {"max_tokens": 24, **(params or {})}
    requests = [
        request(i, p, ignore_eos=i not in (1, 4), **values) for i, p in enumerate(PROMPTS[:7])
    ]
    grammars: dict[int, TokenConstraint] = {
        1: Stairs(6, length=13),
        2: Stairs(3),
        4: Stairs(30, length=17),
        5: Stairs(12),
    }
    add_all(engine, requests, grammars)
    table, continuations = engine.scheduler.table, engine.scheduler.continuations
    for turn in range(2000):
        for slot in np.flatnonzero(np.isin(table.uid_S[:-1], (3, 6))).tolist():
            seen = published.get(int(table.uid_S[slot]), [])
            continuations.offer(slot, table.length(slot), [*seen, 7, 9, 11][-6:])
        if preempts and turn % 16 == 15:
            engine.reset_prefix_cache(preempt_running=True)
        if not engine.turn():
            break
    finish(engine)
    runner.close()
    for uid, grammar in grammars.items():
        assert isinstance(grammar, Stairs)
        assert grammar.seen == published[uid]
    assert num_forced > 9 if host_drafts else num_forced == 0
    assert published[1][-1] == published[4][-1] == 2
    return published, engine


_plain: dict[str, dict[int, list[int]]] = {}


def plain(workshop: Workshop, params: dict[str, Any] | None = None, spec: Spec = None) -> Any:
    """What each request gets one token at a time. The MTP family has its own target."""
    key = f"{params}{spec is not None}"
    if key not in _plain:
        none = None if spec is None else {**spec, "num_speculative_tokens": 1}
        _plain[key], _ = answers(workshop, none, run_ahead=0, host_drafts=0, params=params)
    return _plain[key]


@pytest.fixture(params=["compact", "padded"])
def _rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "padded":
        monkeypatch.setattr(startup, "CpuPlatform", padded_on_cpu)


DRAFTERS = ("none", "ngram", "draft_model", "eagle", "mtp")
GRID = [
    (d, k, depth)
    for d, k, depth in product(DRAFTERS, range(8), range(3))
    if (d == "none") == (not k)
]
FIRST = {("none", 0, 1), ("ngram", 3, 2), ("draft_model", 7, 1), ("eagle", 2, 1), ("mtp", 1, 0)}


@pytest.mark.trap("F4", "F5", "I26")
@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize(("drafter", "k", "depth"), first_or_more(GRID, lambda case: case in FIRST))
def test_tokens_with_host_drafts_are_those_without_any_drafts(
    workshop: Workshop, drafter: str, k: int, depth: int
) -> None:
    spec = spec_of(workshop, drafter, k)
    found, _ = answers(workshop, spec, run_ahead=depth, max_num_batched_tokens=48)
    assert found == plain(workshop, spec=spec if drafter == "mtp" else None)


SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize(
    "drafter", first_or_more(DRAFTERS[:4], lambda drafter: drafter in ("none", "eagle"))
)
def test_seeded_tokens_with_host_drafts_are_those_without_any_drafts(
    workshop: Workshop, drafter: str
) -> None:
    found, _ = answers(workshop, spec_of(workshop, drafter, 3), params=SEEDED)
    assert found == plain(workshop, SEEDED)


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("depth", first_or_more(range(3), lambda depth: depth == 1))
@pytest.mark.parametrize("host_drafts", first_or_more((1, 3, 7), lambda h: h == 3))
def test_preemption_and_chunks_change_no_token(
    workshop: Workshop, host_drafts: int, depth: int
) -> None:
    spec = spec_of(workshop, "ngram", 2)
    found, engine = answers(
        workshop,
        spec,
        host_drafts=host_drafts,
        preempts=True,
        max_num_batched_tokens=20,
        run_ahead=depth,
    )
    assert engine.scheduler.num_preemptions > 3
    assert found == plain(workshop)


@pytest.mark.usefixtures("_rows")
def test_forced_tokens_among_sampled_drafts_change_no_greedy_token(workshop: Workshop) -> None:
    """A slot's drafts are sampled in one step and forced in the next."""
    spec = draft_model(workshop, 3, draft_sample_method="probabilistic")
    assert answers(workshop, spec)[0] == plain(workshop)
    sampled, _ = answers(workshop, spec, params={"temperature": 1.0, "seed": 3})
    assert all(sampled[uid] for uid in range(7))


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("family", first_or_more(HYBRID_FAMILIES, HYBRID_FAMILIES[:1].__contains__))
def test_forced_tokens_of_models_with_recurrent_state_change_no_token(
    workshop: Workshop, family: str
) -> None:
    model = workshop.target_folder(family)
    wanted, _ = answers(workshop, None, host_drafts=0, run_ahead=0, model=model)
    assert answers(workshop, None, model=model)[0] == wanted
