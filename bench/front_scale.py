"""CPU time of the front per token, with few and with many replicas and open requests.

usage: python -m bench.front_scale [--json OUT.json]

Replicas are fake: this process writes their step messages, in the format of an engine. Everything
from the bytes of a message to the deltas of its requests is the server's own code, and so is the
router. Sockets are not part of it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.engine.front import Front
from paceline.engine.messages import Gauges, StepMessage, decode, encode_step
from paceline.engine.open_requests import OpenRequests
from paceline.engine.outputs import Generation
from paceline.engine.router import Router
from paceline.engine.stats import EngineStats
from paceline.request import EngineRequest, RequestMetrics, SamplingParams
from paceline.scheduler.events import Events
from paceline.step import StepResult

TURNS = 2000  # messages of a round
ROUNDS = 5  # the fastest one counts: the others were disturbed
NUM_OPEN = 20_000


@dataclass(frozen=True, slots=True)
class Case:
    """`active`: requests that get tokens, in an order without neighbours in memory."""

    replicas: int
    open: int
    active: int
    rows: int = 32  # of one step message


CASES = (
    Case(1, 32, 32),
    Case(1, NUM_OPEN, 32),
    Case(8, NUM_OPEN, 256),
    Case(512, NUM_OPEN, 256),
    Case(1, NUM_OPEN, 16_384),
    Case(64, NUM_OPEN, 16_384),
    Case(512, NUM_OPEN, 16_384),
    Case(512, 512, 512, rows=1),
)


def message(step: int, uids: list[int]) -> bytes:
    count = len(uids)
    ones, zeros = np.ones(count, np.int32), np.zeros(count, np.int32)
    tokens = np.full((count, 1), 7, np.int32)
    result = StepResult(step, np.array(uids, np.int64), ones, tokens, zeros, zeros, zeros)
    return encode_step(result, Events(), Gauges(num_running=count, kv_usage=0.5))


def measure(case: Case) -> dict[str, Any]:
    stats = EngineStats(num_replicas=case.replicas)
    router = Router(case.replicas, capacity_tokens=case.replicas * 800_000)
    requests = OpenRequests(router, Front(tokenizer=None), stats)
    params = SamplingParams(max_tokens=None, detokenize=False)
    owned: list[list[int]] = [[] for _ in range(case.replicas)]
    prompt = list(range(256))
    start_s = time.process_time()
    for uid in range(case.open):
        prompt[0] = uid
        generation = Generation(str(uid), None, prompt[:], params, lambda _: None, RequestMetrics())
        requests.add(generation, [EngineRequest(uid, generation.prompt_token_ids, params)])
        for replica, request in requests.place():
            owned[replica].append(request.uid)
    submit_us = (time.process_time() - start_s) / case.open * 1e6
    frames = step_messages(case, owned)
    token_us = min(token_cpu_us(requests, frames) for _ in range(ROUNDS))
    return {**asdict(case), "submit_us": round(submit_us, 2), "token_us": round(token_us, 3)}


def step_messages(case: Case, owned: list[list[int]]) -> list[tuple[int, bytes]]:
    """(replica, message): of all replicas in turn, until all active requests had a token."""
    for uids in owned:
        random.Random(0).shuffle(uids)
    rows = case.rows
    frames: list[tuple[int, bytes]] = []
    for start in range(0, case.open, rows):
        for replica, uids in enumerate(owned):
            if uids[start : start + rows] and len(frames) * rows < case.active:
                frames.append((replica, message(1, uids[start : start + rows])))
    return frames


def token_cpu_us(requests: OpenRequests, frames: list[tuple[int, bytes]]) -> float:
    num_tokens = 0
    start_s = time.process_time()
    for turn in range(TURNS):
        replica, frame = frames[turn % len(frames)]
        taken = decode(frame)
        assert isinstance(taken, StepMessage)
        requests.take_step(replica, taken)
        num_tokens += sum(len(d.token_ids) for ds in requests.take_deltas().values() for d in ds)
    return (time.process_time() - start_s) / num_tokens * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print("| replicas | open | active | rows | CPU us per request | CPU us per token |")
    print("|---|---|---|---|---|---|")
    rows = []
    for case in CASES:
        row = measure(case)
        rows.append(row)
        print("| " + " | ".join(str(v) for v in row.values()) + " |", flush=True)
    if options.json:
        text = json.dumps({"bench": "front_scale", "cases": rows}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
