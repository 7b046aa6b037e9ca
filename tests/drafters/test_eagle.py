"""EAGLE-1 drafts are a pure function of the committed tokens, whatever happened on the way."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import SamplingParams
from tests.drafters.recording import recorded
from tests.e2e.engines import eagle, run, tokens
from tests.e2e.ladder import PROMPTS, Workshop
from tests.e2e.loop import request

LONG = PROMPTS[6]  # 230 tokens
SYNTHETIC = {"rejection_sample_method": "synthetic"}


def check(workshop: Workshop, spec: dict[str, Any], requests: list[Any], **options: Any) -> Any:
    """Run them together; every draft equals the reference's, and so do the tokens by number."""
    limit = options.get("max_model_len", 256)
    with recorded(workshop, spec, **options) as recording:
        recording.run(requests)
        recording.check(workshop.target("llama"), workshop.head("llama"), limit)
    return recording


@pytest.mark.parametrize("k", range(1, 8))
def test_drafts_equal_the_sequential_reference(workshop: Workshop, k: int) -> None:
    """The head is right part of the time, so windows are accepted by all lengths."""
    requests = [request(i, p) for i, p in enumerate(PROMPTS)]
    recording = check(workshop, eagle(workshop, k), requests, run_ahead=k % 3)
    expected = [t[:20] for t in workshop.expected("llama")]
    assert [recording.published[i] for i in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("rates", [(1, 1, 1), (1, 1, 0), (0.7, 0.7, 0.7), (0, 0, 0)], ids=str)
def test_drafts_do_not_depend_on_how_much_was_accepted(
    workshop: Workshop, rates: tuple[float, ...]
) -> None:
    spec = eagle(workshop, 3, **SYNTHETIC, synthetic_acceptance_rates=rates)
    check(workshop, spec, [request(i, p, ignore_eos=True) for i, p in enumerate(PROMPTS)])


@pytest.mark.trap("L-8")
@pytest.mark.parametrize("num_tokens", [16, 17])
@pytest.mark.parametrize("block_size", [4, 16])
def test_chunks_of_a_prompt_leave_no_trace(
    workshop: Workshop, num_tokens: int, block_size: int
) -> None:
    """Prompts end one before, at and one after the end of a chunk, and of a page."""
    lengths = [n + d for n in (num_tokens, 2 * num_tokens, 48) for d in (-1, 0, 1)]
    requests = [request(i, LONG[i : i + n], max_tokens=8) for i, n in enumerate(lengths)]
    options = {"max_num_seqs": 2, "max_num_batched_tokens": num_tokens, "block_size": block_size}
    check(workshop, eagle(workshop, 3), requests, **options)


@pytest.mark.trap("G3")
@pytest.mark.parametrize(("block_size", "hits"), [(4, [56, 28, 48]), (16, [48, 16, 48])])
def test_a_prefix_hit_gives_the_drafts_of_a_first_request(
    workshop: Workshop, block_size: int, hits: list[int]
) -> None:
    """A page's last row belongs to the token after it. The second request continues what the first
    one said; the fourth finds the first page of the first and the second page of the third."""
    options = {"max_num_seqs": 1, "block_size": block_size, "num_gpu_blocks_override": 128}
    with recorded(workshop, eagle(workshop, 3), **options) as seen:

        def hit_of(uid: int, prompt: list[int]) -> int:
            before = seen.engine.scheduler.stats()["prefix_cache_hit_tokens"]
            seen.run([request(uid, prompt, ignore_eos=True)])
            return int(seen.engine.scheduler.stats()["prefix_cache_hit_tokens"] - before)

        assert hit_of(0, LONG[:40]) == 0
        found = [hit_of(1, [*LONG[:40], *seen.published[0], 5, 6])]
        found += [hit_of(2, [*LONG[:32], *LONG[50:70]]), hit_of(3, [*LONG[:32], *LONG[50:80]])]
        seen.check(workshop.target("llama"), workshop.head("llama"))
    assert found == hits


@pytest.mark.parametrize("ending", [{"max_tokens": 1}, {"stop_token_ids": list(range(3, 27))}])
def test_pages_of_a_request_that_just_ended_hold_its_last_drafter_rows(
    workshop: Workshop, ending: dict[str, Any]
) -> None:
    """It ends in prefill, or inside a window: the step that ends it still runs the first pass."""
    spec = eagle(workshop, 3, **SYNTHETIC, synthetic_acceptance_length=3.0)
    with recorded(workshop, spec, max_num_seqs=1, block_size=1) as seen:
        for uid, prompt in enumerate((LONG[:21], LONG[30:50])):
            seen.run([request(uid, prompt, **ending)])
            said = [*prompt, *seen.published[uid]]
            seen.run([request(10 + uid, [*said, 7], ignore_eos=True, max_tokens=6)])
        hits = seen.engine.scheduler.stats()["prefix_cache_hit_tokens"]
        seen.check(workshop.target("llama"), workshop.head("llama"))
    assert hits == sum(len(s) - 1 for s in seen.sequences()[::2])


def test_requests_that_do_not_speculate_keep_the_drafters_kv_warm(workshop: Workshop) -> None:
    with recorded(workshop, eagle(workshop, 3), max_num_seqs=2, block_size=4) as seen:
        seen.run([request(0, LONG[:30], num_speculative_tokens=0, ignore_eos=True)])
        assert not seen.seen
        seen.run([request(1, [*LONG[:30], *seen.published[0], 9], ignore_eos=True)])
        hits = seen.engine.scheduler.stats()["prefix_cache_hit_tokens"]
        seen.check(workshop.target("llama"), workshop.head("llama"))
    assert hits >= 44


@pytest.mark.parametrize("depth", [0, 2])
def test_preempted_requests_draft_as_if_nothing_had_happened(
    workshop: Workshop, depth: int
) -> None:
    requests = [request(i, p, ignore_eos=True, max_tokens=30) for i, p in enumerate(PROMPTS)]
    options = {"num_gpu_blocks_override": 65, "block_size": 4, "max_num_seqs": 6}
    recording = check(workshop, eagle(workshop, 4), requests, run_ahead=depth, **options)
    assert recording.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("rate", [1.0, 0.0])
def test_no_draft_lies_past_max_model_len(workshop: Workshop, rate: float) -> None:
    limit = 64
    spec = eagle(workshop, 5, **SYNTHETIC, synthetic_acceptance_rates=(rate,) * 5)
    requests = [
        request(j, LONG[: limit - j], ignore_eos=True, max_tokens=None) for j in range(1, 9)
    ]
    recording = check(workshop, spec, requests, max_model_len=limit)
    assert all(len(s) == limit for s in recording.sequences())
    assert any(-1 in row.drafts for row in recording.seen)


@pytest.mark.trap("G3")
def test_acceptance_does_not_depend_on_chunks_slots_or_hits(workshop: Workshop) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [PROMPTS[5]] * 3 + [PROMPTS[8]] * 3
    accepted = set()
    for options in (
        {"max_num_seqs": 1},
        {"max_num_seqs": 1, "enable_prefix_caching": False},
        {"max_num_seqs": 2, "max_num_batched_tokens": 13, "block_size": 4},
        {"max_num_seqs": 6, "max_num_batched_tokens": 300},
    ):
        outputs = run(workshop, prompts, params, eagle(workshop, 3), **options)
        accepted.add(tuple(o.metrics.num_accepted_tokens for o in outputs))
        assert tokens(outputs) == [tokens(outputs)[0]] * 3 + [tokens(outputs)[3]] * 3
    (counts,) = accepted
    assert len(set(counts[:3])) == len(set(counts[3:])) == 1
    assert counts[0] > 0
