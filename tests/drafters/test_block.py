"""A block drafter's drafts are a pure function of the committed tokens and the configured K."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.runner.compact_rows import CompactRows
from tests.block_heads import WINDOW, PlainBlock, random_block, save_block
from tests.drafters.recording import recorded
from tests.e2e.ladder import BLOCKS, PROMPTS, Workshop
from tests.e2e.loop import request
from tests.one_pass_heads import PlainPard, PlainPEagle
from tests.tiers import first_or_more

LONG = PROMPTS[6]  # 230 tokens
SYNTHETIC = {"rejection_sample_method": "synthetic"}
EVERY = first_or_more(
    [(name, k) for name in BLOCKS for k in (1, 3, 7)],
    lambda pair: pair[1] == 3 or pair in (("dflash", 7), ("peagle", 1)),
)
Plain = PlainBlock | PlainPEagle | PlainPard


@pytest.fixture(params=first_or_more(BLOCKS, lambda kind: kind in ("dflash", "peagle")))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def head_of(workshop: Workshop, kind: str) -> Plain:
    """A head that has seen the expected outputs, but not for long."""
    found: Plain = workshop.block_head("llama", kind)
    return found


def saved(folder: Path, head: Plain, k: int, form: str = "z-lab", **more: Any) -> dict[str, Any]:
    """Saved in a folder; the speculative config that runs it."""
    if isinstance(head, PlainBlock):
        save_block(folder, head, form=form)
    else:
        head.save(folder, form)
    spec = {"method": BLOCKS[head.kind], "model": str(folder), "num_speculative_tokens": k}
    return spec | {"adaptive": False} | more


def check(
    workshop: Workshop, head: Plain, spec: dict[str, Any], requests: list[Any], **options: Any
) -> Any:
    """Run them together; every draft equals the reference's."""
    with recorded(workshop, spec, **options) as seen:
        seen.run(requests)
        compare(seen, workshop, head, spec, options.get("max_model_len", 256))
    return seen


def compare(seen: Any, workshop: Workshop, head: Plain, spec: Any, limit: int = 256) -> None:
    target = workshop.target("llama")
    known = {tuple(s): head.features(target, s) for s in seen.sequences()}

    def drafts(tokens: list[int], count: int) -> list[int]:
        feature = next(f for s, f in known.items() if list(s[: len(tokens)]) == tokens)
        return head.drafts(feature, tokens, spec["num_speculative_tokens"], limit)[:count]

    seen.compare(drafts, limit)


@pytest.mark.trap("E14")
@pytest.mark.parametrize(("name", "k"), EVERY)
def test_drafts_equal_the_sequential_reference(
    workshop: Workshop, tmp_path: Path, name: str, k: int
) -> None:
    """The head is right part of the time, so windows are accepted by all lengths."""
    head = head_of(workshop, name)
    requests = [request(i, p) for i, p in enumerate(PROMPTS)]
    form = "speculators" if k == 3 else "z-lab"
    seen = check(workshop, head, saved(tmp_path, head, k, form), requests, run_ahead=k % 3)
    expected = [t[:20] for t in workshop.expected("llama")]
    assert [seen.published[i] for i in range(len(PROMPTS))] == expected
    said = {tuple(s[:n]): s[n] for s in seen.sequences() for n in range(len(s))}
    right = [said.get(tuple(row.tokens)) == row.drafts[0] for row in seen.seen]
    assert 0.1 < sum(right) / len(right) < 1


@pytest.mark.parametrize("rates", [(1, 1, 0), (0.7, 0.5, 0.3)], ids=str)
def test_drafts_do_not_depend_on_how_much_was_accepted(
    workshop: Workshop, tmp_path: Path, kind: str, rates: tuple[float, ...]
) -> None:
    head = head_of(workshop, kind)
    spec = saved(tmp_path, head, 3, **SYNTHETIC, synthetic_acceptance_rates=rates)
    requests = [request(i, p, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    check(workshop, head, spec, requests)


@pytest.mark.trap("D9")
@pytest.mark.parametrize("block_size", [4, 16])
def test_chunks_of_a_prompt_leave_no_trace(
    workshop: Workshop, tmp_path: Path, kind: str, block_size: int
) -> None:
    """Prompts end one before, at and one after the end of a chunk, and of a page."""
    lengths = [n + d for n in (16, 32, 48) for d in (-1, 0, 1)]
    requests = [request(i, LONG[i : i + n], max_tokens=8) for i, n in enumerate(lengths)]
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": block_size}
    head = head_of(workshop, kind)
    check(workshop, head, saved(tmp_path, head, 3), requests, **options)


def test_a_prefix_hit_gives_the_drafts_of_a_first_request(
    workshop: Workshop, tmp_path: Path, kind: str
) -> None:
    """Also of a request that did not speculate, and of one that just ended: their pages hold the
    drafter's rows. Without a token shift a hit needs no token after its last page."""
    head = head_of(workshop, kind)
    spec = saved(tmp_path, head, 3)
    with recorded(workshop, spec, max_num_seqs=1, block_size=4) as seen:

        def hit_of(uid: int, prompt: list[int], **params: Any) -> int:
            before = seen.engine.scheduler.num_hit_tokens
            seen.run([request(uid, prompt, ignore_eos=True, **params)])
            return int(seen.engine.scheduler.num_hit_tokens - before)

        assert hit_of(0, LONG[:40], num_speculative_tokens=0) == 0
        assert not seen.seen
        found = [hit_of(1, [*LONG[:40], *seen.published[0], 5, 6])]
        found += [hit_of(2, [*LONG[:32], *LONG[50:70]]), hit_of(3, [*LONG[:32], *LONG[50:80]])]
        compare(seen, workshop, head, spec)
    # A shifted head's last page of a common prefix belongs to the token after it.
    assert found == ([56, 28, 48] if kind == "peagle" else [56, 32, 52])


@pytest.mark.parametrize("depth", [0, 2])
def test_preempted_requests_draft_as_if_nothing_had_happened(
    workshop: Workshop, tmp_path: Path, kind: str, depth: int
) -> None:
    prompts = [LONG[start : start + 50] for start in (0, 50, 100)]
    requests = [request(i, p, ignore_eos=True, max_tokens=50) for i, p in enumerate(prompts)]
    options = {"num_gpu_blocks_override": 33, "block_size": 4, "max_model_len": 128}
    head = head_of(workshop, kind)
    spec = saved(tmp_path, head, 4)
    seen = check(workshop, head, spec, requests, run_ahead=depth, max_num_seqs=2, **options)
    assert seen.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(("k", "chunk", "depth"), [(1, 16, 0), (3, 29, 2), (7, 200, 1)])
def test_fixed_shapes_make_the_same_drafts(
    workshop: Workshop, tmp_path: Path, kind: str, k: int, chunk: int, depth: int
) -> None:
    """What a GPU captures: rows with gaps, rejected positions computed, padding beside them. Some
    requests do not speculate at all, some end inside a window."""
    params: list[dict[str, Any]] = [{}, {"num_speculative_tokens": 0}, {"ignore_eos": True}]
    requests = [request(i, p, max_tokens=14, **params[i % 3]) for i, p in enumerate(PROMPTS)]
    num_seqs = 2 + 2 * depth
    options = {"num_gpu_blocks_override": 65, "block_size": 4, "max_num_seqs": num_seqs}
    tokens = max(chunk, num_seqs * (k + 1))
    options |= {"run_ahead": depth, "max_num_batched_tokens": tokens, "is_fixed": True}
    head = head_of(workshop, kind)
    seen = check(workshop, head, saved(tmp_path, head, k), requests, **options)
    assert any(row.drafts[0] >= 0 for row in seen.seen)


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("rate", [1.0, 0.0])
def test_no_draft_lies_past_max_model_len(
    workshop: Workshop, tmp_path: Path, kind: str, rate: float, is_fixed: bool
) -> None:
    limit, head = 64, head_of(workshop, kind)
    spec = saved(tmp_path, head, 5, **SYNTHETIC, synthetic_acceptance_rates=(rate,) * 5)
    requests = [
        request(j, LONG[: limit - j], ignore_eos=True, max_tokens=None) for j in range(1, 9)
    ]
    seen = check(workshop, head, spec, requests, max_model_len=limit, is_fixed=is_fixed)
    assert all(len(s) == limit for s in seen.sequences())
    assert any(-1 in row.drafts for row in seen.seen)


@pytest.mark.parametrize(
    ("kinds", "form"),
    [
        ([(WINDOW, False), (WINDOW, False)], "z-lab"),
        ([(WINDOW, False), (WINDOW, False)], "speculators"),
        ([(WINDOW, True), (0, False)], "speculators"),
        pytest.param([(0, True), (0, True)], "z-lab", marks=pytest.mark.more),
    ],
)
@pytest.mark.parametrize("is_fixed", [False, True])
def test_layers_with_windows_or_causal_blocks_draft_as_the_reference(
    workshop: Workshop, tmp_path: Path, kinds: list[tuple[int, bool]], form: str, is_fixed: bool
) -> None:
    is_nested = form == "speculators"
    head = random_block(workshop.target("llama"), kinds=kinds, draft_vocab=70, is_nested=is_nested)
    spec = saved(tmp_path, head, 5, form)
    requests = [request(i, p, max_tokens=12) for i, p in enumerate(PROMPTS)]
    options = {"max_num_batched_tokens": 27, "block_size": 4, "is_fixed": is_fixed}
    check(workshop, head, spec, requests, **options)


def test_a_request_with_a_smaller_k_gets_the_first_drafts_of_the_same_pass(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Masks after a draft change it, so the pass keeps its width."""
    head = head_of(workshop, "dflash")
    assert isinstance(head, PlainBlock)
    spec = saved(tmp_path, head, 7)
    requests = [
        request(i, p, num_speculative_tokens=2, ignore_eos=True) for i, p in enumerate(PROMPTS)
    ]
    seen = check(workshop, head, spec, requests)
    target, narrow = workshop.target("llama"), 0
    for row in seen.seen:
        features = head.features(target, row.tokens)
        narrow += head.drafts(features, row.tokens, 2, 256) != row.drafts[:2]
    assert narrow > 0, "the width would not matter to this head"


def test_rejected_drafts_write_no_context(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committed entries end before the newest token, where the block begins."""
    head, block = head_of(workshop, "dflash"), CompactRows.block
    seen: list[tuple[int, int]] = []

    def looked_at(step: Any, *args: Any) -> Any:
        batch = block(step, *args)
        length_B = step.slots.num_tokens_S[batch.inputs.attention.slot_B]
        attention = batch.inputs.attention
        seen.extend(zip(attention.length_B.tolist(), length_B.tolist(), strict=True))
        return batch

    monkeypatch.setattr(CompactRows, "block", looked_at)
    spec = saved(tmp_path, head, 4, **SYNTHETIC, synthetic_acceptance_rates=(0.5, 0.2, 0.1, 0.0))
    check(workshop, head, spec, [request(i, p, ignore_eos=True) for i, p in enumerate(PROMPTS)])
    # A row of context ends where the sequence was computed, a block five entries further.
    assert {length - tokens for length, tokens in seen if tokens > 240} <= {-1, 4}
    assert all(length < tokens or length == tokens + 4 for length, tokens in seen)


# The reference of a norm is slow where the residual stream is wider than the weight.
@pytest.mark.more
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_block_drafters_compute_in_half_precision(workshop: Workshop, tmp_path: Path) -> None:
    """As on a GPU: weights, features and taps in the type of the target."""
    for name in ("dflash2", "dspark-gated", "peagle"):
        spec = saved(tmp_path / name, head_of(workshop, name), 3)
        found: list[dict[int, list[int]]] = []
        for k in (0, 3):
            with recorded(workshop, spec, is_fixed=True, dtype="float16") as seen:
                asked = {"max_tokens": 12, "num_speculative_tokens": k}
                seen.run([request(i, p, **asked) for i, p in enumerate(PROMPTS[:6])])
                found.append(dict(seen.published))
        assert found[0] == found[1]
        assert any(row.drafts[0] > 0 for row in seen.seen)


@pytest.mark.parametrize("form", ["z-lab", "speculators"])
def test_a_dspark_head_may_fill_in_its_masks(workshop: Workshop, tmp_path: Path, form: str) -> None:
    """Its anchor gives no draft then; the bias still follows the token before each draft."""
    head = random_block(workshop.target("llama"), "dspark", first_output=1, draft_vocab=70)
    requests = [request(i, p, max_tokens=10) for i, p in enumerate(PROMPTS)]
    check(workshop, head, saved(tmp_path, head, 4, form), requests, is_fixed=form == "z-lab")
