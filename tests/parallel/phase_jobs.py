"""What single ranks do in tests/parallel/test_phases.py: a real engine loop in this process."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from paceline.config import EngineConfig
from paceline.engine.engine import Engine, run_engine
from paceline.engine.messages import Control, StepMessage, decode, encode, encode_submit
from paceline.parallel.placement import layout_of
from paceline.request import EngineRequest, SamplingParams
from paceline.runner.startup import build_runner
from paceline.step import InFlightStep, StepPlan
from tests.parallel.ranks import place_in

_WINDOW_S, _NUM_WINDOWS = 1.0, 5


def record(rank: int, folder: Path) -> dict[str, Any]:
    """Serve the requests of this rank's replica and return what it did, collective by collective.

    plan.json: options of the engine, and (prompt, most tokens, k) of each replica's requests.
    """
    asked = json.loads((folder / "plan.json").read_text())
    config = EngineConfig.from_keywords(**asked["options"])
    place = place_in(folder, rank, layout_of(config))
    runner: Any = build_runner(config, lambda stage, share: None, place)
    tokens: dict[int, list[int]] = {}
    accepted = 0

    def take(data: bytes) -> None:
        nonlocal accepted
        message = decode(data)
        if isinstance(message, StepMessage):
            accepted += int(message.result.num_accepted_B.sum())
            for row, uid in enumerate(message.result.uid_B.tolist()):
                found = message.result.token_BW[row, : message.result.count_B[row]].tolist()
                tokens.setdefault(uid, []).extend(found)

    engine = Engine(runner, config, take)
    lockstep, launch = engine.lockstep, runner.launch
    launched_after: list[int] = []  # how many agreements there had been, by step

    def launch_noted(plan: StepPlan) -> InFlightStep:
        launched_after.append(lockstep.number if lockstep else 0)
        return launch(plan)  # type: ignore[no-any-return]

    runner.launch = launch_noted
    inbox: SimpleQueue[bytes | None] = SimpleQueue()
    for uid, (prompt, most, k) in enumerate(asked["requests"][rank], start=1):
        params = SamplingParams(temperature=0, max_tokens=most, num_speculative_tokens=k, seed=0)
        inbox.put(encode_submit(EngineRequest(uid, prompt, params, eos_token_ids=(2,))))
    inbox.put(encode(Control.DRAIN))
    run_engine(engine, inbox)
    runner.close()  # drafting goes on after the last result
    return {
        "tokens": tokens,
        "accepted": accepted,
        "steps": engine.scheduler.num_steps,
        "launched_after": launched_after,
        "records": list(runner._device.groups.contract.records),
        "agreements": list(lockstep._group.contract.records) if lockstep else [],  # type: ignore[attr-defined]
    }


def idle(rank: int, folder: Path) -> float:
    """The least share of a core that a rank took in one of several windows of time.

    Ranks sleep when the first agreement is over, which takes as long as it takes.
    """
    asked = json.loads((folder / "plan.json").read_text())
    config = EngineConfig.from_keywords(**asked["options"])
    place = place_in(folder, rank, layout_of(config))
    runner: Any = build_runner(config, lambda stage, share: None, place)
    engine = Engine(runner, config, lambda data: None)
    inbox: SimpleQueue[bytes | None] = SimpleQueue()
    used_s: list[float] = []

    def end() -> None:
        for _ in range(_NUM_WINDOWS):
            before_s = time.process_time()
            time.sleep(_WINDOW_S)
            used_s.append(time.process_time() - before_s)
        inbox.put(None)

    thread = threading.Thread(target=end)
    thread.start()
    run_engine(engine, inbox, lambda step: None)
    thread.join()
    return min(used_s) / _WINDOW_S
