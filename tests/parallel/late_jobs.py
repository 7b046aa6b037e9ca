"""What single ranks do in tests/parallel/test_late.py: an engine with grammars and host drafts."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.peers import LeadingRunner, follow
from paceline.parallel.placement import layout_of
from paceline.runner.startup import build_runner
from paceline.step import Runner
from tests.e2e.loop import finish, listened_to, request
from tests.e2e.test_forced import Stairs
from tests.parallel.factories import build_fixed
from tests.parallel.ranks import place_in

_TIMEOUT_S = 60.0


def answer(rank: int, folder: Path) -> dict[str, Any]:
    """Serve this rank's part of the requests; every second one has a grammar.

    plan.json: options of the engine, whether shapes are fixed, and prompts by replica.
    """
    asked = json.loads((folder / "plan.json").read_text())
    config = EngineConfig.from_keywords(**asked["options"])
    runner = leading_runner(config, rank, folder, is_fixed=asked["is_fixed"])
    if runner is None:
        return {}
    engine, published = listened_to(runner, config)
    grammars = _add(engine, asked["prompts"][rank if config.device.data_parallel_size > 1 else 0])
    finish(engine)
    runner.close()
    assert all(grammar.seen == published[uid] for uid, grammar in grammars.items())
    return {"tokens": published, "steps": engine.scheduler.num_steps}


def leading_runner(
    config: EngineConfig, rank: int, folder: Path, *, is_fixed: bool
) -> Runner | None:
    """The runner of a replica's first rank. None on other ranks: they have followed to the end."""
    place = place_in(folder, rank, layout_of(config))
    build: Any = build_fixed if is_fixed else build_runner
    runner: Runner = build(config, lambda stage, share: None, place)
    if not place.is_leader:
        with _connected(folder) as leader:
            follow(runner, leader, config.scheduler.depth, _TIMEOUT_S)
        runner.close()
        return None
    if config.device.tensor_parallel_size > 1:
        runner = LeadingRunner(runner, [_accepted(folder)], _TIMEOUT_S)
    return runner


def _add(engine: Engine, prompts: list[tuple[int, list[int]]]) -> dict[int, Stairs]:
    grammars = {uid: Stairs(12) for uid, _ in prompts if uid % 2}
    for uid, prompt in prompts:
        req = request(uid, prompt, ignore_eos=True, max_tokens=20)
        engine.add(req, constraint=grammars.get(uid))
    return grammars


def _accepted(folder: Path) -> socket.socket:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "plans"))
        listener.listen(1)
        listener.settimeout(_TIMEOUT_S)
        return listener.accept()[0]


def _connected(folder: Path) -> socket.socket:
    give_up_s = time.monotonic() + _TIMEOUT_S
    while True:
        leader = socket.socket(socket.AF_UNIX)
        try:
            leader.connect(str(folder / "plans"))
            return leader
        except (FileNotFoundError, ConnectionRefusedError):
            leader.close()
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.01)
