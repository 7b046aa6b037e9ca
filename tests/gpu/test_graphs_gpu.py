"""Graphs replay what eager steps compute: drafts, every batch size, any order of capture.

The ids of traps.md, group D: what other engines got wrong when they began to capture steps.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from paceline import SamplingParams
from paceline.runner.captures import Captures
from paceline.step import StepPlan, StepResult
from tests.e2e.engines import NGRAM, draft_model, folder_for, head, tokens
from tests.e2e.ladder import PROMPTS, Workshop
from tests.e2e.loop import add_all, finish, request
from tests.gpu.conftest import LongModel
from tests.gpu.engines import (
    DEVICE,
    IS_REHEARSAL,
    gpu_engine,
    never_synchronising,
    open_llm,
)
from tests.tiny import VOCAB

pytestmark = pytest.mark.gpu


def specs(workshop: Workshop, k: int, **more: Any) -> dict[str, dict[str, Any] | None]:
    return {
        "none": None,
        "ngram": {**NGRAM, "num_speculative_tokens": k},
        "draft_model": draft_model(workshop, k, **more),
        **{name: head(workshop, name, k, **more) for name in ("eagle", "eagle3", "mtp")},
    }


def generate(
    workshop: Workshop, params: SamplingParams, spec: dict[str, Any] | None, **options: Any
) -> tuple[list[list[list[int]]], Any]:
    """Tokens of every prompt, and what the engine counted."""
    prompts = [{"prompt_token_ids": list(p)} for p in PROMPTS]
    with open_llm(
        model=folder_for(workshop, spec),
        dtype="float32",
        device=DEVICE,
        skip_tokenizer_init=True,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        speculative_config=spec,
        **options,
    ) as llm:
        found = tokens(llm.generate(prompts, params, use_tqdm=False))
        return found, llm.get_metrics()


GREEDY = SamplingParams(temperature=0, max_tokens=40, detokenize=False)


@pytest.mark.trap("D1")
@pytest.mark.parametrize("drafter", ["draft_model", "eagle", "eagle3", "mtp"])
def test_sampled_drafts_are_accepted_alike_with_and_without_graphs(
    workshop: Workshop, drafter: str
) -> None:
    """Rejection reads the probabilities that the replay before it wrote."""
    spec = specs(workshop, 3, draft_sample_method="probabilistic")[drafter]
    params = SamplingParams(seed=5, max_tokens=40, ignore_eos=True, detokenize=False)
    graph, counted = generate(workshop, params, spec)
    eager, expected = generate(workshop, params, spec, enforce_eager=True)
    assert graph == eager
    assert counted.accepted_per_position == expected.accepted_per_position
    assert 0 < counted.num_accepted_tokens < counted.num_draft_tokens


@pytest.mark.trap("A8", "D2", "D11")
@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "eagle", "eagle3", "mtp"])
def test_every_draft_position_is_accepted_alike_with_and_without_graphs(
    workshop: Workshop, drafter: str
) -> None:
    """K = 4, lengths that cross page borders at every offset."""
    spec = specs(workshop, 4)[drafter]
    graph, counted = generate(workshop, GREEDY, spec, block_size=16)
    eager, expected = generate(workshop, GREEDY, spec, block_size=16, enforce_eager=True)
    assert graph == eager == [[output] for output in workshop.expected("llama")]
    assert counted.accepted_per_position == expected.accepted_per_position
    assert len(counted.accepted_per_position) >= 3


@pytest.mark.parametrize("drafter", ["ngram", "eagle"])
def test_drafts_that_are_accepted_by_a_coin_are_so_with_and_without_graphs(
    workshop: Workshop, drafter: str
) -> None:
    """Logprobs need to know what the coin will say, in graphs of their own."""
    forced = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    spec: dict[str, Any] = {**(specs(workshop, 3)[drafter] or {}), **forced}
    found = []
    for is_eager in (False, True):
        with gpu_engine(folder_for(workshop, spec), spec, enforce_eager=is_eager) as gpu:
            gpu.capture_everything()
            add_all(gpu.engine, [request(i, PROMPTS[i], logprobs=2) for i in range(len(PROMPTS))])
            finish(gpu.engine)
            found.append(gpu.published)
    assert found[0] == found[1]


@pytest.mark.trap("D3")
def test_the_order_in_which_graphs_are_captured_changes_no_token(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Captures.keys

    def backwards(captures: Captures) -> Any:
        return tuple(part[::-1] for part in keys(captures))

    spec = draft_model(workshop, 3)
    expected = {i: output[:20] for i, output in enumerate(workshop.expected("llama"))}
    for is_backwards in (False, True):
        if is_backwards:
            monkeypatch.setattr(Captures, "keys", backwards)
        with gpu_engine(workshop.target_folder("llama"), spec) as gpu:
            gpu.capture_everything()
            for uids in (range(len(PROMPTS)), reversed(range(len(PROMPTS)))):
                gpu.published.clear()
                add_all(gpu.engine, [request(uid, PROMPTS[uid]) for uid in uids])
                finish(gpu.engine)
                assert gpu.published == expected


@pytest.mark.trap("D5")
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_rows_of_every_kind_meet_in_one_step_in_any_order(
    workshop: Workshop, order: tuple[int, ...]
) -> None:
    """A verify window, an extension by two tokens (the rest of a prompt) and a long chunk.

    A prompt of 48 that finds 23 of 26 entries free beside a window of three: chunks of 23, 23, 2.
    """
    kinds = (11, 5, 6)  # repeats itself, 48 tokens, 230 tokens
    with gpu_engine(
        workshop.target_folder("llama"),
        {**NGRAM, "num_speculative_tokens": 2},
        max_num_batched_tokens=26,
        enable_prefix_caching=False,
    ) as gpu:
        widths: set[tuple[int, int]] = set()
        launch = gpu.runner.launch

        def watched(plan: StepPlan) -> Any:
            widths.update(zip(plan.query_len_B.tolist(), plan.k_B.tolist(), strict=True))
            return launch(plan)

        gpu.runner.launch = watched
        for place, kind in enumerate(order):
            add_all(gpu.engine, [request(kinds[kind], PROMPTS[kinds[kind]])])
            gpu.turn(3 + place)
        finish(gpu.engine)
    assert gpu.published == {kind: workshop.expected("llama")[kind][:20] for kind in kinds}
    assert {(3, 2), (1, 0)} & widths
    assert any(width > 16 for width, _ in widths)


@pytest.mark.trap("D8")
def test_every_batch_size_replays_a_graph_when_a_window_is_three_wide(workshop: Workshop) -> None:
    """K = 2, and sizes that no bucket has."""
    most, rng = 9, random.Random(0)
    with gpu_engine(
        workshop.target_folder("llama"), draft_model(workshop, 2), max_num_seqs=most
    ) as gpu:
        gpu.capture_everything()
        for size in range(1, most + 1):
            uids = [100 * size + i for i in range(size)]
            prompts = [[rng.randrange(3, VOCAB) for _ in range(7)] for _ in uids]
            requests = [
                request(uid, p, ignore_eos=True, max_tokens=60)
                for uid, p in zip(uids, prompts, strict=True)
            ]
            add_all(gpu.engine, requests)
            while not all(gpu.published.get(uid) for uid in uids):
                gpu.turn(1)
            with gpu.only_replays(8):
                gpu.turn(8)
            finish(gpu.engine)
            assert all(len(gpu.published[uid]) == 60 for uid in uids)


@pytest.mark.trap("D10")
@pytest.mark.parametrize("drafter", ["draft_model", "eagle", "eagle3", "mtp"])
def test_the_smallest_pool_starts_and_serves(workshop: Workshop, drafter: str) -> None:
    """One sequence of the largest length and nothing beside it; windows reach past its end."""
    limit = 256 // 16
    found, _ = generate(
        workshop, GREEDY, specs(workshop, 4)[drafter], num_gpu_blocks_override=limit, block_size=16
    )
    assert found == [[output] for output in workshop.expected("llama")]


@pytest.mark.trap("D12")
def test_results_may_be_read_in_any_order(workshop: Workshop) -> None:
    """Two steps in flight, the younger one is waited for first."""
    spec = draft_model(workshop, 3)
    with gpu_engine(workshop.target_folder("llama"), spec, run_ahead=2) as gpu:
        add_all(gpu.engine, [request(i, PROMPTS[i]) for i in range(4)])
        scheduler, seen = gpu.engine.scheduler, {i: list[int]() for i in range(4)}
        while scheduler.num_unfinished:
            plans = [plan for plan in (scheduler.plan(), scheduler.plan()) if plan is not None]
            steps = [gpu.runner.launch(plan) for plan in plans]
            results = [step.wait() for step in reversed(steps)][::-1]
            for plan, result in zip(plans, results, strict=True):
                note(seen, plan, result)
                scheduler.commit(plan, result)
        assert seen == {i: workshop.expected("llama")[i][:20] for i in range(4)}


def note(seen: dict[int, list[int]], plan: StepPlan, result: StepResult) -> None:
    assert result.step == plan.step
    for uid, count, row in zip(plan.uid_B.tolist(), result.count_B, result.token_BW, strict=True):
        assert np.all(row[count:] == -1)
        seen[uid] += row[:count].tolist()


@pytest.mark.trap("D14")
def test_steps_of_five_hundred_requests_replay_and_neither_wait_nor_allocate(
    long_model: LongModel,
) -> None:
    """What would stall one step of many. bench/mixed_tpot.py measures the stalls themselves."""
    num_requests, num_steps = (16, 20) if IS_REHEARSAL else (512, 200)
    rng = random.Random(0)
    requests = [
        request(uid, [rng.randrange(3, VOCAB) for _ in range(4)], max_tokens=600, ignore_eos=True)
        for uid in range(num_requests)
    ]
    with gpu_engine(long_model.target, max_num_seqs=512, max_num_batched_tokens=2048) as gpu:
        gpu.capture_everything()
        add_all(gpu.engine, requests)
        gpu.turn(40)
        before = num_allocations()
        with never_synchronising(), gpu.only_replays(num_steps):
            gpu.turn(num_steps)
        assert num_allocations() == before


def num_allocations() -> tuple[int, int]:
    """Calls of CUDA for pinned host memory and for device memory so far."""
    if IS_REHEARSAL:
        return 0, 0
    host, device = torch.cuda.host_memory_stats(), torch.cuda.memory_stats()
    return host["num_host_alloc"], device["num_device_alloc"]


@pytest.mark.trap("D15", "L-5")
@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "eagle", "eagle3", "mtp"])
def test_requests_with_and_without_drafts_take_turns_in_one_engine(
    workshop: Workshop, drafter: str
) -> None:
    """K goes from 0 to 4 and back: each step has the drafts that its requests want."""
    expected = {i: output[:20] for i, output in enumerate(workshop.expected("llama"))}
    spec = specs(workshop, 4)[drafter]
    with gpu_engine(folder_for(workshop, spec), spec) as gpu:
        for wanted in ([0] * 12, [4] * 12, [0, 4, 2] * 4, [0] * 12):
            gpu.published.clear()
            requests = [
                request(i, p, num_speculative_tokens=wanted[i]) for i, p in enumerate(PROMPTS)
            ]
            add_all(gpu.engine, requests)
            finish(gpu.engine)
            assert gpu.published == expected
