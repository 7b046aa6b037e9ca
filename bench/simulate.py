"""Replays a request trace over several replicas in a simulator and compares routing rules.

usage: python -m bench.simulate TRACE --replicas 4 --loads 0.5,1,2 --json OUT.json --svg OUT.svg

TRACE is a CSV of the Azure LLM inference trace (2023) or the Mooncake conversation trace (JSONL
with `hash_ids`). The step times are those of the 8B shape on an H200 (bench/results/h200). Routing
is the server's own code (engine/router.py). Replicas are simplified: FCFS, chunked prompts whose
time is linear in their length, a prefix cache by blocks of 512 tokens with LRU eviction, no
preemption and no drafts.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np

from paceline.engine import router as routing
from paceline.engine.router import Router
from paceline.observe.plots import grid, line_chart

RECORDS = Path(__file__).parent / "results" / "h200"
BLOCK = 512  # tokens of one hash id in the Mooncake trace
BUDGET, SLOTS, KV_TOKENS = 8192, 256, 800_000
RULES = ("round-robin", "least-load", "affinity")


@dataclass(slots=True)
class Arrival:
    time_s: float
    prompt: int
    output: int
    blocks: tuple[int, ...]  # ids of whole prompt blocks; equal ids have equal tokens


@dataclass(slots=True)
class Served:
    arrival: Arrival
    uid: int
    left: int  # prompt tokens still to compute
    first_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of a step, from measured runs."""

    rows: Sequence[float]
    decode_ms: Sequence[float]  # at these numbers of rows, short contexts
    prompt_ms: float  # per prompt token
    kv_ms: float  # per token of context that a step reads

    @classmethod
    def measured(cls) -> StepTimes:
        tpot = _run("tpot-l8")["tpot_ms"]
        long = _run("long-l8")["tpot_ms"]
        rows = [int(r) for r in tpot]
        # Contexts of 4,000 instead of 128 tokens, 32 requests.
        kv_ms = (long["32"] - tpot["32"]) / (32 * (4000 - 128))
        return cls(rows, list(tpot.values()), 1000 / _run("load-l8")["in 8x2048 tok/s"], kv_ms)

    def step_s(self, rows: int, prompt: int, context: int) -> float:
        decode = float(np.interp(rows, self.rows, self.decode_ms)) if rows else 0.0
        if rows > self.rows[-1]:
            slope = (self.decode_ms[-1] - self.decode_ms[-2]) / (self.rows[-1] - self.rows[-2])
            decode += slope * (rows - self.rows[-1])
        # A step reads the weights once, whether for prompts or for decoding.
        compute = max(prompt * self.prompt_ms, self.decode_ms[0] if prompt else 0.0)
        shared = min(decode, self.decode_ms[0]) if prompt else 0.0
        return (decode + compute - shared + context * self.kv_ms) / 1000


def _run(name: str) -> dict[str, Any]:
    record = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    run: dict[str, Any] = record["runs"][0]
    return run


@dataclass(slots=True)
class Replica:
    times: StepTimes
    waiting: deque[Served] = field(default_factory=deque)
    prefilling: deque[Served] = field(default_factory=deque)
    ends: list[tuple[int, int, Served]] = field(default_factory=list)  # by the step they end at
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    num_steps: int = 0
    context: int = 0  # tokens that decoding rows read
    busy_until_s: float = 0.0
    running: list[Served] = field(default_factory=list)  # prompts that end with this step

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.ends)

    def begin(self, now_s: float) -> float:
        """Launch a step. Returns when it ends."""
        while self.waiting and len(self.prefilling) + len(self.ends) < SLOTS:
            self.prefilling.append(self._admit(self.waiting.popleft()))
        budget, tokens = max(BUDGET - len(self.ends), 0), 0
        self.running = []
        while self.prefilling and tokens < budget:
            head = self.prefilling[0]
            chunk = min(head.left, budget - tokens)
            head.left -= chunk
            tokens += chunk
            if not head.left:
                self.running.append(self.prefilling.popleft())
        self.busy_until_s = now_s + self.times.step_s(len(self.ends), tokens, self.context)
        return self.busy_until_s

    def _admit(self, served: Served) -> Served:
        hit = 0
        for block in served.arrival.blocks:
            if block not in self.cache:
                break
            hit += BLOCK
        served.left = max(served.arrival.prompt - hit, 1)
        for block in reversed(served.arrival.blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) * BLOCK > KV_TOKENS:
            self.cache.popitem(last=False)
        return served

    def finish(self) -> list[Served]:
        """The step has ended. Returns the requests that ended with it."""
        self.num_steps += 1
        self.context += len(self.ends)
        ended = []
        while self.ends and self.ends[0][0] <= self.num_steps:
            served = heapq.heappop(self.ends)[2]
            self.context -= served.arrival.prompt + served.arrival.output
            ended.append(served)
        for served in self.running:
            served.first_s = self.busy_until_s
            if served.arrival.output <= 1:
                ended.append(served)
                continue
            self.context += served.arrival.prompt + 1
            end = self.num_steps + served.arrival.output - 1
            heapq.heappush(self.ends, (end, served.uid, served))
        return ended


def simulate(arrivals: Sequence[Arrival], num_replicas: int, rule: str) -> dict[str, Any]:
    """Serve all arrivals. Returns percentiles in milliseconds, and what the prefix caches saved."""
    times = StepTimes.measured()
    replicas = [Replica(times) for _ in range(num_replicas)]
    router = Router(num_replicas, KV_TOKENS * num_replicas if rule == "affinity" else 0)
    steps: list[tuple[float, int]] = []  # (end, replica) of the running steps
    is_running = [False] * num_replicas
    ttft, tpot, saved, asked, last_s = [], [], 0, 0, 0.0

    def launch(index: int, now_s: float) -> None:
        if not is_running[index] and replicas[index].has_work:
            is_running[index] = True
            heapq.heappush(steps, (replicas[index].begin(now_s), index))

    def end_step() -> None:
        nonlocal saved, last_s
        now_s, index = heapq.heappop(steps)
        last_s, is_running[index] = now_s, False
        for served in replicas[index].finish():
            router.release(served.uid)
            if served.arrival.output > 1:
                tpot.append((now_s - served.first_s) / (served.arrival.output - 1) * 1000)
            ttft.append((served.first_s - served.arrival.time_s) * 1000)
        launch(index, now_s)

    for uid, arrival in enumerate(arrivals):
        while steps and steps[0][0] <= arrival.time_s:
            end_step()
        tokens = _tokens(arrival) if rule == "affinity" else ()
        fixed = uid % num_replicas if rule == "round-robin" else None
        index = router.assign([uid], tokens, replica=fixed)
        assert index is not None
        held = replicas[index].cache
        asked += arrival.prompt
        saved += BLOCK * next(
            (i for i, b in enumerate(arrival.blocks) if b not in held), len(arrival.blocks)
        )
        replicas[index].waiting.append(Served(arrival, uid, arrival.prompt))
        launch(index, arrival.time_s)
    while steps:
        end_step()
    return {
        "ttft_ms": _percentiles(ttft),
        "tpot_ms": _percentiles(tpot),
        "hit_rate": round(saved / max(asked, 1), 4),
        "seconds": round(last_s, 1),
    }


def _tokens(arrival: Arrival) -> list[int]:
    """Tokens that are equal exactly where the block ids are."""
    return [token for block in arrival.blocks for token in [block] * BLOCK]


def _percentiles(values: list[float]) -> dict[str, float]:
    cuts = quantiles(values, n=100)
    return {"p50": round(cuts[49], 2), "p90": round(cuts[89], 2), "p99": round(cuts[98], 2)}


def read_trace(path: Path, most: int) -> list[Arrival]:
    """Arrivals in order of time, from 0 s on."""
    with path.open(encoding="utf-8") as lines:
        rows = _azure(lines) if path.suffix == ".csv" else _mooncake(lines)
        arrivals = sorted(rows, key=lambda a: a.time_s)[:most]
    start_s = arrivals[0].time_s
    for arrival in arrivals:
        arrival.time_s -= start_s
    return arrivals


def _azure(lines: Any) -> list[Arrival]:
    found = []
    for row in csv.DictReader(lines):
        time_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        output = int(row["GeneratedTokens"])
        found.append(Arrival(time_s, int(row["ContextTokens"]), max(output, 1), ()))
    return found


def _mooncake(lines: Any) -> list[Arrival]:
    found = []
    for row in map(json.loads, lines):
        prompt = int(row["input_length"])
        blocks = tuple(row["hash_ids"][: prompt // BLOCK])
        output = max(int(row["output_length"]), 1)
        found.append(Arrival(row["timestamp"] / 1000, prompt, output, blocks))
    return found


def scaled(arrivals: Sequence[Arrival], load: float) -> list[Arrival]:
    """The same requests, `load` times as many per second."""
    return [Arrival(a.time_s / load, a.prompt, a.output, a.blocks) for a in arrivals]


def picture(results: dict[str, dict[str, Any]], loads: list[float], per_s: float) -> str:
    """Four charts with one line for each rule."""
    return grid(
        [
            line_chart(
                f"{name} {percentile}",
                "requests per second",
                "ms",
                {
                    rule: [(load * per_s, found[str(load)][key][percentile]) for load in loads]
                    for rule, found in results.items()
                },
                log_y=True,
            )
            for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"))
            for percentile in ("p50", "p99")
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--loads", default="0.5,1,2", help="factors of the trace's arrival rate")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--requests", type=int, default=10**9, help="use only the first ones")
    parser.add_argument("--worth", type=int, help="try another engine.router.WORTH_TOKENS")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    if options.worth:
        routing.WORTH_TOKENS = options.worth
    loads = [float(x) for x in options.loads.split(",")]
    arrivals = read_trace(options.trace, options.requests)
    per_s = len(arrivals) / max(arrivals[-1].time_s, 1e-9)
    results: dict[str, dict[str, Any]] = {rule: {} for rule in options.rules.split(",")}
    print(
        f"{len(arrivals)} requests, {per_s:.2f} per second at load 1, {options.replicas} replicas"
    )
    print(
        "| rule | load | TTFT p50 / p99 ms | TPOT p50 / p99 ms | prefix hits |\n"
        "|---|---|---|---|---|"
    )
    for load in loads:
        for rule in results:
            result = simulate(scaled(arrivals, load), options.replicas, rule)
            results[rule][str(load)] = result
            first, each = result["ttft_ms"], result["tpot_ms"]
            print(
                f"| {rule} | {load:g} | {first['p50']:.0f} / {first['p99']:.0f} | "
                f"{each['p50']:.2f} / {each['p99']:.2f} | {result['hit_rate']:.1%} |",
                flush=True,
            )
    if options.json:
        record = {
            "bench": "simulate",
            "trace": options.trace.name,
            "replicas": options.replicas,
            "requests": len(arrivals),
            "requests_per_s": round(per_s, 3),
            "worth_tokens": routing.WORTH_TOKENS,
            "results": results,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.svg:
        options.svg.write_text(picture(results, loads, per_s), encoding="utf-8")


if __name__ == "__main__":
    main()
