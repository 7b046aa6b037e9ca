"""Prefix hits of recurrent models: every request starts from the state of its own tokens."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from unittest import mock

import pytest

from paceline.request import EngineRequest
from paceline.scheduler import marks
from tests.engine.harness import Harness
from tests.engine.test_engine_loop_fuzz import Traffic, random_info
from tests.fake_recurrent import RecurrentFeatureRunner, RecurrentRunner
from tests.tiers import first_or_more


@dataclass
class Turns(Traffic):
    """Also sends what earlier requests came to, with a few tokens more."""

    def request(self) -> EngineRequest:
        rng, harness = self.rng, self.harness
        fresh = super().request()
        ended = [uid for uid, stream in harness.front.streams.items() if stream.done]
        if not ended or rng.random() < 0.4:
            return fresh
        uid = rng.choice(ended[-4:])
        turns = [*harness.requests[uid].prompt_token_ids, *harness.front.streams[uid].tokens]
        turns = turns[: rng.choice([len(turns), len(turns), rng.randint(1, len(turns))])]
        turns += [rng.randrange(harness.info.vocab_size) for _ in range(rng.randint(0, 3))]
        turns = turns[: harness.engine.scheduler.max_len - 1]
        return replace(fresh, prompt_token_ids=turns)


def random_harness(rng: random.Random, *, depth: int, max_k: int, lazy: bool) -> Harness:
    info = replace(
        random_info(rng, max_k),
        is_recurrent=True,
        num_snapshots=rng.choice([0, 1, 2, 3, 5, 9, 20, 60]),
    )
    kind = RecurrentFeatureRunner if info.draft_reads_features else RecurrentRunner
    runner = kind(
        info,
        seed=rng.randrange(1 << 30),
        acceptance=rng.choice([0.0, 0.3, 0.7, 1.0]),
        no_draft=rng.choice([0.0, 0.2, 1.0]),
        is_lazy=lazy,
    )
    runner.keeps_plans = False
    with mock.patch.object(marks, "TAIL", rng.choice([1, 8, 64])):
        return Harness(
            info,
            depth=depth,
            runner=runner,
            adaptive=rng.random() < 0.5,
            scheduling_policy=rng.choice(["fcfs", "priority"]),
            enable_prefix_caching=rng.random() < 0.9,
            max_num_batched_tokens=max(info.num_slots * (max_k + 1), rng.choice([5, 9, 17, 64])),
            block_size=info.page_size,
            state_snapshot_interval=info.page_size * rng.choice([1, 1, 2, 3, 8]),
        )


def run_seed(seed: int, *, depth: int, max_k: int, lazy: bool = False) -> Counter[str]:
    rng = random.Random(f"recurrent/{seed}/{depth}/{max_k}")
    harness = random_harness(rng, depth=depth, max_k=max_k, lazy=lazy)
    traffic = Turns(rng, harness)
    for _ in range(rng.randint(3, 60)):
        traffic.act()
        if rng.random() < 0.8:
            harness.turn()
    harness.run()
    harness.check_outputs()
    runner = harness.runner
    assert isinstance(runner, RecurrentRunner)
    stats = harness.engine.scheduler.snapshots
    assert stats.num_hits == runner.num_hits
    return Counter(
        hits=runner.num_hits,
        saved=runner.num_saved,
        saved_by_decoding=runner.num_saved_by_decoding,
        state_misses=stats.num_misses,
        evictions=stats.num_evictions,
        preemptions=harness.num_preemptions,
        left_out=runner.num_left_out,
    )


@pytest.mark.trap("A4")
@pytest.mark.parametrize(
    ("depth", "max_k"),
    first_or_more(product(range(4), (0, 1, 2, 3, 5, 7)), lambda pair: pair[1] % 4 == pair[0]),
)
def test_every_hit_has_the_state_of_exactly_its_tokens(depth: int, max_k: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):  # 4 x 6 x 40 = 960 engines
        seen += run_seed(seed, depth=depth, max_k=max_k)
    assert all(seen[name] > 20 for name in ("hits", "saved_by_decoding", "state_misses"))
    assert seen["evictions"] > 20
    assert seen["preemptions"] > 5


@pytest.mark.parametrize("depth", first_or_more(range(1, 4), lambda depth: depth == 2))
def test_no_hit_continues_from_a_step_that_was_left_out(depth: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(120):
        seen += run_seed(seed, depth=depth, max_k=3, lazy=True)
    assert seen["left_out"] > 20
    assert seen["hits"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("block", range(16))
def test_much_more_random_traffic(block: int) -> None:
    rng = random.Random(block)
    for seed in range(1000 + 500 * block, 1500 + 500 * block):
        run_seed(seed, depth=rng.randint(0, 3), max_k=rng.randint(0, 7), lazy=rng.random() < 0.2)
