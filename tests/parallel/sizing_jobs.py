"""What single ranks do in tests/parallel/test_sizing.py: start, and say how large they became."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig
from paceline.parallel.placement import layout_of
from paceline.runner.startup import build_runner
from paceline.step import RunnerInfo
from tests.parallel.ranks import place_in


def start(rank: int, folder: Path) -> dict[str, RunnerInfo]:
    """plan.json: options by name of the case; `bytes` are of each rank's KV cache."""
    cases: dict[str, dict[str, Any]] = json.loads((folder / "plan.json").read_text())
    found = {}
    for name, options in cases.items():
        own = {**options, "kv_cache_memory_bytes": options["kv_cache_memory_bytes"][rank]}
        config = EngineConfig.from_keywords(**own)
        meet = folder / name
        meet.mkdir(exist_ok=True)
        place = place_in(meet, rank, layout_of(config))
        runner = build_runner(config, lambda stage, share: None, place)
        found[name] = runner.info
        runner.close()
    return found
