"""Grammars and forced tokens on several ranks: the tokens are those of one rank without drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.ladder import PROMPTS, Workshop
from tests.e2e.loop import finish, request, tiny_engine
from tests.e2e.test_forced import Stairs
from tests.parallel.layouts import LAYOUTS
from tests.parallel.ranks import run_ranks
from tests.parallel.test_phases import options
from tests.tiers import first_or_more

pytestmark = pytest.mark.usefixtures("_forks")
# Two replicas: one has no late rows, and fewer requests.
REPLICAS = [[0, 1, 3], [2, 4]]
ALL = [uid for uids in REPLICAS for uid in uids]
CASES = [
    (layout, drafter, depth, is_fixed)
    for layout in ("tp2", "dp2-ep")
    for drafter in ("none", "ngram", "eagle")
    for depth in (0, 1, 2)
    for is_fixed in (False, True)
]
FIRST = {("tp2", "eagle", 1, False), ("dp2-ep", "none", 1, True)}


@pytest.mark.parametrize(
    ("layout", "drafter", "depth", "is_fixed"), first_or_more(CASES, FIRST.__contains__)
)
def test_forced_tokens_on_ranks_are_those_of_one_rank_without_drafts(
    workshop: Workshop, tmp_path: Path, layout: str, drafter: str, depth: int, is_fixed: bool
) -> None:
    values = options(workshop, drafter, "mixtral", 2, run_ahead=depth)
    check(workshop, tmp_path, layout, values, is_fixed=is_fixed)


@pytest.mark.more
@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("layout", ["tp2", "dp2-ep"])
@pytest.mark.parametrize("drafter", ["suffix", "eagle", "draft_model"])
def test_chains_on_ranks_give_the_tokens_of_one_rank_without_drafts(
    workshop: Workshop, tmp_path: Path, layout: str, drafter: str, is_fixed: bool
) -> None:
    """Only leaders look up. The drafter's passes are as many on all ranks."""
    values = options(workshop, "none" if drafter == "suffix" else drafter, "mixtral", 2)
    spec = values["speculative_config"] or {"num_speculative_tokens": 5}
    chain = {**spec, "method": list(dict.fromkeys(["suffix", drafter])), "adaptive": True}
    chain["suffix_decoding_max_cached_requests"] = 3
    check(workshop, tmp_path, layout, values | {"speculative_config": chain}, is_fixed=is_fixed)


def check(
    workshop: Workshop, tmp_path: Path, layout: str, values: dict[str, Any], *, is_fixed: bool
) -> None:
    values |= {"enable_expert_parallel": False, **LAYOUTS[layout]}
    replicas = REPLICAS if "data_parallel_size" in LAYOUTS[layout] else [ALL]
    prompts = [[(uid, list(PROMPTS[uid])) for uid in uids] for uids in replicas]
    asked = {"options": values, "is_fixed": is_fixed, "prompts": prompts}
    (tmp_path / "plan.json").write_text(json.dumps(asked))
    found = run_ranks("tests.parallel.late_jobs:answer", 2, tmp_path)
    wanted = alone(workshop)
    seen: dict[int, list[int]] = {}
    for result in found:
        seen |= result.get("tokens", {})
    assert seen == wanted


def alone(workshop: Workshop) -> dict[int, list[int]]:
    values: dict[str, Any] = {"model": workshop.target_folder("mixtral"), "run_ahead": 0}
    engine, runner, published = tiny_engine(workshop, None, host_draft_tokens=0, **values)
    for uid in ALL:
        req = request(uid, list(PROMPTS[uid]), ignore_eos=True, max_tokens=20)
        engine.add(req, constraint=Stairs(12) if uid % 2 else None)
    finish(engine)
    runner.close()
    return published
