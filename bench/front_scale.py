"""CPU time of the front per token, with few and with many replicas and open requests.

usage: python -m bench.front_scale [--json OUT.json]

Replicas are fake: this process writes their step messages, in the format of an engine. Everything
from the bytes of a message to the deltas of its requests is the server's own code, and so is the
router. Sockets are not part of it.
"""

from __future__ import annotations

import argparse
import json
import time
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

ROWS = 32  # rows of one step message
TURNS = 3000  # messages that are timed
CASES = ((1, 32), (1, 20_000), (8, 20_000), (64, 20_000), (512, 20_000), (512, 512))


def message(step: int, uids: list[int]) -> bytes:
    count = len(uids)
    ones, zeros = np.ones(count, np.int32), np.zeros(count, np.int32)
    tokens = np.full((count, 1), 7, np.int32)
    result = StepResult(step, np.array(uids, np.int64), ones, tokens, zeros, zeros, zeros)
    return encode_step(result, Events(), Gauges(num_running=count, kv_usage=0.5))


def measure(num_replicas: int, num_open: int) -> dict[str, Any]:
    stats = EngineStats(num_replicas=num_replicas)
    router = Router(num_replicas, capacity_tokens=num_replicas * 800_000)
    requests = OpenRequests(router, Front(tokenizer=None), stats)
    params = SamplingParams(max_tokens=None, detokenize=False)
    owned: list[list[int]] = [[] for _ in range(num_replicas)]
    prompt = list(range(256))
    start_s = time.process_time()
    for uid in range(num_open):
        prompt[0] = uid
        generation = Generation(str(uid), None, prompt[:], params, lambda _: None, RequestMetrics())
        requests.add(generation, [EngineRequest(uid, generation.prompt_token_ids, params)])
        for replica, request in requests.place():
            owned[replica].append(request.uid)
    submit_us = (time.process_time() - start_s) / num_open * 1e6
    frames = [message(1, uids[:ROWS]) for uids in owned if uids]
    replicas = [replica for replica, uids in enumerate(owned) if uids]
    num_tokens = 0
    start_s = time.process_time()
    for turn in range(TURNS):
        which = turn % len(frames)
        taken = decode(frames[which])
        assert isinstance(taken, StepMessage)
        requests.take_step(replicas[which], taken)
        num_tokens += sum(len(d.token_ids) for ds in requests.take_deltas().values() for d in ds)
    token_us = (time.process_time() - start_s) / num_tokens * 1e6
    return {
        "replicas": num_replicas,
        "open": num_open,
        "submit_us": round(submit_us, 2),
        "token_us": round(token_us, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measure(1, 32)  # warm
    print("| replicas | open requests | CPU us per request | CPU us per token |\n|---|---|---|---|")
    rows = []
    for num_replicas, num_open in CASES:
        row = measure(num_replicas, num_open)
        rows.append(row)
        print("| " + " | ".join(str(v) for v in row.values()) + " |", flush=True)
    if options.json:
        text = json.dumps(
            {"bench": "front_scale", "rows_per_message": ROWS, "cases": rows}, indent=1
        )
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
