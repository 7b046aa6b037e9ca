"""Prefix hits of a recurrent model on the real device step: no token may ever differ.

Conversations begin just below the end of a page, generate across it, are sent again as they are,
and grow over turns, eight at a time, while pages and snapshots are evicted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from paceline.engine.engine import Engine
from paceline.runner import startup
from paceline.runner.startup import build_runner
from paceline.scheduler.snapshots import SnapshotStats
from tests.e2e.ladder import Workshop
from tests.e2e.loop import finish, listened_to, request, tiny_engine_config
from tests.e2e.test_fixed_steps import padded_on_cpu
from tests.tiny import VOCAB

PAGE = 16
FIRST_LENGTHS = (13, 14, 15, 16, 17, 30, 31, 33, 47, 62, 63, 95)
MAX_TOKENS = 20
MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
Turn = tuple[list[int], list[int]]  # prompt and output


def open_engine(
    workshop: Workshop, spec: dict[str, Any] | None, **options: Any
) -> tuple[Engine, dict[int, list[int]], Callable[[], None]]:
    config = tiny_engine_config(
        workshop,
        spec,
        model=workshop.head_folder("qwen3.5", "mtp"),
        max_num_seqs=8,
        block_size=PAGE,
        **options,
    )
    runner = build_runner(config, lambda name, share: None)
    engine, published = listened_to(runner, config)
    return engine, published, runner.close


@pytest.fixture(scope="module")
def turns(workshop: Workshop) -> list[Turn]:
    """Three turns of every conversation, one request after the other without a cache."""
    rng = random.Random(0)
    engine, published, close = open_engine(workshop, None, enable_prefix_caching=False)
    found: list[Turn] = []
    system = [rng.randrange(3, VOCAB) for _ in range(40)]
    firsts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in FIRST_LENGTHS]
    firsts += [system + first for first in firsts[::3]]
    for prompt in firsts:
        for _ in range(3):
            engine.add(request(len(found), prompt, max_tokens=MAX_TOKENS, ignore_eos=True))
            finish(engine)
            output = published[len(found)]
            found.append((prompt, output))
            prompt = [*prompt, *output, *(rng.randrange(3, VOCAB) for _ in range(5))]
    close()
    return found


def repeat(
    workshop: Workshop, turns: list[Turn], spec: dict[str, Any] | None, count: int, seed: int
) -> SnapshotStats:
    """`count` requests, eight at a time; every one has the tokens of the run without a cache."""
    rng = random.Random(seed)
    engine, published, close = open_engine(
        workshop,
        spec,
        run_ahead=rng.randint(0, 2),
        num_gpu_blocks_override=130,
        state_snapshot_interval=rng.choice([PAGE, 4 * PAGE]),
        state_snapshot_memory_bytes=300_000,
    )
    open_requests: dict[int, list[int]] = {}
    num_sent = 0
    while num_sent < count or open_requests:
        while num_sent < count and len(open_requests) < 8:
            prompt, output = rng.choice(turns)
            asked = rng.choice([MAX_TOKENS, MAX_TOKENS, rng.randint(1, MAX_TOKENS)])
            engine.add(request(num_sent, prompt, max_tokens=asked, ignore_eos=True))
            open_requests[num_sent] = output[:asked]
            num_sent += 1
        engine.turn()
        for uid, wanted in list(open_requests.items()):
            said = published.get(uid, [])
            assert said == wanted[: len(said)], f"request {uid} got a wrong token"
            if len(said) == len(wanted):
                del open_requests[uid], published[uid]
    finish(engine)
    stats = engine.scheduler.snapshots
    close()
    return stats


@pytest.mark.trap("A4", "A7", "I30")
@pytest.mark.parametrize("layout", ["compact", "fixed"])
@pytest.mark.parametrize("spec", [None, MTP], ids=["alone", "mtp"])
def test_repeated_and_growing_prompts_never_get_a_wrong_token(
    workshop: Workshop,
    turns: list[Turn],
    spec: dict[str, Any] | None,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if layout == "fixed":
        monkeypatch.setattr(startup, "CpuPlatform", padded_on_cpu)
    stats = repeat(workshop, turns, spec, 150, seed=1)
    assert stats.num_hits > 40
    assert stats.num_evictions > 10


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        pytest.param(MTP, "compact", marks=pytest.mark.more, id="mtp-compact"),
        pytest.param(MTP, "fixed", marks=pytest.mark.slow, id="mtp-fixed"),
        pytest.param(None, "compact", marks=pytest.mark.slow, id="alone-compact"),
        pytest.param(None, "fixed", marks=pytest.mark.slow, id="alone-fixed"),
    ],
)
def test_five_thousand_repeats_give_no_wrong_token(
    workshop: Workshop,
    turns: list[Turn],
    spec: dict[str, Any] | None,
    layout: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if layout == "fixed":
        monkeypatch.setattr(startup, "CpuPlatform", padded_on_cpu)
    stats = repeat(workshop, turns, spec, 500, seed=seed)  # of each kind 10 x 500
    assert stats.num_hits > 100
