"""Suffix decoding and chains on a real device: the tokens are those without any drafts."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from paceline.engine.engine import Engine
from paceline.engine.messages import StepMessage, decode
from paceline.runner import startup
from tests.e2e.engines import NGRAM, draft_model, head
from tests.e2e.ladder import PROMPTS, Workshop
from tests.e2e.loop import add_all, finish, request, tiny_engine
from tests.e2e.test_fixed_steps import PARAMS, padded_on_cpu
from tests.e2e.test_forced import Stairs
from tests.tiers import first_or_more
from tests.tiny import HYBRID_FAMILIES

Spec = dict[str, Any] | None
SUFFIX = {"method": "suffix", "num_speculative_tokens": 7}
# The first half of the requests again: their answers are known.
ASKED = [*PROMPTS[2:7], PROMPTS[11], *PROMPTS[2:5]]


def spec_of(workshop: Workshop, drafter: str, k: int, **more: Any) -> dict[str, Any]:
    """Suffix decoding alone, or in a chain with `drafter`."""
    past = {"suffix_decoding_max_cached_requests": 4, **more}
    if drafter == "none":
        return {**SUFFIX, "num_speculative_tokens": k, **past}
    if drafter == "ngram":
        spec = {**NGRAM, "num_speculative_tokens": k}
    else:
        maker = draft_model(workshop, k) if drafter == "draft_model" else None
        spec = maker or head(workshop, drafter, k)
    return {**spec, "method": ["suffix", drafter], **past}


def answers(
    workshop: Workshop,
    spec: Spec,
    *,
    params: list[dict[str, Any]] | None = None,
    preempts: bool = False,
    with_grammars: bool = False,
    **options: Any,
) -> tuple[dict[int, list[int]], int, Engine]:
    """Tokens by request, the number of host drafts that plans had, and the engine."""
    if spec is not None and "mtp" in spec["method"]:
        options.setdefault("model", workshop.head_folder("llama", "mtp"))
    engine, runner, published = tiny_engine(workshop, spec, **options)
    num_accepted, publish, scheduler = 0, engine.publish, engine.scheduler

    def count(data: bytes) -> None:
        nonlocal num_accepted
        message = decode(data)
        assert isinstance(message, StepMessage)
        num_accepted += int(message.result.num_accepted_B.sum())
        publish(data)

    engine.publish = count
    each = params or [{}]
    requests = [
        request(i, p, ignore_eos=True, **{"max_tokens": 40, "seed": 5, **each[i % len(each)]})
        for i, p in enumerate(ASKED)
    ]
    add_all(engine, requests, {1: Stairs(6), 4: Stairs(3)} if with_grammars else {})
    for turn in range(4000):
        if preempts and turn % 16 == 15:
            engine.reset_prefix_cache(preempt_running=True)
        if not engine.turn():
            break
    finish(engine)
    runner.close()
    assert not scheduler._allocator.lookups._rows
    return published, num_accepted, engine


_plain: dict[str, dict[int, list[int]]] = {}


def plain(workshop: Workshop, *, is_mtp: bool = False, **values: Any) -> dict[int, list[int]]:
    """What each request gets one token at a time. The MTP family has its own target."""
    key = f"{is_mtp}{values}"
    if key not in _plain:
        model = {"model": workshop.head_folder("llama", "mtp")} if is_mtp else {}
        options = {"run_ahead": 0, "host_draft_tokens": 0, **model, **values}
        _plain[key], num_accepted, _ = answers(workshop, None, **options)
        assert not num_accepted
    return _plain[key]


@pytest.fixture(params=["compact", "padded"])
def _rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "padded":
        monkeypatch.setattr(startup, "CpuPlatform", padded_on_cpu)


DRAFTERS = ("none", "ngram", "draft_model", "eagle", "eagle3", "mtp")
GRID = list(product(DRAFTERS, (1, 2, 5, 9), range(4)))
FIRST = {("none", 9, 1), ("ngram", 5, 2), ("eagle", 2, 1), ("mtp", 1, 1)}


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize(("drafter", "k", "depth"), first_or_more(GRID, FIRST.__contains__))
def test_tokens_are_those_without_any_drafts(
    workshop: Workshop, drafter: str, k: int, depth: int
) -> None:
    spec = spec_of(workshop, drafter, k)
    found, num_accepted, engine = answers(
        workshop, spec, run_ahead=depth, max_num_batched_tokens=48, block_size=4
    )
    assert found == plain(workshop, is_mtp=drafter == "mtp")
    assert num_accepted > 20
    assert engine.scheduler.num_hit_tokens > 0


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("drafter", first_or_more(DRAFTERS[2:], ("eagle",).__contains__))
def test_a_chain_that_decides_by_cost_changes_no_token(workshop: Workshop, drafter: str) -> None:
    spec = spec_of(workshop, drafter, 5, adaptive=True)
    found, num_accepted, engine = answers(
        workshop, spec, max_num_batched_tokens=48, block_size=4, with_grammars=True
    )
    assert engine.scheduler._draft_lengths.is_auto
    is_mtp = drafter == "mtp"
    assert found == plain(workshop, is_mtp=is_mtp, with_grammars=True)
    assert num_accepted > 20


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("drafter", first_or_more(DRAFTERS[:5], ("none",).__contains__))
def test_seeded_requests_with_every_feature_get_the_tokens_without_any_drafts(
    workshop: Workshop, drafter: str
) -> None:
    spec = spec_of(workshop, drafter, 3)
    found, num_accepted, _ = answers(workshop, spec, params=PARAMS[2:])
    assert found == plain(workshop, params=PARAMS[2:])
    assert num_accepted > 5


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize(
    ("drafter", "depth"),
    first_or_more(product(("none", "eagle"), range(3)), (("none", 1), ("eagle", 1)).__contains__),
)
def test_preemption_and_chunks_change_no_token(
    workshop: Workshop, drafter: str, depth: int
) -> None:
    spec = spec_of(workshop, drafter, 3, adaptive=True)
    found, _, engine = answers(
        workshop, spec, preempts=True, max_num_batched_tokens=20, run_ahead=depth, block_size=4
    )
    assert engine.scheduler.num_preemptions > 3
    assert found == plain(workshop)


@pytest.mark.usefixtures("_rows")
def test_grammars_and_lookups_change_no_token(workshop: Workshop) -> None:
    found, _, _ = answers(workshop, spec_of(workshop, "none", 5), with_grammars=True)
    assert found == plain(workshop, with_grammars=True)


@pytest.mark.usefixtures("_rows")
def test_a_chain_with_sampled_drafts_changes_no_greedy_token(workshop: Workshop) -> None:
    """A slot's drafts are sampled in one step and looked up in the next."""
    spec = spec_of(workshop, "draft_model", 3, draft_sample_method="probabilistic")
    assert answers(workshop, spec)[0] == plain(workshop)
    sampled, _, _ = answers(workshop, spec, params=[{"temperature": 1.0}])
    assert all(sampled[uid] for uid in range(len(ASKED)))


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("family", first_or_more(HYBRID_FAMILIES, HYBRID_FAMILIES[:1].__contains__))
def test_lookups_for_models_with_recurrent_state_change_no_token(
    workshop: Workshop, family: str
) -> None:
    model = workshop.target_folder(family)
    wanted = plain(workshop, model=model)
    assert answers(workshop, spec_of(workshop, "none", 5), model=model)[0] == wanted


@pytest.mark.usefixtures("_rows")
def test_ngrams_are_looked_up_beside_a_head(workshop: Workshop) -> None:
    spec = {**head(workshop, "eagle", 2), "method": ["ngram", "eagle"], "prompt_lookup_min": 1}
    found, num_accepted, _ = answers(workshop, spec)
    assert found == plain(workshop)
    assert num_accepted > 20
