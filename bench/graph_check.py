"""Are the tokens of captured graphs those of eager steps? Greedy, the same prompts, two engines.

In bf16 two orders of the same sums may differ in the last bit (another bucket of rows has another
tile), so a first difference is forgiven where the eager run had both tokens within a margin;
anything else is a wrong step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 4, 128, 32
NUM_TRIES = 3  # to get the same answers from the eager engine again
NUM_RANKED = 10  # with random weights more than two tokens may be within the margin
# One step of bf16 between 8 and 16, where the best logits of these models lie.
MARGIN = 0.0625


@dataclass(frozen=True)
class Answers:
    """Of one engine: tokens per prompt and, where they were asked for, the best per token."""

    tokens: list[list[int]]
    logprobs: list[list[dict[int, float]]] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """Where one prompt's answers part."""

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
    """Where the graph's answers leave both eager runs.

    Prompts that come a moment later meet other steps, and their tokens may part within the margin:
    either run will do. How close it was is known of the second one alone.
    """
    first = {d.prompt: d for d in differences(plain, graph)}
    return [
        d if d.position >= first[d.prompt].position else first[d.prompt]
        for d in differences(ranked, graph)
        if d.prompt in first
    ]


@dataclass
class GraphCheck:
    """What the eager engine said, twice; `compare` asks the other one."""

    sampling: type[Any]
    prompts: list[list[int]]
    has_drafts: bool  # forced acceptance: then the target alone is asked too
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
        # A draft that acceptance forces into the output is the head's choice, whose margin no API
        # shows. Where only such tokens differ, the target's own must still agree.
        judged = "target" if self.has_drafts else "output"
        record["ok"] = record["output"]["within_margin"] or record[judged]["within_margin"]
        return record

    def _asked(self) -> dict[str, dict[str, Any]]:
        asked: dict[str, dict[str, Any]] = {"output": {}}
        if self.has_drafts:
            asked["target"] = {"num_speculative_tokens": 0}
        return asked
