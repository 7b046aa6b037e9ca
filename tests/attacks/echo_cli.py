"""`paceline` with the echo engine instead of a model: MODEL is its behaviour (tests/engine).

`paceline serve noisy` loads an engine that writes more log than a pipe holds.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace

from paceline.cli import main
from paceline.commands import loading
from paceline.config import EngineConfig
from paceline.engine.client import EngineClient
from paceline.parallel.placement import RankPlace
from paceline.step import Runner
from tests.engine.echo_client import FACTORY, echo_front
from tests.engine.echo_runner import build_echo

PIPE_BYTES = 1 << 16
NOISY = "noisy"


def build_noisy(
    config: EngineConfig, progress: Callable[[str, float], None], place: RankPlace
) -> Runner:
    for number in range(2 * PIPE_BYTES // 1000):
        logging.getLogger("paceline.tests").warning("%d %s", number, "x" * 1000)
        print("x" * 1000, file=sys.stderr)  # noqa: T201
    plain = replace(config, model=replace(config.model, model=""))
    return build_echo(plain, progress, place)


def load(config: EngineConfig) -> EngineClient:
    is_noisy = config.model.model == NOISY
    factory = f"{__spec__.name}:build_noisy" if is_noisy else FACTORY
    return EngineClient.start(config, factory=factory, front=echo_front())


if __name__ == "__main__":
    loading.start_engine = load
    sys.exit(main())
