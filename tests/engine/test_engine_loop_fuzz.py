"""The loop, the scheduler and the pages against random traffic, by the thousand."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest

from paceline.request import Done, EngineRequest
from paceline.scheduler.events import TokenConstraint
from paceline.step import RunnerInfo
from tests.engine.harness import Harness, ModThree, Runs, request
from tests.fake_features import FeatureRunner
from tests.fakes import FakeRunner, runner_info
from tests.tiers import first_or_more

EOS = 3


@dataclass
class Traffic:
    """Random requests, aborts and cache resets from one seed."""

    rng: random.Random
    harness: Harness
    uid: int = 0
    base: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        vocab = self.harness.info.vocab_size
        self.base = [self.rng.randrange(vocab) for _ in range(self.harness.info.max_model_len)]

    def request(self) -> EngineRequest:
        """A new one, or one that was asked before: then past answers say how it goes on."""
        rng, info = self.rng, self.harness.info
        if self.harness.requests and rng.random() < 0.3:
            self.uid += 1
            return replace(rng.choice(list(self.harness.requests.values())), uid=self.uid)
        longest = self.harness.engine.scheduler.max_len - 1
        length = rng.randint(1, longest if rng.random() < 0.5 else min(longest, 12))
        shared = rng.randint(0, length)
        own = [rng.randrange(info.vocab_size) for _ in range(length - shared)]
        self.uid += 1
        max_k = self.harness.info.max_k
        return request(
            self.uid,
            self.base[:shared] + own,
            max_tokens=rng.choice([1, 2, 5, 20, None]),
            min_tokens=rng.choice([0, 0, 1]),
            eos=(EOS,) if rng.random() < 0.5 else (),
            priority=rng.randint(-1, 2),
            seed=rng.randint(0, 3),
            num_speculative_tokens=rng.choice([None, None, 0, min(1, max_k), max_k]),
            logprobs=rng.choice([None, None, 0]),
            prompt_logprobs=rng.choice([None, None, None, 0]),
        )

    def propose(self) -> None:
        """The host guesses how free requests go on: rightly, wrongly or in part."""
        rng, harness = self.rng, self.harness
        scheduler = harness.engine.scheduler
        table, continuations = scheduler.table, scheduler.continuations
        for slot, uid in enumerate(table.uid_S[:-1].tolist()):
            if uid in harness.requests and uid not in harness.constrained and rng.random() < 0.5:
                known = table.length(slot) - len(harness.requests[uid].prompt_token_ids)
                right = harness.reference(uid)[0][known : known + rng.randint(0, 12)]
                wrong = [rng.randrange(harness.info.vocab_size) for _ in range(rng.randint(0, 3))]
                continuations.offer(slot, table.length(slot), right + wrong)

    def act(self) -> None:
        rng, harness = self.rng, self.harness
        if rng.random() < 0.4:
            req = self.request()
            is_constrained = rng.random() < 0.15 and not req.eos_token_ids
            vocab = harness.info.vocab_size
            grammars: list[TokenConstraint] = [ModThree(vocab), Runs(vocab, 4), Runs(vocab, 12)]
            grammar = rng.choice(grammars)
            harness.add(req, grammar if is_constrained else None)
            if harness.info.max_host_drafts:
                self.propose()
        if rng.random() < 0.06 and harness.requests:
            harness.engine.abort(rng.choice(list(harness.requests)))
        if rng.random() < 0.03:  # all requests are aborted
            harness.engine.let_go(harness.requests)
        if rng.random() < 0.03:
            harness.engine.reset_prefix_cache(preempt_running=rng.random() < 0.5)


def random_info(rng: random.Random, max_k: int) -> RunnerInfo:
    while True:
        reads_features = max_k > 0 and rng.random() < 0.5
        info = runner_info(
            num_pages=rng.choice([10, 14, 20, 40, 64]),
            num_slots=rng.randint(1, 6),
            max_k=max_k,
            draft_lookahead=max_k - 1 if reads_features else rng.choice([0, max_k]),
            draft_reads_features=reads_features,
            page_size=rng.choice([1, 2, 4, 8]),
            max_model_len=rng.choice([24, 40, 96]),
            vocab_size=rng.choice([33, 64]),
            kv_window=rng.choice([None, None, 1, 5, 16]),
            max_host_drafts=rng.choice([0, 1, 3, 7]),
        )
        if info.num_pages * info.page_size > 2 * max_k + 8:
            return info


def random_harness(
    rng: random.Random, *, depth: int, max_k: int, threaded: bool, lazy: bool
) -> Harness:
    info = random_info(rng, max_k)

    def sleep(*_: str) -> None:
        if rng_delay.random() < 0.3:
            time.sleep(rng_delay.random() * 0.0005)

    rng_delay = random.Random(rng.random())
    kind = FeatureRunner if info.draft_reads_features else FakeRunner
    runner = kind(
        info,
        seed=rng.randrange(1 << 30),
        acceptance=rng.choice([0.0, 0.3, 0.7, 1.0]),
        no_draft=rng.choice([0.0, 0.2, 1.0]),
        delay=sleep if threaded else None,
        is_lazy=lazy,
    )
    runner.keeps_plans = False
    return Harness(
        info,
        depth=depth,
        runner=runner,
        delay=sleep if threaded else None,
        adaptive=rng.random() < 0.5,
        **lookups(rng, info),
        is_auto=rng.random() < 0.3,
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        enable_prefix_caching=rng.random() < 0.7,
        max_num_batched_tokens=max(info.num_slots * (max_k + 1), rng.choice([5, 9, 17, 64])),
    )


def lookups(rng: random.Random, info: RunnerInfo) -> dict[str, Any]:
    """Suffix decoding or a chain in a third of the engines that can have it."""
    if not info.max_host_drafts or rng.random() < 0.66:
        return {}
    spec = {
        "method": ["suffix", "ngram"] if info.max_k else "suffix",
        "num_speculative_tokens": info.max_k or info.max_host_drafts,
        "suffix_decoding_max_cached_requests": rng.choice([0, 1, 20]),
        "suffix_decoding_max_tree_depth": rng.choice([2, 4, 24]),
        "suffix_decoding_max_spec_factor": rng.choice([0.5, 1.0, 8.0]),
        "adaptive": rng.random() < 0.5,
    }
    return {"speculative_config": spec}


def run_seed(
    seed: int, *, depth: int, max_k: int, threaded: bool = False, lazy: bool = False
) -> Harness:
    rng = random.Random(f"{seed}/{depth}/{max_k}")
    harness = random_harness(rng, depth=depth, max_k=max_k, threaded=threaded, lazy=lazy)
    traffic = Traffic(rng, harness)
    for _ in range(rng.randint(3, 30)):
        traffic.act()
        if rng.random() < 0.8:
            harness.turn()
    harness.run()
    harness.check_outputs()
    harness.runner.close()
    return harness


@pytest.mark.trap("A2", "A11", "B1", "B2", "B5", "B6", "B9", "B12", "B14", "I22")
@pytest.mark.parametrize(
    ("max_k", "depth"),
    first_or_more(product(range(8), range(4)), lambda pair: pair[0] % 4 == pair[1]),
)
def test_random_traffic_gives_the_tokens_of_requests_run_alone(depth: int, max_k: int) -> None:
    num_preemptions = num_aborted = num_finished = 0
    for seed in range(32):  # 4 x 8 x 32 = 1024 engines
        harness = run_seed(seed, depth=depth, max_k=max_k)
        num_preemptions += harness.num_preemptions
        dones = [stream.done for stream in harness.front.streams.values()]
        num_aborted += dones.count(Done.ABORT)
        num_finished += len(dones) - dones.count(Done.ABORT)
        assert harness.max_in_flight <= depth
    assert num_preemptions > 5
    assert num_aborted > 5
    assert num_finished > 50


@pytest.mark.trap("A3")
@pytest.mark.parametrize("depth", range(4))
def test_random_delays_on_both_sides_change_no_token(depth: int) -> None:
    for seed in range(12):
        run_seed(seed, depth=depth, max_k=3, threaded=True)


@pytest.mark.parametrize("depth", first_or_more(range(1, 4), lambda depth: depth == 2))
def test_steps_that_are_left_out_when_all_abort_change_no_token(depth: int) -> None:
    num_left_out = 0
    for seed in range(200):
        num_left_out += run_seed(seed, depth=depth, max_k=3, lazy=True).runner.num_left_out
    assert num_left_out > 20


@pytest.mark.slow
@pytest.mark.parametrize("block", range(16))
def test_much_more_random_traffic(block: int) -> None:
    rng = random.Random(block)
    for seed in range(1000 + 500 * block, 1500 + 500 * block):
        run_seed(seed, depth=rng.randint(0, 3), max_k=rng.randint(0, 7))
