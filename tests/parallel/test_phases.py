"""Ranks that step together do the same in the same order, with or without requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.ladder import PROMPTS, Workshop
from tests.parallel.ranks import run_ranks
from tests.tiny import greedy_reference

_JOBS = "tests.parallel.phase_jobs"
Asked = list[tuple[list[int], int, int | None]]


def options(workshop: Workshop, drafter: str, family: str, k: int, **more: Any) -> dict[str, Any]:
    model = workshop.target_folder(family)
    spec: dict[str, Any] | None = None
    if drafter != "none":
        spec = {"method": drafter, "num_speculative_tokens": k, "adaptive": False}
        if drafter == "mtp":
            model = workshop.head_folder(family, "mtp")
        elif drafter == "draft_model":
            spec["model"] = workshop.draft_folder(family)
        elif drafter == "ngram":
            spec["prompt_lookup_min"] = 1
        else:
            spec["model"] = workshop.head_folder(family, drafter)
    return {
        "model": model,
        "speculative_config": spec,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "cpu_threads": 1,
        "enable_expert_parallel": True,
        "check_collectives": True,
        **more,
    }


def run(folder: Path, asked: list[Asked], **values: Any) -> list[dict[str, Any]]:
    plan = {"options": {**values, "data_parallel_size": len(asked)}, "requests": asked}
    (folder / "plan.json").write_text(json.dumps(plan))
    return run_ranks(f"{_JOBS}:record", len(asked), folder)


@pytest.mark.trap("C1", "C2", "C6", "C7", "L-4", "L-6", "I1", "I4", "I24")
@pytest.mark.parametrize(
    ("drafter", "family", "depth"),
    [
        ("mtp", "deepseek-v3", 1),
        pytest.param("draft_model", "mixtral", 0, marks=pytest.mark.more),
        pytest.param("eagle", "mixtral", 2, marks=pytest.mark.more),
    ],
)
def test_all_ranks_run_the_same_phases_and_agree_once_per_step(
    drafter: str, family: str, depth: int, workshop: Workshop, tmp_path: Path
) -> None:
    """One replica chunks a long prompt while another decodes, one is idle, one ends exactly at
    max_model_len; drafts differ by request."""
    model = workshop.target(family)
    most = 256
    near = PROMPTS[6]  # 230 tokens: its output is cut by max_model_len
    asked: list[Asked] = [
        [(PROMPTS[5], 30, None), (PROMPTS[0], 40, 1)],
        [],
        [(near, most - len(near), None), (PROMPTS[2], 5, 0)],
    ]
    values = options(workshop, drafter, family, 3, run_ahead=depth)
    found = run(tmp_path, asked, **values)
    for replica, requests in zip(found, asked, strict=True):
        for uid, (prompt, count, _) in enumerate(requests, start=1):
            assert replica["tokens"][uid] == greedy_reference(model, prompt, count)
    assert found[0]["records"] == found[1]["records"] == found[2]["records"]
    assert found[0]["agreements"] == found[1]["agreements"] == found[2]["agreements"]
    steps = found[0]["steps"]
    assert [x["steps"] for x in found] == [steps] * 3
    for replica in found:
        # Each step has one agreement before it; a few more agreements find no work.
        numbers = replica["launched_after"]
        assert numbers == list(range(1, steps + 1))
        assert steps < len(replica["agreements"]) <= steps + depth + 3
    passes = {line.split(": ")[0].partition(", ")[2] for line in found[1]["records"]}
    if drafter != "eagle":  # a dense head has no collective
        assert passes == {"target", "draft 1", "draft 2", "draft 3"}


@pytest.mark.trap("C9", "I1")
@pytest.mark.parametrize(
    ("drafter", "family"),
    [
        pytest.param("ngram", "mixtral", marks=pytest.mark.more),
        ("draft_model", "mixtral"),
        pytest.param("eagle", "mixtral", marks=pytest.mark.more),
        pytest.param("eagle3", "qwen3-moe", marks=pytest.mark.more),
        pytest.param("mtp", "deepseek-v3", marks=pytest.mark.more),
    ],
)
def test_as_many_drafts_are_accepted_as_on_one_rank(
    drafter: str, family: str, workshop: Workshop, tmp_path: Path
) -> None:
    requests: Asked = [(p, 24, None) for p in (*PROMPTS[2:5], PROMPTS[11])]
    values = options(workshop, drafter, family, 3, run_ahead=1)
    halves: list[Asked] = [requests[::2], requests[1::2]]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    alone = run(tmp_path / "one", [requests], **{**values, "enable_expert_parallel": False})
    spread = run(tmp_path / "two", halves, **values)
    assert sum(x["accepted"] for x in spread) == alone[0]["accepted"] > 0


def test_ranks_that_have_nothing_to_do_sleep(workshop: Workshop, tmp_path: Path) -> None:
    values = options(workshop, "none", "mixtral", 0)
    plan = {"options": {**values, "data_parallel_size": 2, "check_collectives": False}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert max(run_ranks(f"{_JOBS}:idle", 2, tmp_path)) <= 0.01
