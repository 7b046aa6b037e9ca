"""A logits processor of yours. This one forbids tokens that the request names.

Offline: `python examples/custom_processor.py`. With a server, from the root of the checkout:
`PYTHONPATH=. paceline serve --logits-processors examples.custom_processor:Forbid`, and in a request
`"logits_processors": ["examples.custom_processor:Forbid"], "extra_args": {"forbid": [11, 42]}`.
"""

import sys
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams

NAME = "examples.custom_processor:Forbid"


class Forbid:
    """The engine builds it once, and calls it for each position of each request that names it."""

    def __init__(self, vocab_size: int, device: Any) -> None:
        self._vocab_size = vocab_size

    def __call__(self, logits_V: Any, slot: Any, position: int) -> Any:
        logits_V[slot.extra_args["forbid"]] = float("-inf")
        return logits_V


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the engine process imports `examples`
    with LLM(logits_processors=[NAME]) as llm:
        plain = SamplingParams(temperature=0, max_tokens=12)
        first = llm.generate(["The capital of France is"], plain)[0].outputs[0]
        forbidden = plain.replace(
            logits_processors=[NAME], extra_args={"forbid": [first.token_ids[0]]}
        )
        second = llm.generate(["The capital of France is"], forbidden)[0].outputs[0]
        print("plain:    ", repr(first.text))
        print("forbidden:", repr(second.text))
        assert first.token_ids[0] not in second.token_ids
