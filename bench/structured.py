"""Structured output on this CPU: masks alone against masks with forced tokens.

The default model answers forty requests with a schema, one at a time. Each request runs both ways
in turn, so that a change of the machine's speed touches both. Tokens must be the same.

    python -m bench.structured [--limit N] [--rounds N] [--whitespace]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from paceline import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from paceline.engine.grammar_constraint import GrammarConstraint

SCHEMAS = Path(__file__).parent / "data" / "schemas_40.jsonl"
MAX_TOKENS = 256
_FORCED = GrammarConstraint.forced


def requests(limit: int) -> list[dict[str, Any]]:
    lines = SCHEMAS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:limit]]


def _force_nothing(self: GrammarConstraint) -> list[int]:
    return []


def answer(llm: LLM, request: dict[str, Any], *, forces: bool, compact: bool) -> RequestOutput:
    """The engine runs in this process, so the class decides whether it forces."""
    GrammarConstraint.forced = _FORCED if forces else _force_nothing  # type: ignore[method-assign]
    structured = StructuredOutputsParams(json=request["schema"], disable_any_whitespace=compact)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, structured_outputs=structured)
    question = f"{request['prompt']}\nAnswer as JSON."
    (output,) = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=40, help="number of schemas")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--whitespace", action="store_true", help="allow blanks and line breaks")
    arguments = parser.parse_args()
    chosen = requests(arguments.limit)
    times = {False: 0.0, True: 0.0}
    num_tokens = num_forced = num_finished = 0
    with LLM(engine_in_process=True, speculative_config=None) as llm:
        for request in chosen:  # compiles the schemas, fills the prefix cache
            answer(llm, request, forces=True, compact=not arguments.whitespace)
        for turn in range(arguments.rounds * len(chosen)):
            request, outputs = chosen[turn % len(chosen)], {}
            for forces in (False, True) if turn % 2 else (True, False):
                start = time.perf_counter()
                outputs[forces] = answer(
                    llm, request, forces=forces, compact=not arguments.whitespace
                )
                times[forces] += time.perf_counter() - start
            plain, forced = (outputs[forces].outputs[0] for forces in (False, True))
            assert plain.token_ids == forced.token_ids, f"{request['id']}: other tokens"
            num_tokens += len(plain.token_ids)
            num_forced += outputs[True].metrics.num_forced_tokens
            num_finished += plain.finish_reason == "stop"
    count = arguments.rounds * len(chosen)
    print(f"{count} answers, {num_tokens} tokens, {num_finished} ended by themselves")
    print(f"masks alone         {1e3 * times[False] / num_tokens:7.2f} ms per token")
    print(f"with forced tokens  {1e3 * times[True] / num_tokens:7.2f} ms per token")
    print(f"forced tokens {num_forced / num_tokens:.1%}, speed-up {times[False] / times[True]:.2f}")


if __name__ == "__main__":
    main()
