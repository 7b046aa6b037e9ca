"""Compares greedy tokens of captured graphs with those of eager steps, on the same prompts.

In bf16 two orders of the same sums may differ in the last bit (another bucket of rows has another
tile). So a first difference is accepted if the eager run had both tokens within a margin; any other
difference is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 4, 128, 32
NUM_TRIES = 3  # to get the same answers from the eager engine again
NUM_RANKED = 10  # with random weights more than two tokens may be within the margin
# One step of bf16 between 8 and 16, the range of the best logits of these models.
MARGIN = 0.0625


@dataclass(frozen=True)
class Answers:
    """Answers of one engine: tokens per prompt and, if requested, the best logprobs per token."""

    tokens: list[list[int]]
    logprobs: list[list[dict[int, float]]] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """The first difference between two answers to one prompt."""

    prompt: int
    position: int
    gap: float  # between the two tokens in the eager run's logits; inf: not among its best

    def record(self) -> list[float | None]:
        """For JSON, which has no infinity."""
        return [self.prompt, self.position, round(self.gap, 4) if math.isfinite(self.gap) else None]


def answers(
    llm: Any, sampling: type[Any], prompts: Sequence[Sequence[int]], **more: Any
) -> Answers:
    params = sampling(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, **more
    )
    asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
    outputs = [output.outputs[0] for output in llm.generate(asked, params, use_tqdm=False)]
    logprobs = [
        [{token: entry.logprob for token, entry in place.items()} for place in output.logprobs]
        for output in outputs
        if output.logprobs
    ]
    return Answers([list(output.token_ids) for output in outputs], logprobs)


def differences(eager: Answers, graph: Answers) -> list[Difference]:
    found = []
    for prompt, (ours, theirs) in enumerate(zip(graph.tokens, eager.tokens, strict=True)):
        position = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), -1
        )
        if position >= 0:
            best = eager.logprobs[prompt][position] if eager.logprobs else {}
            a, b = (best.get(tokens[position], math.inf) for tokens in (theirs, ours))
            gap = abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf
            found.append(Difference(prompt, position, gap))
    return found


def parting(plain: Answers, ranked: Answers, graph: Answers) -> list[Difference]:
    """First differences of the graph's answers from both eager runs.

    Prompts that arrive a moment later run in other steps, so their tokens may differ within the
    margin: equality with either run is enough. Only the second run has logprobs.
    """
    first = {d.prompt: d for d in differences(plain, graph)}
    return [
        d if d.position >= first[d.prompt].position else first[d.prompt]
        for d in differences(ranked, graph)
        if d.prompt in first
    ]


@dataclass
class GraphCheck:
    """Two runs of the eager engine; `compare` runs the engine with graphs."""

    sampling: type[Any]
    prompts: list[list[int]]
    has_drafts: bool  # forced acceptance: then the target also runs without drafts
    margin: float = MARGIN
    _eager: dict[str, tuple[Answers, Answers]] = field(default_factory=dict)

    def learn(self, llm: Any) -> None:
        """From an engine without graphs."""
        for name, more in self._asked().items():
            plain = answers(llm, self.sampling, self.prompts, **more)
            for _ in range(NUM_TRIES):
                ranked = answers(llm, self.sampling, self.prompts, logprobs=NUM_RANKED, **more)
                if ranked.tokens == plain.tokens:
                    break
            self._eager[name] = (plain, ranked)

    def compare(self, llm: Any) -> dict[str, Any]:
        """The verdict as a record; "ok" says whether the case may go on."""
        record: dict[str, Any] = {"tokens": NUM_TOKENS, "prompts": len(self.prompts)}
        for name, more in self._asked().items():
            graph = answers(llm, self.sampling, self.prompts, **more)
            found = parting(*self._eager[name], graph)
            record[name] = {
                "equal": not found,
                "within_margin": all(d.gap <= self.margin for d in found),
                "differences": [d.record() for d in found],
            }
        # Forced acceptance emits drafts of the head, whose logprobs no API shows. If only such
        # tokens differ, the target's own tokens must still be equal.
        judged = "target" if self.has_drafts else "output"
        record["ok"] = record["output"]["within_margin"] or record[judged]["within_margin"]
        return record

    def _asked(self) -> dict[str, dict[str, Any]]:
        asked: dict[str, dict[str, Any]] = {"output": {}}
        if self.has_drafts:
            asked["target"] = {"num_speculative_tokens": 0}
        return asked
