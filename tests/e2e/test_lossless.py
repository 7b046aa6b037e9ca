"""Speculation changes nothing: seeded tokens, every sampling feature, logprobs, stops, limits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaForCausalLM

from paceline import SamplingParams
from paceline.errors import InvalidRequest
from tests.e2e.engines import NGRAM, draft_model, eagle, head, run, tiny_llm, tokens
from tests.e2e.ladder import BLOCKS, PROMPTS, Workshop
from tests.tiny import VOCAB

FEATURES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.1},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.3, "temperature": 0.0},
    {"logit_bias": {5: 3.0, 9: -100.0}},
    {"allowed_token_ids": list(range(10, 60))},
    {"min_tokens": 12, "stop_token_ids": list(range(3, 25))},
    {"logprobs": 3, "temperature": 0.7},
    {"n": 3},
]


DRAFTERS = ("none", "ngram", "draft_model", "eagle", "eagle3", "mtp")


def spec_of(drafter: str, workshop: Workshop, k: int = 4) -> dict[str, Any] | None:
    if drafter in ("none", "ngram"):
        return NGRAM if drafter == "ngram" else None
    is_model = drafter == "draft_model"
    return draft_model(workshop, k) if is_model else head(workshop, drafter, k)


def feature_batch() -> list[SamplingParams]:
    return [
        SamplingParams(**{"max_tokens": 24, "seed": 100 + i, "detokenize": False, **feature})
        for i, feature in enumerate(FEATURES)
    ]


@pytest.fixture(scope="module")
def plain(workshop: Workshop) -> list[list[list[int]]]:
    return tokens(run(workshop, PROMPTS, feature_batch()))


@pytest.mark.trap("E12")
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("drafter", DRAFTERS[1:])
def test_every_sampling_feature_gives_the_tokens_of_a_run_without_drafts(
    workshop: Workshop, plain: list[list[list[int]]], drafter: str, depth: int
) -> None:
    spec = spec_of(drafter, workshop)
    outputs = run(workshop, PROMPTS, feature_batch(), spec, run_ahead=depth)
    assert tokens(outputs) == plain
    assert sum(o.metrics.num_accepted_tokens for o in outputs) > 0


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    "drafter", ["draft_model", "eagle3", pytest.param("ngram", marks=pytest.mark.more)]
)
def test_auto_gives_the_tokens_of_a_run_without_drafts(
    workshop: Workshop, plain: list[list[list[int]]], drafter: str, depth: int
) -> None:
    auto = {"num_speculative_tokens": "auto", "max_num_speculative_tokens": 5, "adaptive": True}
    spec = {**(spec_of(drafter, workshop) or {}), **auto}
    outputs = run(workshop, PROMPTS, feature_batch(), spec, run_ahead=depth)
    assert tokens(outputs) == plain
    assert sum(o.metrics.num_draft_tokens for o in outputs) > 0


@pytest.mark.parametrize(
    ("drafter", "k"),
    [
        ("draft_model", 1),
        ("draft_model", 4),
        ("eagle3", 3),
        pytest.param("eagle", 4, marks=pytest.mark.more),
        pytest.param("mtp", 4, marks=pytest.mark.more),
    ],
)
def test_coupled_drafts_give_the_tokens_of_a_run_without_drafts(
    workshop: Workshop, plain: list[list[list[int]]], drafter: str, k: int
) -> None:
    """For any K, with a reduced vocabulary (eagle3) too."""
    spec = {**(spec_of(drafter, workshop, k) or {}), "draft_sample_method": "coupled"}
    outputs = run(workshop, PROMPTS, feature_batch(), spec)
    assert tokens(outputs) == plain
    assert sum(o.metrics.num_accepted_tokens for o in outputs) > 0


@pytest.mark.trap("L-15")
def test_seeded_tokens_depend_neither_on_batch_nor_chunks_nor_preemption(
    workshop: Workshop, plain: list[list[list[int]]]
) -> None:
    tight = run(
        workshop,
        PROMPTS,
        feature_batch(),
        draft_model(workshop, 2),
        max_num_batched_tokens=18,
        block_size=4,
        num_gpu_blocks_override=70,
    )
    assert tokens(tight) == plain
    assert sum(o.metrics.num_preemptions for o in tight) > 0
    alone = run(workshop, PROMPTS[3:4], feature_batch()[3:4], max_num_seqs=1)
    assert tokens(alone) == plain[3:4]


def test_n_uses_seed_plus_index(workshop: Workshop) -> None:
    several = SamplingParams(n=3, seed=40, max_tokens=8, detokenize=False)
    single = [SamplingParams(seed=40 + i, max_tokens=8, detokenize=False) for i in range(3)]
    (together,) = tokens(run(workshop, PROMPTS[2:3], several))
    apart = tokens(run(workshop, [PROMPTS[2]] * 3, single))
    assert together == [tokens_of[0] for tokens_of in apart]


def test_logprobs_equal_those_without_speculation(workshop: Workshop) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, logprobs=4, detokenize=False)
    without = run(workshop, PROMPTS, params)
    for spec in (NGRAM, draft_model(workshop), eagle(workshop)):
        drafted = run(workshop, PROMPTS, params, spec)
        assert tokens(drafted) == tokens(without)
        for a, b in zip(drafted, without, strict=True):
            tables_a, tables_b = a.outputs[0].logprobs, b.outputs[0].logprobs
            assert tables_a is not None
            assert tables_b is not None
            assert len(tables_a) == len(a.outputs[0].token_ids)
            for x, y in zip(tables_a, tables_b, strict=True):
                assert x.keys() == y.keys()
                for token, entry in x.items():
                    assert entry.logprob == pytest.approx(y[token].logprob, abs=1e-4)
                    assert entry.rank == y[token].rank


def test_prompt_logprobs_equal_the_reference_in_chunks_and_after_preemption(
    workshop: Workshop,
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=2, detokenize=False)
    model = workshop.target("llama")
    outputs = run(
        workshop, PROMPTS, params, NGRAM, max_num_batched_tokens=31, num_gpu_blocks_override=18
    )
    for output in outputs:
        ids = torch.tensor(output.prompt_token_ids)
        with torch.no_grad():
            expected = model(ids[None]).logits[0].log_softmax(-1)
        table = output.prompt_logprobs
        assert table is not None
        assert len(table) == len(ids)
        assert table[0] is None
        for position, entry in enumerate(table[1:]):
            assert entry is not None
            token = int(ids[position + 1])
            value = float(expected[position, token])
            assert entry[token].logprob == pytest.approx(value, abs=1e-4)
            best = {int(i) for i in expected[position].topk(2).indices}
            assert best <= set(entry)
        assert output.num_cached_tokens == 0


@pytest.mark.trap("E11")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_min_tokens_and_stops_hold_inside_a_window(workshop: Workshop, drafter: str) -> None:
    spec = spec_of(drafter, workshop)
    greedy = tokens(run(workshop, PROMPTS, SamplingParams(temperature=0, max_tokens=24)))
    for wanted in (1, 5, 11):
        stops = sorted({t[0][min(3, len(t[0]) - 1)] for t in greedy})
        params = SamplingParams(
            temperature=0, max_tokens=24, min_tokens=wanted, stop_token_ids=stops[:20]
        )
        for output in run(workshop, PROMPTS, params, spec):
            out = output.outputs[0]
            assert len(out.token_ids) >= wanted
            assert not set(out.token_ids[: wanted - 1]) & {*stops[:20], 2}
            if out.finish_reason == "stop":
                assert out.token_ids[-1] in {*stops[:20], 2}
            else:
                assert len(out.token_ids) == 24


@pytest.mark.trap("I24")
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_ends_exactly_at_max_model_len(
    workshop: Workshop, drafter: str, depth: int
) -> None:
    spec = spec_of(drafter, workshop, 5)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    limit = 64
    prompts = [PROMPTS[6][: limit - j] for j in range(1, 13)]
    outputs = run(workshop, prompts, params, spec, max_model_len=limit, run_ahead=depth)
    plain = run(workshop, prompts, params, None, max_model_len=limit)
    assert tokens(outputs) == tokens(plain)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(prompt) + len(output.outputs[0].token_ids) == limit
        assert output.outputs[0].finish_reason == "length"


def top_six(logits_NV: torch.Tensor) -> torch.Tensor:
    """What top_k = 6 draws from."""
    kept_NV = logits_NV >= logits_NV.topk(6).values[:, -1:]
    return logits_NV.masked_fill(~kept_NV, -torch.inf).softmax(-1)


def target_chances(workshop: Workshop, texts: list[list[int]]) -> torch.Tensor:
    """[text, V]: the token after each text, by transformers."""
    with torch.no_grad():
        return top_six(workshop.target("llama")(torch.tensor(texts)).logits[:, -1]).double()


def draft_chances(workshop: Workshop, drafter: str, texts: list[list[int]]) -> torch.Tensor:
    """[text, V]: the first draft after each text, by the drafter's plain reference."""
    if drafter == "draft_model":
        model = LlamaForCausalLM.from_pretrained(workshop.draft_folder("llama"))
        with torch.no_grad():
            return top_six(model(torch.tensor(texts)).logits[:, -1]).double()
    if drafter in BLOCKS:
        head, target = workshop.block_head("llama", drafter), workshop.target("llama")
        logits = [head.first_logits(head.features(target, t), t, 3) for t in texts]
        return top_six(torch.stack(logits)).double()
    plain = workshop.head("llama", drafter)
    chances = torch.zeros(len(texts), VOCAB, dtype=torch.float64)
    for row, text in enumerate(texts):
        feature_ND = plain.features(workshop.target("llama"), text[:-1])
        with torch.no_grad():
            out_ND = plain.forward(plain.read(feature_ND), torch.tensor(text[1:]))
            own_V = top_six(plain.logits(out_ND[-1:]))[0].double()
        for index in own_V.nonzero()[:, 0].tolist():
            chances[row, plain.token_of(index)] = own_V[index]
    return chances


def chance_of(counts: Counter[int], expected_V: torch.Tensor) -> float:
    """The p-value of a chi-square test; tokens that are too rare for it are counted together."""
    observed = np.array([counts[token] for token in range(VOCAB)], dtype=float)
    expected = expected_V.numpy()
    assert not observed[expected == 0].any(), "a token that the target never says"
    often = expected >= 5
    pairs = [(observed[often], expected[often])]
    if expected[~often].sum() >= 5:
        pairs.append((observed[~often].sum(keepdims=True), expected[~often].sum(keepdims=True)))
    seen, wanted = (np.concatenate(part) for part in zip(*pairs, strict=True))
    return float(stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue)


@pytest.mark.trap("E4", "E14")
@pytest.mark.parametrize(
    ("drafter", "rejection"),
    [
        ("draft_model", "standard"),
        ("draft_model", "block"),
        ("draft_model", "auto"),
        pytest.param("eagle", "standard", marks=pytest.mark.more),
        ("eagle3", "standard"),
        pytest.param("eagle3", "block", marks=pytest.mark.more),
        pytest.param("mtp", "standard", marks=pytest.mark.more),
        ("dspark", "standard"),
        *(
            pytest.param(x, "standard", marks=pytest.mark.more)
            for x in ("dflash", "dflash2", "peagle", "pard")
        ),
    ],
)
def test_probabilistic_drafts_keep_the_targets_distribution(
    workshop: Workshop, drafter: str, rejection: str
) -> None:
    """Three tokens of many seeds, in one batch with greedy rows.

    A head's training magnifies the rounding of the CPU that it runs on, so how many drafts are
    accepted differs between machines. What the references of target and drafter expect does too.
    """
    spec = {**(spec_of(drafter, workshop, 3) or {}), "draft_sample_method": "probabilistic"}
    if rejection == "auto":  # standard; k depends on what earlier requests had accepted
        auto = {"num_speculative_tokens": "auto", "max_num_speculative_tokens": 3}
        spec = {**spec, **auto, "adaptive": True}
    else:
        spec["rejection_sample_method"] = rejection
    prompt, count = PROMPTS[11], 1500
    params = [
        SamplingParams(seed=seed, max_tokens=3, top_k=6, ignore_eos=True) for seed in range(count)
    ] + [SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)] * 20
    options = {"max_num_seqs": 64, "max_num_batched_tokens": 1024}
    outputs = run(workshop, [prompt] * len(params), params, spec, **options)
    drafted = [one[0] for one in tokens(outputs)]
    assert drafted[count:] == [workshop.expected("llama")[11][:3]] * 20
    begun = Counter(tuple(one[:length]) for one in drafted[:count] for length in range(3))
    for length in range(3):
        starts = [start for start in begun if len(start) == length]
        texts = [[*prompt, *start] for start in starts]
        weight_N = torch.tensor([begun[start] for start in starts], dtype=torch.float64)
        target_NV = target_chances(workshop, texts)
        counts = Counter(one[length] for one in drafted[:count])
        assert chance_of(counts, weight_N @ target_NV) > 1e-6, f"token {length}"
        if rejection == "auto":
            assert sum(o.metrics.num_draft_tokens for o in outputs[:count]) > 0
        elif length == 1:  # the one token that is drafted: a third is left for the bonus
            draft_NV = draft_chances(workshop, drafter, texts)
            overlap_N = torch.minimum(target_NV, draft_NV).sum(-1)
            accepted = sum(o.metrics.num_accepted_tokens for o in outputs[:count])
            deviation = float(weight_N @ (overlap_N * (1 - overlap_N))) ** 0.5
            assert abs(accepted - float(weight_N @ overlap_N)) < 5 * deviation + 1
            assert sum(o.metrics.num_draft_tokens for o in outputs[:count]) == count


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize(("length", "most"), [(1.0, 0), (1.25, 1), (2.5, 2), (4.0, 3)])
def test_synthetic_acceptance_has_the_asked_mean_length(
    workshop: Workshop, length: float, most: int, adaptive: bool
) -> None:
    """Every step accepts `most` drafts or one fewer, and k stays even where few are accepted."""
    forced = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
    spec = draft_model(workshop, 3, **forced) | {"adaptive": adaptive}
    params = [
        SamplingParams(temperature=0, seed=i, max_tokens=100, ignore_eos=True) for i in range(12)
    ]
    with tiny_llm(workshop, spec, enable_prefix_caching=False) as llm:
        prompts = [{"prompt_token_ids": PROMPTS[2]}] * 12
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.get_metrics()
    assert len(stats.accepted_per_position) == most
    # The last window of a request has room for fewer drafts, and may be cut.
    whole = stats.num_drafts - 3 * len(outputs)
    assert all(count >= whole for count in stats.accepted_per_position[:-1])
    assert stats.num_draft_tokens >= 3 * whole
    emitted = sum(len(o.outputs[0].token_ids) - 1 for o in outputs)
    steps = sum(o.metrics.num_steps - 1 for o in outputs)
    assert emitted / steps == pytest.approx(length, abs=0.08)


@pytest.mark.parametrize("k", [3, "auto"])
def test_a_request_may_bring_its_own_synthetic_rates(workshop: Workshop, k: object) -> None:
    """Also in a slot whose former owner had others."""
    forced = {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.0, 0.0, 0.0],
    }
    spec = {**draft_model(workshop, 3, **forced), "num_speculative_tokens": k, "adaptive": True}
    if k == "auto":
        spec["max_num_speculative_tokens"] = 3
    owns = [None, [1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], None]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=120,
            ignore_eos=True,
            speculative=None if own is None else {"synthetic_acceptance_rates": own},
        )
        for own in owns
    ]
    outputs = run(workshop, [PROMPTS[2]] * 5, params, spec, max_num_seqs=1)
    accepted = [o.metrics.num_accepted_tokens for o in outputs]
    drafted = [o.metrics.num_draft_tokens for o in outputs]
    assert [a > 0 for a in accepted] == [False, True, False, True, False]
    if k == 3:  # what `auto` drafts depends on the times of steps
        assert accepted[3] == pytest.approx(drafted[3], abs=3)
        assert 3 * accepted[1] == pytest.approx(2 * drafted[1], abs=6)


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3"])
def test_requests_longer_than_the_draft_go_on_without_drafts(
    workshop: Workshop, drafter: str
) -> None:
    """A prompt that is longer gets none; a request that grows gets them up to the limit; a later
    request that hits its pages drafts as well as without the hit."""
    spec = spec_of(drafter, workshop, 3) or {}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [PROMPTS[5] + PROMPTS[4], PROMPTS[2], PROMPTS[2]]
    limit = len(PROMPTS[2]) + 12
    assert len(prompts[0]) > limit
    options: dict[str, Any] = {"max_num_seqs": 1, "block_size": 4}
    short = run(workshop, prompts, params, {**spec, "max_model_len": limit}, **options)
    whole = run(workshop, prompts, params, spec, **options)
    assert tokens(short) == tokens(whole) == tokens(run(workshop, prompts, params, **options))
    drafted = [o.metrics.num_draft_tokens for o in short]
    assert drafted[0] == 0
    assert 0 < drafted[1] < whole[1].metrics.num_draft_tokens
    # One token a step from the limit on; the window that reaches it may pass it, and so may the
    # one that was launched before its result was read.
    assert short[1].metrics.num_steps >= 40 - 12 - 2 * 4
    assert short[2].num_cached_tokens > 0
    assert short[2].metrics.num_accepted_tokens == short[1].metrics.num_accepted_tokens


def test_a_request_names_the_loaded_drafter_or_none(workshop: Workshop) -> None:
    def asked(**speculative: Any) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=20, speculative=speculative)

    params = [asked(method="ngram"), asked(method="none"), asked(num_speculative_tokens=1)]
    outputs = run(workshop, [PROMPTS[2]] * 3, params, NGRAM)
    assert outputs[0].metrics.num_draft_tokens > 0
    assert outputs[1].metrics.num_draft_tokens == 0
    assert outputs[2].metrics.num_draft_tokens <= outputs[2].metrics.num_steps
    for spec, loaded in ((NGRAM, "ngram"), (None, "none")):
        with pytest.raises(InvalidRequest, match=f"use a loaded drafter or 'none': {loaded}"):
            run(workshop, [PROMPTS[2]], asked(method="eagle3"), spec)


@pytest.mark.trap("G3")
def test_drafts_after_a_prefix_hit_are_as_good_as_without(workshop: Workshop) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    spec = draft_model(workshop, 3)
    prompts = [PROMPTS[5]] * 4
    hits = run(workshop, prompts, params, spec, max_num_seqs=1)
    cold = run(workshop, prompts, params, spec, max_num_seqs=1, enable_prefix_caching=False)
    assert tokens(hits) == tokens(cold)
    assert [o.num_cached_tokens > 0 for o in hits] == [False, True, True, True]
    accepted = {o.metrics.num_accepted_tokens for o in [*hits, *cold]}
    assert len(accepted) == 1, f"acceptance differs after a hit: {accepted}"


@pytest.mark.trap("I32")
def test_accepted_counts_are_drafts_and_never_the_bonus(workshop: Workshop) -> None:
    """A draft that is the target itself is always right: accepted = emitted - one per step."""
    spec = {**draft_model(workshop, 3), "model": workshop.target_folder("llama")}
    params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    (output,) = run(workshop, PROMPTS[2:3], params, spec)
    metrics = output.metrics
    assert metrics.num_accepted_tokens == 25 - metrics.num_steps
    # One token comes from the prompt, then windows of 4 tokens: 24 = 6 x (3 drafts + bonus).
    assert metrics.num_steps == 7
    assert metrics.num_draft_tokens == metrics.num_accepted_tokens == 18
