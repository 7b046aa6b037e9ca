"""A head's drafts are a pure function of the committed tokens, whatever happened on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import SamplingParams
from tests.drafters.recording import recorded
from tests.e2e.engines import head, run, tokens
from tests.e2e.ladder import PROMPTS, Workshop
from tests.e2e.loop import request
from tests.eagle import random_head, save_head
from tests.tiers import first_or_more
from tests.tiny import VOCAB

LONG = PROMPTS[6]  # 230 tokens
SYNTHETIC = {"rejection_sample_method": "synthetic"}


@pytest.fixture(params=["eagle", "eagle3", "mtp"])
def kind(request: pytest.FixtureRequest) -> str:
    """eagle3 has a smaller vocabulary; mtp is a layer of the target's checkpoint."""
    return str(request.param)


def check(workshop: Workshop, spec: dict[str, Any], requests: list[Any], **options: Any) -> Any:
    """Run them together; every draft equals the reference's, and so do the tokens by number."""
    limit = options.get("max_model_len", 256)
    with recorded(workshop, spec, **options) as recording:
        recording.run(requests)
        head_of = workshop.head("llama", spec["method"])
        recording.check(workshop.target("llama"), head_of, limit)
    return recording


@pytest.mark.parametrize("k", first_or_more(range(1, 8), lambda k: k in (1, 3, 7)))
def test_drafts_equal_the_sequential_reference(workshop: Workshop, kind: str, k: int) -> None:
    """The head is right part of the time, so windows are accepted by all lengths."""
    requests = [request(i, p) for i, p in enumerate(PROMPTS)]
    recording = check(workshop, head(workshop, kind, k), requests, run_ahead=k % 3)
    expected = [t[:20] for t in workshop.expected("llama")]
    assert [recording.published[i] for i in range(len(PROMPTS))] == expected


@pytest.mark.parametrize(
    "rates",
    [
        pytest.param((1, 1, 1), marks=pytest.mark.more),
        (1, 1, 0),
        (0.7, 0.5, 0.3),
        pytest.param((0, 0, 0), marks=pytest.mark.more),
    ],
    ids=str,
)
def test_drafts_do_not_depend_on_how_much_was_accepted(
    workshop: Workshop, kind: str, rates: tuple[float, ...]
) -> None:
    spec = head(workshop, kind, 3, **SYNTHETIC, synthetic_acceptance_rates=rates)
    check(workshop, spec, [request(i, p, ignore_eos=True) for i, p in enumerate(PROMPTS)])


@pytest.mark.trap("L-8")
@pytest.mark.parametrize("num_tokens", [16, 17])
@pytest.mark.parametrize("block_size", [4, 16])
def test_chunks_of_a_prompt_leave_no_trace(
    workshop: Workshop, kind: str, num_tokens: int, block_size: int
) -> None:
    """Prompts end one before, at and one after the end of a chunk, and of a page."""
    lengths = [n + d for n in (num_tokens, 2 * num_tokens, 48) for d in (-1, 0, 1)]
    requests = [request(i, LONG[i : i + n], max_tokens=8) for i, n in enumerate(lengths)]
    options = {"max_num_seqs": 2, "max_num_batched_tokens": num_tokens, "block_size": block_size}
    check(workshop, head(workshop, kind, 3), requests, **options)


@pytest.mark.trap("G3")
@pytest.mark.parametrize(("block_size", "hits"), [(4, [56, 28, 48]), (16, [48, 16, 48])])
def test_a_prefix_hit_gives_the_drafts_of_a_first_request(
    workshop: Workshop, kind: str, block_size: int, hits: list[int]
) -> None:
    """A page's last row belongs to the token after it. The second request continues what the first
    one said; the fourth finds the first page of the first and the second page of the third."""
    options: dict[str, Any] = {"max_num_seqs": 1, "block_size": block_size}
    options["num_gpu_blocks_override"] = 128
    with recorded(workshop, head(workshop, kind, 3), **options) as seen:

        def hit_of(uid: int, prompt: list[int]) -> int:
            before = seen.engine.scheduler.num_hit_tokens
            seen.run([request(uid, prompt, ignore_eos=True)])
            return int(seen.engine.scheduler.num_hit_tokens - before)

        assert hit_of(0, LONG[:40]) == 0
        found = [hit_of(1, [*LONG[:40], *seen.published[0], 5, 6])]
        found += [hit_of(2, [*LONG[:32], *LONG[50:70]]), hit_of(3, [*LONG[:32], *LONG[50:80]])]
        seen.check(workshop.target("llama"), workshop.head("llama", kind))
    assert found == hits


@pytest.mark.parametrize("ending", [{"max_tokens": 1}, {"stop_token_ids": list(range(3, 27))}])
def test_pages_of_a_request_that_just_ended_hold_its_last_drafter_rows(
    workshop: Workshop, kind: str, ending: dict[str, Any]
) -> None:
    """It ends in prefill, or inside a window: the step that ends it still runs the first pass."""
    spec = head(workshop, kind, 3, **SYNTHETIC, synthetic_acceptance_rates=(0.8, 0.65, 0.55))
    with recorded(workshop, spec, max_num_seqs=1, block_size=1) as seen:
        for uid, prompt in enumerate((LONG[:21], LONG[30:50])):
            seen.run([request(uid, prompt, **ending)])
            said = [*prompt, *seen.published[uid]]
            seen.run([request(10 + uid, [*said, 7], ignore_eos=True, max_tokens=6)])
        hits = seen.engine.scheduler.num_hit_tokens
        seen.check(workshop.target("llama"), workshop.head("llama", kind))
    assert hits == sum(len(s) - 1 for s in seen.sequences()[::2])


def test_requests_that_do_not_speculate_keep_the_drafters_kv_warm(
    workshop: Workshop, kind: str
) -> None:
    with recorded(workshop, head(workshop, kind, 3), max_num_seqs=2, block_size=4) as seen:
        seen.run([request(0, LONG[:30], num_speculative_tokens=0, ignore_eos=True)])
        assert not seen.seen
        seen.run([request(1, [*LONG[:30], *seen.published[0], 9], ignore_eos=True)])
        hits = seen.engine.scheduler.num_hit_tokens
        seen.check(workshop.target("llama"), workshop.head("llama", kind))
    assert hits >= 44


@pytest.mark.parametrize("depth", [0, 2])
def test_preempted_requests_draft_as_if_nothing_had_happened(
    workshop: Workshop, kind: str, depth: int
) -> None:
    """However many drafts are right: two prompts of 50 tokens share 132, and both grow to 100."""
    prompts = [LONG[start : start + 50] for start in (0, 50, 100)]
    requests = [request(i, p, ignore_eos=True, max_tokens=50) for i, p in enumerate(prompts)]
    options = {"num_gpu_blocks_override": 33, "block_size": 4, "max_model_len": 128}
    spec = head(workshop, kind, 4)
    recording = check(workshop, spec, requests, run_ahead=depth, max_num_seqs=2, **options)
    assert recording.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(("k", "chunk", "depth"), [(1, 16, 0), (3, 29, 2), (7, 200, 1)])
def test_fixed_shapes_make_the_same_drafts(
    workshop: Workshop, kind: str, k: int, chunk: int, depth: int
) -> None:
    """What a GPU captures: rows with gaps, rejected positions computed, padding beside them. Some
    requests do not speculate at all, some end inside a window."""
    params: list[dict[str, Any]] = [{}, {"num_speculative_tokens": 0}, {"ignore_eos": True}]
    requests = [request(i, p, max_tokens=14, **params[i % 3]) for i, p in enumerate(PROMPTS)]
    num_seqs = 2 + 2 * depth
    options = {"num_gpu_blocks_override": 65, "block_size": 4, "max_num_seqs": num_seqs}
    tokens = max(chunk, num_seqs * (k + 1))
    options |= {"run_ahead": depth, "max_num_batched_tokens": tokens, "is_fixed": True}
    recording = check(workshop, head(workshop, kind, k), requests, **options)
    assert any(row.drafts[0] >= 0 for row in recording.seen)


@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        ("deepseek-v3", "mtp"),
        pytest.param("glm4-moe-lite", "mtp", marks=pytest.mark.more),
        ("mixtral-window", "mtp"),
        ("mixtral", "eagle"),
        pytest.param("deepseek-v3", "eagle3", marks=pytest.mark.more),
    ],
)
@pytest.mark.parametrize("is_fixed", [False, pytest.param(True, marks=pytest.mark.more)])
def test_heads_of_experts_latents_or_windows_draft_as_their_references(
    workshop: Workshop, family: str, drafter: str, is_fixed: bool
) -> None:
    """The families that have MTP layers, one whose pages go while it runs, and heads with pages of
    another shape than the target's; chunks, two sizes of page, prefix hits and an EOS."""
    folder, spec = workshop.head_folder(family, drafter), head(workshop, "mtp", 3)
    options: dict[str, Any] = {"model": folder, "is_fixed": is_fixed}
    if drafter != "mtp":
        spec |= {"method": drafter, "model": folder}
        options["model"] = workshop.target_folder(family)
    options |= {"max_num_batched_tokens": 23, "block_size": 4 if is_fixed else 16, "run_ahead": 2}
    requests = [request(i, p, max_tokens=14) for i, p in enumerate(PROMPTS)]
    with recorded(workshop, spec, **options) as seen:
        seen.run(requests)
        hits = seen.engine.scheduler.num_hit_tokens
        seen.check(workshop.target(family), workshop.head(family, drafter))
    assert hits > 0
    expected = [t[:14] for t in workshop.expected(family)]
    assert [seen.published[i] for i in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("rate", [1.0, 0.0])
def test_no_draft_lies_past_max_model_len(workshop: Workshop, kind: str, rate: float) -> None:
    limit = 64
    spec = head(workshop, kind, 5, **SYNTHETIC, synthetic_acceptance_rates=(rate,) * 5)
    requests = [
        request(j, LONG[: limit - j], ignore_eos=True, max_tokens=None) for j in range(1, 9)
    ]
    recording = check(workshop, spec, requests, max_model_len=limit)
    assert all(len(s) == limit for s in recording.sequences())
    assert any(-1 in row.drafts for row in recording.seen)


@pytest.mark.trap("G3")
def test_acceptance_does_not_depend_on_chunks_slots_or_hits(workshop: Workshop, kind: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [PROMPTS[5]] * 3 + [PROMPTS[8]] * 3
    accepted = set()
    for options in (
        {"max_num_seqs": 1},
        {"max_num_seqs": 1, "enable_prefix_caching": False},
        {"max_num_seqs": 2, "max_num_batched_tokens": 13, "block_size": 4},
        {"max_num_seqs": 6, "max_num_batched_tokens": 300},
    ):
        outputs = run(workshop, prompts, params, head(workshop, kind, 3), **options)
        accepted.add(tuple(o.metrics.num_accepted_tokens for o in outputs))
        assert tokens(outputs) == [tokens(outputs)[0]] * 3 + [tokens(outputs)[3]] * 3
    (counts,) = accepted
    assert len(set(counts[:3])) == len(set(counts[3:])) == 1
    assert sum(counts) > 0


# The reference of a norm is slow where the residual stream is wider than the weight.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_heads_compute_in_half_precision(workshop: Workshop, kind: str) -> None:
    """As on a GPU: weights, features and taps in the type of the target."""
    found: list[dict[int, list[int]]] = []
    for k in (0, 3):
        options: dict[str, Any] = {"is_fixed": True, "dtype": "float16"}
        with recorded(workshop, head(workshop, kind, 3), **options) as seen:
            wanted = [
                request(i, p, max_tokens=12, num_speculative_tokens=k)
                for i, p in enumerate(PROMPTS[:6])
            ]
            seen.run(wanted)
            found.append(dict(seen.published))
    assert found[0] == found[1]
    said = {tuple(s[:n]): s[n] for s in seen.sequences() for n in range(len(s))}
    right = [said.get(tuple(row.tokens)) == row.drafts[0] for row in seen.seen]
    assert 0.1 < sum(right) / len(right) < 1


def test_mixtral_with_the_head_of_a_llama_runs_and_says_that_it_helps_little(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Made for more tokens than the target has, by another model; the hidden sizes agree."""
    target = workshop.target("mixtral")
    odd = random_head(target, vocab_size=VOCAB + 32)
    odd.weights["embed_tokens.weight"] = torch.randn(VOCAB + 32, 32)
    save_head(tmp_path, odd)
    spec = {"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 2}
    with recorded(workshop, spec, model=workshop.target_folder("mixtral")) as seen:
        seen.run([request(i, p, max_tokens=8) for i, p in enumerate(PROMPTS)])
        seen.check(target, odd)
    assert f"vocabulary of {VOCAB + 32} tokens, the target has {VOCAB}" in caplog.text
    expected = [t[:8] for t in workshop.expected("mixtral")]
    assert [seen.published[i] for i in range(len(PROMPTS))] == expected
