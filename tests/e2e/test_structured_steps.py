"""Real grammars inside real steps: drafts, depth, preemption and sampling change no token."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.engine.grammars import Grammars
from paceline.request import StructuredOutputsParams
from paceline.scheduler.events import TokenConstraint
from tests.e2e.engines import NGRAM, draft_model, eagle
from tests.e2e.ladder import PROMPTS, Workshop
from tests.e2e.loop import add_all, finish, request, tiny_engine
from tests.engine.grammar_driving import EOS, grammars_of, tiny_tokenizer
from tests.tiny import VOCAB

REGEX = r"(12|123|34)([0-9]{1,3}:)+5?"
KINDS = [
    StructuredOutputsParams(regex=REGEX),
    StructuredOutputsParams(choice=["10", "101", "110", "0"]),
    StructuredOutputsParams(regex=REGEX, after_token_ids=[5]),
    # Begins with what the regex allows too, so both remain possible for two tokens.
    StructuredOutputsParams(
        regex=REGEX, after_token_ids=[5], opening_token_ids=tiny_tokenizer().encode("12:")
    ),
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return grammars_of(tiny_tokenizer(), vocab_size=VOCAB)


def specs(workshop: Workshop) -> dict[str, Any]:
    return {
        "none": None,
        "ngram": NGRAM,
        "draft_model": draft_model(workshop, 7),
        "eagle": eagle(workshop, 3),
    }


def outputs(
    workshop: Workshop,
    grammars: Grammars,
    spec: dict[str, Any] | None,
    *,
    preempts: bool = False,
    **options: Any,
) -> dict[int, list[int]]:
    engine, runner, published = tiny_engine(workshop, spec, **options)
    per = [{}, {"temperature": 0.8}, {"temperature": 1.0, "presence_penalty": 1.0}]
    requests = [request(i, p, **per[i % 3]) for i, p in enumerate(PROMPTS[:8])]
    # The drafts per request go from 0 to what the engine has.
    limits = {1: 0, 4: 1} if spec is not None else {}
    requests = [
        request(r.uid, r.prompt_token_ids, **per[r.uid % 3], num_speculative_tokens=limits[r.uid])
        if r.uid in limits
        else r
        for r in requests
    ]
    constraints: dict[int, TokenConstraint] = {
        uid: grammars.constraint(KINDS[uid % len(KINDS)]) for uid in (0, 1, 2, 4, 5, 7)
    }
    add_all(engine, requests, constraints)
    for turn in range(60 if preempts else 0):
        engine.turn()
        if turn % 5 == 4:
            engine.reset_prefix_cache(preempt_running=True)
    finish(engine)
    runner.close()
    assert bool(engine.scheduler.num_preemptions) is preempts
    return published


@pytest.mark.trap("F4", "F5", "I26", "I27")
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "eagle"])
def test_drafts_change_no_token_under_a_grammar(
    workshop: Workshop, grammars: Grammars, drafter: str, depth: int
) -> None:
    """Rows with and without drafts, ends inside windows, and lengths that cut a structure."""
    plain = outputs(workshop, grammars, None)
    drafted = outputs(workshop, grammars, specs(workshop)[drafter], run_ahead=depth)
    assert drafted == plain
    tokenizer = tiny_tokenizer()
    ended = 0
    for uid in (0, 1, 4, 5):
        text, kind = tokenizer.decode(plain[uid]), KINDS[uid % len(KINDS)]
        if plain[uid][-1] == EOS:
            ended += 1
            assert text in kind.choice if kind.choice else re.fullmatch(REGEX, text)
    assert ended > 0


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_preemption_and_chunks_lose_nothing_of_a_grammar(
    workshop: Workshop, grammars: Grammars, drafter: str, depth: int
) -> None:
    plain = outputs(workshop, grammars, None)
    spec = specs(workshop)[drafter]
    options = {"run_ahead": depth, "max_num_batched_tokens": 20}
    assert outputs(workshop, grammars, spec, preempts=True, **options) == plain


@pytest.mark.trap("I14")
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_nothing_of_a_grammar_is_kept_after_its_request(
    workshop: Workshop, grammars: Grammars, depth: int
) -> None:
    engine, runner, published = tiny_engine(workshop, NGRAM, run_ahead=depth)
    kept = []
    for uid, kind in enumerate(KINDS):
        constraint = grammars.constraint(kind)
        kept.append(weakref.ref(constraint))
        engine.add(request(uid, PROMPTS[uid]), constraint=constraint)
        del constraint
    finish(engine)
    assert all(published[uid] for uid in range(len(KINDS)))
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(KINDS)
    runner.close()


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_samples_under_a_grammar_follow_the_masked_distribution(
    workshop: Workshop, grammars: Grammars, drafter: str
) -> None:
    """The first token of a choice: the model's distribution over what the grammar allows."""
    letters = "0123456789ABCDEF"
    tokenizer = tiny_tokenizer()
    ids = [tokenizer.encode(letter)[0] for letter in letters]
    kind = StructuredOutputsParams(choice=[letter + "!" for letter in letters])
    prompt = list(PROMPTS[0])
    count = 600
    engine, runner, published = tiny_engine(
        workshop, specs(workshop)[drafter], run_ahead=1, max_num_seqs=12
    )
    for uid in range(count):
        one = request(uid, prompt, temperature=1.0, max_tokens=2)
        engine.add(one, constraint=grammars.constraint(kind))
    finish(engine, 20_000)
    runner.close()
    model = workshop.target("llama")
    with torch.no_grad():
        logits_V = model(torch.tensor([prompt])).logits[0, -1]
    expected = torch.softmax(logits_V[ids].double(), 0).numpy() * count
    found = np.array([sum(t[0] == i for t in published.values()) for i in ids])
    assert found.sum() == count
    assert stats.chisquare(found, expected).pvalue > 1e-3
