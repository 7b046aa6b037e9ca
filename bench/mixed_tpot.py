"""Time per output token of running requests while prompts keep arriving.

usage: python bench/mixed_tpot.py CASE [--running 32] [--prompt 512] [--rates 0,8,32] ...

For each rate the same number of requests starts together. From their first token on, other prompts
arrive at a steady rate. A token's time is the gap to the previous message, divided by the tokens
that arrived together. Other rates are compared with rate 0.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.bench_engines import CASES, gpu, random_prompt, write_record
from bench.model_configs import write_configs
from bench.resting import wait_for_rest
from paceline.commands.prompts import PromptRecord
from paceline.commands.report import machine, resolved, spread, step_times
from paceline.commands.session import Answer, Session, open_session
from paceline.config import EngineConfig
from paceline.engine.loop_state import SPARE_AFTER_S
from paceline.request import SamplingParams

GUEST_TOKENS = 16  # output tokens of an arriving prompt


class Load:
    """Running requests, and others that arrive meanwhile."""

    def __init__(self, session: Session, args: argparse.Namespace) -> None:
        self._session = session
        self._args = args
        self._rng = random.Random(0)
        self._vocab_size = session.client.info.vocab_size

    def measure(self, rate: float) -> dict[str, Any]:
        """One measurement: from when all of them run until the first one ends."""
        hosts = [self._submit(128, self._args.tokens) for _ in range(self._args.running)]
        while not all(host.arrivals for host in hosts):
            self._session.client.pump(None)
        self._session.client.stats.recent.clear()
        guests: list[Answer] = []
        begin_s = due_s = time.monotonic()
        while not any(host.finished for host in hosts):
            now_s = time.monotonic()
            if rate and now_s >= due_s:
                guests.append(self._submit(self._args.prompt, GUEST_TOKENS))
                due_s += 1 / rate
                continue
            patience_s = max(min(due_s - now_s, 0.05), 0.0) if rate else 0.05
            self._session.client.pump(patience_s)
        end_s = time.monotonic()
        steps = step_times(self._session.client.stats.recent)
        self._session.wait([*hosts, *guests])
        served = [guest for guest in guests if guest.arrivals]
        first_s = [guest.arrivals[0][0] - guest.metrics.arrival_time for guest in served]
        gaps_s = [gap for host in hosts for gap in token_gaps(host, begin_s, end_s)]
        return {
            "rate": rate,
            "arrivals": len(guests),
            "seconds": round(end_s - begin_s, 3),
            "itl_ms": {**spread(gaps_s, 1e3), "max": round(max(gaps_s) * 1e3, 4)},
            "ttft_ms": spread(first_s, 1e3),
            "steps": steps,
        }

    def _submit(self, prompt: int, tokens: int) -> Answer:
        params = SamplingParams(
            temperature=0.8 if self._args.sampled else 0.0,
            top_p=0.95 if self._args.sampled else 1.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
        )
        ids = random_prompt(self._rng, self._vocab_size, prompt)
        return self._session.submit(PromptRecord(token_ids=ids), params)


def token_gaps(answer: Answer, begin_s: float, end_s: float) -> list[float]:
    """One entry per token that arrived in this interval."""
    gaps: list[float] = []
    for (before_s, _), (now_s, count) in pairwise(answer.arrivals):
        if begin_s <= before_s and now_s <= end_s:
            gaps += [(now_s - before_s) / count] * count
    return gaps


def engine_config(args: argparse.Namespace, models: Path) -> EngineConfig:
    case = CASES[args.case]
    asked: dict[str, Any] = {
        "model": str(models / case.model),
        "speculative_config": case.speculative_config(models),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": args.slots,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.85,
        "enforce_eager": args.eager,
    }
    given = (text.partition("=") for text in args.set)
    return EngineConfig.from_keywords(**asked | {name: json.loads(x) for name, _, x in given})


def row(found: dict[str, Any], alone: dict[str, Any]) -> str:
    itl, still = found["itl_ms"], alone["itl_ms"]
    first = found["ttft_ms"].get("p50", float("nan"))
    return (
        f"{found['rate']:>8.1f} {found['arrivals']:>9} {itl['p50']:>9.3f} {itl['p90']:>9.3f} "
        f"{itl['p99']:>9.3f} {itl['max']:>9.3f} {itl['p99'] / itl['p50']:>9.2f} "
        f"{itl['p50'] / still['p50']:>9.2f} {itl['p99'] / still['p99']:>9.2f} {first:>9.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--slots", type=int, default=64, help="slots for them and for arrivals")
    parser.add_argument("--tokens", type=int, default=1024, help="output of each running request")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of an arriving prompt")
    parser.add_argument("--rates", default="0,8,32", help="prompts per second")
    parser.add_argument("--sampled", action="store_true", help="temperature 0.8, top_p 0.95")
    parser.add_argument("--eager", action="store_true", help="no graphs")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rates = sorted({0.0, *map(float, args.rates.split(","))})
    with tempfile.TemporaryDirectory() as scratch:
        write_configs(Path(scratch))
        config = engine_config(args, Path(scratch))
        with open_session(config) as session:
            load = Load(session, args)
            load.measure(max(rates))  # warm-up: every step size has run
            # Idle-time graphs are captured before the measurement.
            settled_s = wait_for_rest(session.client.engine_pids, SPARE_AFTER_S + 0.2)
            found = [load.measure(rate) for rate in rates]
            info = session.client.info
    times = ("p50 ms", "p90 ms", "p99 ms", "max ms", "p99/p50", "p50 x", "p99 x", "TTFT ms")
    columns = enumerate(("rate/s", "arrivals", *times))
    print(" ".join(f"{name:>{8 if i == 0 else 9}}" for i, name in columns))
    for entry in found:
        print(row(entry, found[0]))
    if args.json is not None:
        about = {"bench": "mixed_tpot", "case": args.case, "running": args.running}
        about |= {"prompt": args.prompt, "gpu": gpu(), "machine": machine()}
        about["settled_s"] = round(settled_s, 1)
        write_record(
            args.json, {**about, "config": resolved(config, info), "runs": found}, Path(scratch)
        )


if __name__ == "__main__":
    main()
