"""The engine's loop over a real runner in this thread: for tests that look inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.messages import StepMessage, decode
from paceline.request import EngineRequest, SamplingParams
from paceline.runner.runner import StepRunner
from paceline.runner.startup import build_runner
from paceline.scheduler.events import TokenConstraint
from paceline.step import Runner
from tests.e2e.engines import folder_for
from tests.e2e.ladder import Workshop


def tiny_engine(
    workshop: Workshop,
    spec: dict[str, Any] | None = None,
    *,
    delay: Callable[[str], None] | None = None,
    **options: Any,
) -> tuple[Engine, StepRunner, dict[int, list[int]]]:
    """An engine, its runner, and the tokens that it publishes by uid."""
    config = tiny_engine_config(workshop, spec, **options)
    runner = build_runner(config, lambda name, share: None)
    assert isinstance(runner, StepRunner)
    engine, published = listened_to(runner, config, delay=delay)
    return engine, runner, published


def tiny_engine_config(
    workshop: Workshop, spec: dict[str, Any] | None = None, **options: Any
) -> EngineConfig:
    defaults: dict[str, Any] = {
        "model": folder_for(workshop, spec),
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "cpu_threads": 1,
    }
    return EngineConfig.from_keywords(speculative_config=spec, **{**defaults, **options})


def listened_to(
    runner: Runner,
    config: EngineConfig,
    *,
    delay: Callable[[str], None] | None = None,
) -> tuple[Engine, dict[int, list[int]]]:
    """An engine over `runner`, and the tokens that it publishes by uid."""
    published: dict[int, list[int]] = {}

    def publish(data: bytes) -> None:
        message = decode(data)
        assert isinstance(message, StepMessage)
        result = message.result
        for uid, count, row in zip(
            result.uid_B.tolist(),
            result.count_B.tolist(),
            result.token_BW.tolist(),
            strict=True,
        ):
            if uid >= 0:  # else the row was dropped
                published.setdefault(uid, []).extend(row[:count])

    return Engine(runner, config, publish, delay=delay), published


def request(uid: int, prompt: Sequence[int], **params: Any) -> EngineRequest:
    values = {"temperature": 0.0, "max_tokens": 20, "seed": uid, "detokenize": False, **params}
    params_of = SamplingParams(**values)
    return EngineRequest(
        uid=uid,
        prompt_token_ids=list(prompt),
        params=params_of,
        eos_token_ids=() if params_of.ignore_eos else (2,),
    )


def finish(engine: Engine, limit: int = 5000) -> None:
    for _ in range(limit):
        if not engine.turn():
            return
    raise AssertionError(f"the engine did not finish in {limit} turns")


def add_all(
    engine: Engine,
    requests: Sequence[EngineRequest],
    constraints: dict[int, TokenConstraint] | None = None,
) -> None:
    for one in requests:
        engine.add(one, constraint=(constraints or {}).get(one.uid))
