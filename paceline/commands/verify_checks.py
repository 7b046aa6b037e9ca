"""The checks of `paceline verify`: each asks a target and says whether one promise holds.

Starts no engine and prints nothing. A check that compared nothing never says that it holds.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import takewhile
from typing import Any

from paceline.commands.prompts import PromptRecord
from paceline.commands.verify_statistics import (
    MIN_EXPECTED,
    chi_square,
    chi_square_tail,
    excess,
)
from paceline.commands.verify_target import About, Ask, Load, Reply, Target
from paceline.config import EngineConfig

# Largest difference of two logprobs that rounding may turn around, by dtype: two steps of the
# type between 16 and 32, where logits are. Other types compute rows the same in every batch.
TIE_TOLERANCE = {"bfloat16": 0.25, "float16": 0.03125}
# A correct engine has a lower p-value once in a million runs. The tail of the chi-square is not
# exact where few draws are expected in a cell; the promise is one false alarm in 100,000 runs.
SIGNIFICANCE = 1e-6
MAX_BUBBLE = 0.05  # of device time, on a GPU
# With as many tokens as logprobs are given, the probabilities are known at any temperature. At a
# low one, drafts of a lookup are accepted too.
_DRAW_TEMPERATURE = 0.8
_DRAW_TOKENS = 4
_ECHO_TOKENS = 24
_NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_NO_DRAFTS = {"num_speculative_tokens": 0}


class Status(StrEnum):
    HOLDS = "holds"
    FAILS = "does not hold"
    NOT_CHECKED = "not checked"
    NOT_NEEDED = "does not apply"


@dataclass(frozen=True)
class Plot:
    """See observe.plots.bars."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Result:
    status: Status
    text: str
    figures: dict[str, Any] = field(default_factory=dict)
    plots: tuple[Plot, ...] = ()


@dataclass(frozen=True)
class Divergence:
    """The first token that differs. `margin` is the logprob of the likeliest token less that of
    the less likely of both, without drafts; None: the expected one is not among the likeliest."""

    answer: int
    position: int
    expected: int | None
    got: int | None
    margin: float | None = None


@dataclass
class Proof:
    """What all checks share. `target` changes; what the first one answered is kept."""

    target: Target
    prompts: list[list[int]]
    max_tokens: int
    concurrency: int
    num_draws: int
    max_bubble: float | None
    _load: Load | None = None

    @property
    def about(self) -> About:
        return self.target.about

    @property
    def tolerance(self) -> float:
        return TIE_TOLERANCE.get(self.about.dtype, 0.0)

    @cached_property
    def greedy_asks(self) -> list[Ask]:
        """Each prompt, and some repeated over several pages: the cache and lookups find them."""
        room = (self.about.max_model_len or 1 << 30) - self.max_tokens - 1
        size = min(3 * self.about.page_size + 1, room)
        long = [
            (prompt * (size // max(1, len(prompt)) + 1))[: max(size, len(prompt))]
            for prompt in self.prompts[:4]
        ]
        params = {"temperature": 0.0, "max_tokens": self.max_tokens, **_NEUTRAL}
        return [Ask(prompt, params) for prompt in [*self.prompts, *long]]

    @cached_property
    def record(self) -> tuple[list[Reply], list[Reply]]:
        """Greedy answers of the first engine with drafts, twice; the load is of the second time."""
        first = self.ask_greedy()
        self.target.take_load()
        second = self.ask_greedy()
        self._load = self.target.take_load()
        return first, second

    @property
    def has_record(self) -> bool:
        return "record" in vars(self)

    @property
    def first_load(self) -> Load | None:
        assert self.record
        return self._load

    def ask_greedy(self) -> list[Reply]:
        return self.target.ask(self.greedy_asks, self.concurrency)

    @cached_property
    def without_drafts(self) -> list[Reply]:
        return self.target.ask(changed(self.greedy_asks, _NO_DRAFTS), self.concurrency)

    def logprobs_after(self, tokens: Sequence[int], probe: int, count: int) -> dict[int, float]:
        """Raw logprobs of the `count` likeliest next tokens and of `probe`, without drafts."""
        params = {"prompt_logprobs": count, "max_tokens": 1, "temperature": 0.0, **_NO_DRAFTS}
        return self.target.ask([Ask([*tokens, probe], params)])[0].last_logprobs


@dataclass(frozen=True)
class Check:
    """`change` makes the configuration of the second engine that a check needs."""

    name: str
    shows: str
    run: Callable[[Proof], Result]
    change: Callable[[EngineConfig, About], EngineConfig | Result] | None = None


def changed(asks: Sequence[Ask], params: Mapping[str, Any]) -> list[Ask]:
    return [replace(ask, params=ask.params | dict(params)) for ask in asks]


def count_drafts(replies: Sequence[Reply]) -> tuple[int, int]:
    """Verified and accepted ones."""
    return sum(r.num_drafts for r in replies), sum(r.num_accepted for r in replies)


def differences(expected: Sequence[Reply], got: Sequence[Reply]) -> list[Divergence]:
    found = []
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if at < max(len(one.token_ids), len(other.token_ids)):
            ends = (dict(enumerate(reply.token_ids)).get(at) for reply in (one, other))
            found.append(Divergence(number, at, *ends))
    return found


def compare_greedy(
    proof: Proof, expected: Sequence[Reply], got: Sequence[Reply], asks: Sequence[Ask]
) -> Result:
    """Equal tokens; in half precision a near tie may turn around."""
    judged = []
    for one in differences(expected, got):
        margin = None
        if one.expected is not None and one.got is not None:
            context = [*asks[one.answer].prompt, *expected[one.answer].token_ids[: one.position]]
            table = proof.logprobs_after(context, one.got, min(5, proof.about.max_logprobs))
            if one.expected in table:
                margin = max(table.values()) - min(table[one.got], table[one.expected])
        judged.append(replace(one, margin=margin))
    num_tokens = sum(len(reply.token_ids) for reply in expected)
    figures = {
        "answers": len(expected),
        "tokens": num_tokens,
        "tie_tolerance": proof.tolerance,
        "divergences": [vars(one) for one in judged],
    }
    wrong = [one for one in judged if one.margin is None or one.margin >= proof.tolerance]
    if wrong:
        one = wrong[0]
        shown = "large" if one.margin is None else f"{one.margin:.3g}"
        text = (
            f"{len(wrong)} of {len(expected)} answers differ; answer {one.answer}, token "
            f"{one.position}: {one.got} instead of {one.expected}, margin {shown} "
            f"(tolerance {proof.tolerance:g})"
        )
        return Result(Status.FAILS, text, figures)
    text = f"{len(expected)} answers, {num_tokens} tokens equal"
    if judged:
        worst = max(one.margin or 0.0 for one in judged)
        text = (
            f"{len(expected)} answers, {len(judged)} leave at a near tie: margin {worst:.3g} "
            f"at most, tolerance {proof.tolerance:g}"
        )
    return Result(Status.HOLDS, text, figures)


# ---- on the engine as it is configured


def greedy(proof: Proof) -> Result:
    if not proof.about.drafters:
        return Result(Status.NOT_NEEDED, "no drafter")
    drafted = proof.record[0]
    result = compare_greedy(proof, proof.without_drafts, drafted, proof.greedy_asks)
    num_drafts, num_accepted = count_drafts(drafted)
    figures = result.figures | {"drafts": num_drafts, "accepted_drafts": num_accepted}
    counts = f"{num_accepted} of {num_drafts} drafts accepted"
    by_position = proof.first_load.accepted_per_position if proof.first_load else ()
    accepted = {"accepted": {str(i): count for i, count in enumerate(by_position, 1)}}
    plots = (Plot("Accepted drafts by position", "draft", "drafts", accepted),)
    if result.status is Status.HOLDS and not num_accepted:
        text = f"{counts}: equal tokens show nothing; give other --prompts or more --max-tokens"
        return Result(Status.NOT_CHECKED, text, figures)
    return Result(result.status, f"{result.text}; {counts}", figures, plots if by_position else ())


def seeds(proof: Proof) -> Result:
    """A seed gives its tokens in every batch, and with and without drafts."""
    params = {"temperature": 1.0, "max_tokens": proof.max_tokens, **_NEUTRAL}
    asks = [
        Ask(prompt, params | {"seed": 1000 * number + seed})
        for number, prompt in enumerate(proof.prompts)
        for seed in range(2)
    ]

    def again(more: Mapping[str, Any]) -> list[Reply]:
        """In other batches: from the last to the first."""
        return proof.target.ask(changed(asks[::-1], more), proof.concurrency)[::-1]

    first = proof.target.ask(asks, proof.concurrency)
    pairs = {"the same seed in another batch": (first, again({}))}
    plain = proof.target.ask(changed(asks, _NO_DRAFTS), proof.concurrency)
    if proof.about.drafters and proof.about.draft_sampling != "probabilistic":
        pairs["with and without drafts"] = (plain, first)
    figures: dict[str, Any] = {"answers": len(asks)}
    for name, (expected, got) in pairs.items():
        found = differences(expected, got)
        figures[name] = [vars(one) for one in found]
        if not found:
            continue
        text = f"{name}: {len(found)} of {len(asks)} answers differ"
        if name != "the same seed in another batch" and not proof.about.draft_sampling:
            text += ", as with sampled drafts; the server does not say whether it has them"
            return Result(Status.NOT_CHECKED, text, figures)
        if not proof.tolerance:
            return Result(Status.FAILS, text, figures)
        baseline = differences(plain, again(_NO_DRAFTS))
        p_value = excess(_exposure(found, expected), _exposure(baseline, plain))
        figures[f"{name}, p-value"] = p_value
        text += f", {len(baseline)} without drafts in another batch: p = {p_value:.2g}"
        if p_value < SIGNIFICANCE:
            return Result(Status.FAILS, text, figures)
        figures["rounding"] = text
    num_tokens = sum(len(reply.token_ids) for reply in first)
    text = figures.get("rounding", f"{len(asks)} answers, {num_tokens} tokens equal")
    return Result(Status.HOLDS, f"{text} ({' and '.join(pairs)})", figures)


def _exposure(found: Sequence[Divergence], replies: Sequence[Reply]) -> tuple[int, int]:
    """Divergences, and tokens until the first one of each answer."""
    ends = {one.answer: one.position + 1 for one in found}
    return len(found), sum(ends.get(i, len(reply.token_ids)) for i, reply in enumerate(replies))


def sampled_drafts(proof: Proof) -> Result:
    """Draws with drafts against the exact probabilities, which logprobs without drafts give."""
    if not proof.about.drafters:
        return Result(Status.NOT_NEEDED, "no drafter")
    params = _NEUTRAL | {"temperature": _DRAW_TEMPERATURE, "top_k": proof.about.max_logprobs}
    params |= {"max_tokens": _DRAW_TOKENS, "ignore_eos": True}

    def draw(prompt: Sequence[int], count: int) -> list[Reply]:
        return proof.target.ask([Ask(prompt, params | {"seed": n}) for n in range(count)])

    def contested(prompt: Sequence[int]) -> tuple[int, int]:
        pilot = draw(prompt, 4)
        drafts, accepted = count_drafts(pilot)
        return min(accepted, drafts - accepted), drafts

    # Also within answers: there a lookup finds drafts that the model may accept.
    starts = [ask.prompt for ask in proof.greedy_asks]
    answers = [reply.token_ids[:-_DRAW_TOKENS] for reply in proof.record[0]]
    starts += [[*start, *answer] for start, answer in zip(starts, answers, strict=True)]
    prompt = max(starts, key=contested)
    replies = draw(prompt, proof.num_draws)
    drafts, accepted = count_drafts(replies)
    groups = [
        (start, counts, _probabilities(proof, [*prompt, *start], counts))
        for start, counts in _common_starts(replies)
    ]
    tests = [chi_square(counts, chances) for _, counts, chances in groups]
    statistic, freedom = sum(t[0] for t in tests), sum(t[1] for t in tests)
    figures = {
        "draws": len(replies),
        "drafts": drafts,
        "accepted_drafts": accepted,
        "chi_square": statistic,
        "degrees_of_freedom": freedom,
        "contexts": len(groups),
        "significance": SIGNIFICANCE,
    }
    counts_text = f"{len(replies)} draws, {accepted} of {drafts} drafts accepted"
    if not accepted or not freedom:
        why = "no draft was accepted" if not accepted else "the model is certain of each token"
        return Result(Status.NOT_CHECKED, f"{why} in {counts_text}; give other --prompts", figures)
    p_value = chi_square_tail(statistic, freedom)
    status = Status.FAILS if p_value < SIGNIFICANCE else Status.HOLDS
    text = f"{counts_text}: chi-square {statistic:.1f} with {freedom} degrees, p = {p_value:.2g}"
    return Result(status, text, figures | {"p_value": p_value}, (_draws_plot(groups),))


_Group = tuple[tuple[int, ...], Counter[int], dict[int, float]]


def _common_starts(replies: Sequence[Reply]) -> list[tuple[tuple[int, ...], Counter[int]]]:
    """What came after each start of an answer that many draws share."""
    after: dict[tuple[int, ...], Counter[int]] = {}
    for reply in replies:
        for length in range(len(reply.token_ids)):
            start = tuple(reply.token_ids[:length])
            after.setdefault(start, Counter())[reply.token_ids[length]] += 1
    enough = [(s, c) for s, c in after.items() if c.total() >= 4 * MIN_EXPECTED]
    return sorted(enough, key=lambda item: -item[1].total())[:24]


def _probabilities(proof: Proof, tokens: Sequence[int], counts: Counter[int]) -> dict[int, float]:
    probe = counts.most_common(1)[0][0]
    table = proof.logprobs_after(tokens, probe, proof.about.max_logprobs)
    best = sorted(table.items(), key=lambda item: -item[1])[: proof.about.max_logprobs]
    weights = {token: math.exp(logprob / _DRAW_TEMPERATURE) for token, logprob in best}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def _draws_plot(groups: Sequence[_Group]) -> Plot:
    """The context with drafts that has the most draws."""
    _, counts, chances = next((g for g in groups if g[0]), groups[0])
    best = sorted(chances, key=lambda token: -chances[token])[:10]
    expected = {str(token): chances[token] * counts.total() for token in best}
    series = {"expected": expected, "drawn": {str(token): float(counts[token]) for token in best}}
    return Plot("Draws after the most common start", "token", "draws", series)


def echo(proof: Proof) -> Result:
    """Requests with an identifier each, together with drafts, and alone without."""
    rng = random.Random(7)
    names = [f"{rng.getrandbits(40):010x}" for _ in range(proof.concurrency)]
    params = {"temperature": 0.0, "max_tokens": _ECHO_TOKENS, **_NEUTRAL}
    texts = [f"Key: {name}\nKey: {name}\nKey: {name}\nKey:" for name in names]
    asks = [Ask(proof.target.encode(PromptRecord(text=text)), params) for text in texts]
    together = proof.target.ask(asks, len(asks))
    alone = proof.target.ask(changed(asks, _NO_DRAFTS), 1)
    result = compare_greedy(proof, alone, together, asks)
    own = sum(name in reply.text for name, reply in zip(names, together, strict=True))
    others = [
        (i, j)
        for i, reply in enumerate(together)
        for j, name in enumerate(names)
        if i != j and name in reply.text
    ]
    figures = result.figures | {"own_identifier": own, "identifier_of_another": others}
    text = f"{result.text}; {own} of {len(names)} repeat their identifier"
    if others:
        text = f"answer {others[0][0]} has the identifier of request {others[0][1]}; {text}"
        return Result(Status.FAILS, text, figures)
    return Result(result.status, text, figures)


def bubble(proof: Proof) -> Result:
    load = proof.first_load
    if load is None or load.idle_s + load.busy_s <= 0.0:
        why = "no device times: a server tells them at /v1/live (not with --no-page)"
        return Result(Status.NOT_CHECKED, why)
    share = load.idle_s / (load.idle_s + load.busy_s)
    limit = proof.max_bubble
    if limit is None and proof.about.device not in ("", "cpu"):
        limit = MAX_BUBBLE
    text = f"device idle {share:.2%} of {load.idle_s + load.busy_s:.2f} s"
    figures = {"idle_share": share, "limit": limit, "steps": len(load.steps)}
    each = dict(enumerate(load.steps[:: max(1, len(load.steps) // 60)]))
    series = {"idle": {str(i): 1e3 * t.idle_s for i, t in each.items()}}
    series["busy"] = {str(i): 1e3 * t.busy_s for i, t in each.items()}
    plots = (Plot("Device time before and in steps", "step", "ms", series),) if each else ()
    if limit is None:
        is_server = not proof.about.device
        why = "--max-bubble judges it" if is_server else "judged on a GPU, or with --max-bubble"
        status = Status.NOT_CHECKED if is_server else Status.NOT_NEEDED
        return Result(status, f"{text}; {why}", figures, plots)
    status = Status.HOLDS if share <= limit else Status.FAILS
    return Result(status, f"{text}, limit {limit:.0%}", figures, plots)


# ---- on a second engine


def as_first_engine(proof: Proof) -> Result:
    return _compare_engines(proof, (proof.ask_greedy(), proof.ask_greedy()))


def prefix_cache(proof: Proof) -> Result:
    got = (proof.ask_greedy(), proof.ask_greedy())
    result = _compare_engines(proof, got)
    hits = [sum(reply.num_cached for reply in [*a, *b]) for a, b in (proof.record, got)]
    figures = result.figures | {"cached_tokens": hits}
    if min(hits):
        return Result(Status.FAILS, f"the cache is off and has {min(hits)} hits", figures)
    if result.status is Status.HOLDS and not max(hits):
        return Result(Status.NOT_CHECKED, "no prompt hit the cache; give longer --prompts", figures)
    return Result(result.status, f"{result.text}; {max(hits)} tokens from the cache", figures)


def _compare_engines(proof: Proof, got: tuple[list[Reply], list[Reply]]) -> Result:
    expected, asks = proof.record, [*proof.greedy_asks, *proof.greedy_asks]
    return compare_greedy(proof, [*expected[0], *expected[1]], [*got[0], *got[1]], asks)


def _other_cache(config: EngineConfig, about: About) -> EngineConfig:
    cache = replace(config.cache, enable_prefix_caching=not config.cache.enable_prefix_caching)
    return replace(config, cache=cache)


def _other_run_ahead(config: EngineConfig, about: About) -> EngineConfig:
    depth = 0 if config.scheduler.depth else 1
    scheduler = replace(config.scheduler, run_ahead=depth, async_scheduling=None)
    return replace(config, scheduler=scheduler)


def _no_syncs(config: EngineConfig, about: About) -> EngineConfig | Result:
    if about.device == "cpu":
        return Result(Status.NOT_NEEDED, "a CPU has no queue that the host could wait for")
    return replace(config, device=replace(config.device, check_syncs=True))


def _checked_collectives(config: EngineConfig, about: About) -> EngineConfig | Result:
    device = config.device
    if device.tensor_parallel_size * device.data_parallel_size == 1:
        return Result(Status.NOT_NEEDED, "one rank")
    if config.is_on_several_machines:
        return Result(Status.NOT_CHECKED, "ranks are compared on one machine only")
    return replace(config, device=replace(device, check_collectives=True))


CHECKS = (
    Check("greedy", "greedy tokens are equal with and without drafts", greedy),
    Check("bubble", "the device does not wait for the host between steps", bubble),
    Check("seeds", "a seed gives the same tokens, with or without drafts", seeds),
    Check("chi-square", "sampled drafts keep the model's probabilities", sampled_drafts),
    Check("echo", "requests that run together do not mix", echo),
    Check("prefix cache", "tokens are equal with the cache on and off", prefix_cache, _other_cache),
    Check(
        "run-ahead", "tokens are equal with run-ahead 0 and 1", as_first_engine, _other_run_ahead
    ),
    Check("host sync", "no step makes the host wait for the GPU", as_first_engine, _no_syncs),
    Check(
        "collectives", "all ranks agree on each collective", as_first_engine, _checked_collectives
    ),
)
