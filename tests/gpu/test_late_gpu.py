"""Constrained requests on the GPU: two replays a step, the tokens of one-by-one decoding."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.scheduler.events import TokenConstraint
from tests.e2e.engines import NGRAM, draft_model, folder_for, head
from tests.e2e.ladder import PROMPTS, Workshop
from tests.e2e.loop import add_all, finish, request
from tests.e2e.test_forced import Stairs
from tests.gpu.engines import GpuEngine, gpu_engine, never_synchronising

pytestmark = pytest.mark.gpu


def specs(workshop: Workshop) -> dict[str, dict[str, Any] | None]:
    return {
        "none": None,
        "ngram": NGRAM,
        "draft_model": draft_model(workshop, 3),
        "sampled drafts": draft_model(workshop, 3, draft_sample_method="probabilistic"),
        "eagle": head(workshop, "eagle", 2),
    }


def serve(gpu: GpuEngine, first: int) -> dict[int, list[int]]:
    """Four requests, two of them under grammars; uids from `first` on."""
    requests = [request(first + i, PROMPTS[i], ignore_eos=True, max_tokens=30) for i in range(4)]
    grammars: dict[int, TokenConstraint] = {first + 1: Stairs(12), first + 2: Stairs(4)}
    add_all(gpu.engine, requests, grammars)
    finish(gpu.engine)
    for uid, grammar in grammars.items():
        assert isinstance(grammar, Stairs)
        assert grammar.seen == gpu.published[uid]
    return {i: gpu.published[first + i] for i in range(4)}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model", "sampled drafts", "eagle"])
def test_late_steps_are_replays_without_a_wait_and_give_the_tokens_of_eager_ones(
    workshop: Workshop, drafter: str, depth: int
) -> None:
    spec = specs(workshop)[drafter]
    options: dict[str, Any] = {"run_ahead": depth, "max_num_batched_tokens": 128}
    model = folder_for(workshop, spec)
    with gpu_engine(model, spec, enforce_eager=True, host_draft_tokens=0, **options) as gpu:
        plain = serve(gpu, 1)
    with gpu_engine(model, spec, **options) as gpu:
        first = serve(gpu, 1)  # meets host drafts and late rows: captured as they come
        gpu.capture_everything()
        with gpu.only_replays(at_least=20), never_synchronising():
            second = serve(gpu, 101)
    assert first == second
    if drafter != "sampled drafts":  # their tokens depend on K, not their distribution
        assert first == plain
