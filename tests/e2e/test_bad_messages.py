"""A submit that no front would send ends its own request; the engine and the others go on."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest

from paceline.engine.engine import Engine, run_engine
from paceline.engine.messages import Control, StepMessage, decode, encode, encode_submit
from paceline.request import Done, EngineRequest, SamplingParams
from paceline.runner.startup import build_runner
from tests.e2e.ladder import Workshop
from tests.e2e.loop import request, tiny_engine_config
from tests.tiny import VOCAB

PARAMS = SamplingParams(max_tokens=4, temperature=0.0, seed=1)


def crafted(
    prompt: list[int] | None = None, eos: Any = (), bad_words: Any = (), **values: Any
) -> bytes:
    params = PARAMS.replace_unchecked(**values)
    ids = [1, 2] if prompt is None else prompt
    return encode_submit(EngineRequest(7, ids, params, eos, bad_words))


@pytest.mark.parametrize(
    "bad",
    [
        crafted(prompt=[VOCAB]),
        crafted(prompt=[]),
        crafted(temperature="hot"),
        crafted(logit_bias={VOCAB: 1.0}),
        crafted(allowed_token_ids=(VOCAB,)),
        crafted(stop_token_ids=(1,) * 33),
        crafted(bad_words=((1,) * 9,)),
        crafted(eos=tuple(range(9))),
        crafted(logits_processors=("my:Own",)),
        crafted()[:-3],  # JSON that ends early
    ],
    ids=[
        "prompt id",
        "no prompt",
        "a word as number",
        "bias id",
        "allowed id",
        "stop ids",
        "bad word",
        "eos ids",
        "processor",
        "cut off",
    ],
)
def test_a_bad_submit_ends_its_request_and_not_the_engine(workshop: Workshop, bad: bytes) -> None:
    config = tiny_engine_config(workshop)
    runner = build_runner(config, lambda stage, fraction: None)
    inbox: SimpleQueue[bytes | None] = SimpleQueue()
    good = [encode_submit(request(uid, [3, 4, 5], max_tokens=4, ignore_eos=True)) for uid in (1, 2)]
    for frame in (good[0], bad, good[1], encode(Control.DRAIN)):
        inbox.put(frame)
    out = []
    try:
        run_engine(Engine(runner, config, lambda data: out.append(decode(data))), inbox)
    finally:
        runner.close()
    steps = [message for message in out if isinstance(message, StepMessage)]
    ended = [end for message in steps for end in message.events.ended]
    assert [(end.uid, end.done) for end in ended] == [(7, Done.ERROR)]
    tokens: dict[int, int] = {}
    for step in steps:
        for uid, count in zip(
            step.result.uid_B.tolist(), step.result.count_B.tolist(), strict=True
        ):
            tokens[uid] = tokens.get(uid, 0) + count
    assert tokens == {1: 4, 2: 4}
    assert out[-1] is Control.STOPPED
