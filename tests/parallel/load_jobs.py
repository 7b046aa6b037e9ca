"""What single ranks do in tests/parallel/test_random_loads.py."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig
from tests.e2e.loop import listened_to
from tests.e2e.random_loads import Load, serve
from tests.parallel.late_jobs import leading_runner


def answer(rank: int, folder: Path) -> dict[str, Any]:
    """Serve this rank's part of the load in plan.json; a rank that follows does what it is told."""
    asked = json.loads((folder / "plan.json").read_text())
    load = Load(**asked["load"])
    for _, params, _ in load.requests:
        if "logit_bias" in params:  # JSON has no numbers as keys
            params["logit_bias"] = {int(k): v for k, v in params["logit_bias"].items()}
    config = EngineConfig.from_keywords(**load.options)
    runner = leading_runner(config, rank, folder, is_fixed=asked["is_fixed"])
    if runner is None:
        return {"tokens": {}, "aborted": []}
    engine, published = listened_to(runner, config)
    rng = random.Random(asked["seed"] * 2 + rank)
    aborted = serve(engine, load, asked["uids"][rank], rng)
    runner.close()
    return {"tokens": published, "aborted": sorted(aborted)}
