"""Host time per step: the engine's loop over a runner that computes nothing.

Prints CPU time of the loop thread per step, message encoding included, in two phases: *steady*
(every slot decodes and takes pages; no request arrives or ends) and *turnover* (outputs of 384
tokens on average, so requests are decoded, admitted, cached, finished and evicted continuously).
Both are compared with a budget of 100 us + 3 us per running row; steady also with a minimal loop
timed in the same run. `--steps` records memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.messages import decode_submit, encode_submit
from paceline.request import Done, EngineRequest, SamplingParams
from paceline.step import LateMasks, RunnerInfo, StepPlan, StepResult, StepSize

PROMPT_TOKENS = 96
VOCAB = 32_000
WINDOW = 50  # steps timed at once; the two loops alternate, so that noise affects both


class ReadyStep:
    """A step that is complete at launch."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def bind(self, late: LateMasks) -> None:
        raise AssertionError("no late rows here")

    def is_over(self, within_s: float) -> bool:
        return True

    def wait(self) -> StepResult:
        return self._result


class NullRunner:
    """Tracks lengths, computes nothing. `cpu_s` is the runner's time, to be subtracted."""

    has_spare_work = False
    lockstep = None

    def __init__(self, rows: int, k: int, max_model_len: int, *, looks_up: bool) -> None:
        pages = rows * max_model_len // 16
        if looks_up:
            info = RunnerInfo(pages, 16, rows, max_model_len, VOCAB, 0, 0, max_host_drafts=k)
        else:
            info = RunnerInfo(pages, 16, rows, max_model_len, VOCAB, k, k)
        self._info = info
        rng = np.random.default_rng(0)
        self._counts = rng.integers(1, k + 2, (64, rows), np.int32)
        self._tokens = rng.integers(0, VOCAB, (64, rows, k + 1), np.int32)
        self._length_S = np.zeros(rows, np.int32)
        self._max_len_S = np.zeros(rows, np.int32)
        self.cpu_s = 0.0

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def step_size(self, plan: StepPlan) -> StepSize:
        return plan.step_size()

    def launch(self, plan: StepPlan) -> ReadyStep:
        start_s = time.thread_time()
        for init in plan.admissions:
            self._length_S[init.slot] = len(init.tokens)
            self._max_len_S[init.slot] = init.max_len
        slot_B, at, rows = plan.slot_B, plan.step % 64, plan.num_rows
        left_B = self._max_len_S[slot_B] - self._length_S[slot_B]
        count_B = np.minimum(self._counts[at, :rows], np.minimum(1 + plan.k_B, left_B))
        count_B = count_B * plan.samples_B
        self._length_S[slot_B] += count_B
        is_done_B = self._length_S[slot_B] == self._max_len_S[slot_B]
        token_BW = self._tokens[at, :rows, : plan.k + 1]
        token_BW = np.where(np.arange(plan.k + 1) < count_B[:, None], token_BW, np.int32(-1))
        result = StepResult(
            step=plan.step,
            uid_B=plan.uid_B,
            count_B=count_B,
            token_BW=token_BW,
            done_B=is_done_B * np.int32(Done.LENGTH),
            num_drafts_B=plan.k_B.copy(),
            num_accepted_B=np.maximum(count_B - 1, 0),
        )
        self.cpu_s += time.thread_time() - start_s
        return ReadyStep(result)

    def use_spare_time(self) -> bool:
        return False

    def heartbeat(self) -> None:
        pass

    def close(self) -> None:
        pass


class Load:
    """Keeps every slot busy: replaces each request that ends."""

    def __init__(self, engine: Engine, rows: int, output: int, spread: int) -> None:
        self._engine = engine
        self._rows = rows
        self._output = output
        self._spread = spread
        self._uid = 0
        self._rng = np.random.default_rng(1)

    def refill(self) -> float:
        """Submit missing requests; returns CPU time that the front would spend."""
        front_s = 0.0
        while self._engine.num_unfinished < self._rows:
            start_s = time.thread_time()
            self._uid += 1
            # Different lengths, so that rows do not end in the same step.
            length = PROMPT_TOKENS + int(self._rng.integers(-32, 32))
            prompt = self._rng.integers(0, VOCAB, length).tolist()
            output = self._output + int(self._rng.integers(-self._spread, self._spread))
            params = SamplingParams(max_tokens=output, seed=self._uid, temperature=0.0)
            data = encode_submit(EngineRequest(self._uid, prompt, params, eos_token_ids=(2,)))
            front_s += time.thread_time() - start_s
            self._engine.add(decode_submit(data))
        return front_s


class EngineLoop:
    """An engine under load; `run` returns the loop thread's time."""

    def __init__(self, args: argparse.Namespace, rows: int, output: int, spread: int) -> None:
        k, depth = args.k, args.run_ahead
        spec = {"method": args.method, "num_speculative_tokens": k, "adaptive": args.adaptive}
        max_model_len = PROMPT_TOKENS + output + spread + 32
        self._runner = NullRunner(rows, k, max_model_len, looks_up=args.method == "suffix")
        config = EngineConfig.from_keywords(
            max_num_seqs=rows,
            run_ahead=depth,
            max_num_batched_tokens=max(2048, rows * (k + 1)),
            speculative_config=spec if k else None,
        )
        self.engine = Engine(self._runner, config, lambda data: None)
        self._load = Load(self.engine, rows, output, spread)

    def run(self, steps: int) -> float:
        """CPU seconds per step, without the time of the runner and the front."""
        begin_s, begin_runner_s = time.thread_time(), self._runner.cpu_s
        front_s = 0.0
        for _ in range(steps):
            front_s += self._load.refill()
            self.engine.turn()
        runner_s = self._runner.cpu_s - begin_runner_s
        return (time.thread_time() - begin_s - runner_s - front_s) / steps


def minimal_loop(rows: int, k: int) -> Callable[[], bytes]:
    """The minimum that any loop does per step: arrays of the plan, counts and tokens of the result,
    one packed message. No pages, no queue, no stops, no bounds per request."""
    rng = np.random.default_rng(0)
    uid_S = np.arange(rows, dtype=np.int64)
    committed_S: npt.NDArray[np.int32] = np.zeros(rows, np.int32)
    upper_S = np.zeros(rows, np.int32)
    k_S = np.full(rows, k, np.int32)
    tokens_SL = np.zeros((rows, 1024), np.int32)
    slots = np.arange(rows)
    count_B = rng.integers(1, k + 2, rows, np.int32)
    token_BW = rng.integers(0, VOCAB, (rows, k + 1), np.int32)
    done_B = np.zeros(rows, np.int32)
    offsets_W = np.arange(k + 1)
    head = struct.Struct("<IIIIdd")
    plan: tuple[Any, ...] = ()

    def step() -> bytes:
        nonlocal plan
        slot_B = slots.astype(np.int32)  # plan
        k_B = k_S[slots]
        width_B = k_B + 1
        bound_B = upper_S[slots] + k_B
        upper_S[slots] += width_B
        plan = (uid_S[slots], slot_B, k_B, width_B, bound_B, np.ones(rows, np.bool_))
        committed_B = committed_S[slot_B] % 1000  # commit
        tokens_SL[slot_B[:, None], committed_B[:, None] + offsets_W] = token_BW
        committed_S[slot_B] += count_B
        upper_S[slot_B] -= width_B - count_B
        done_B.any()
        parts = (  # publish
            head.pack(1, rows, k + 1, 0, 0.0, 0.0), plan[0].tobytes(), count_B.tobytes(),
            done_B.tobytes(), k_B.tobytes(), count_B.tobytes(), token_BW.tobytes(),
        )  # fmt: skip
        return b"".join(parts)

    return step


def time_minimal(step: Callable[[], bytes]) -> float:
    begin_s = time.thread_time()
    for _ in range(WINDOW):
        step()
    return (time.thread_time() - begin_s) / WINDOW


def compare(args: argparse.Namespace, rows: int) -> dict[str, float]:
    """Medians over windows in which the loops alternate."""
    windows = args.windows
    steady = EngineLoop(args, rows, output=4 * WINDOW * (windows + 10), spread=1)
    turnover = EngineLoop(args, rows, output=384, spread=256)
    minimal = minimal_loop(rows, args.k)
    steady.run(100)
    turnover.run(400)  # until the pool is full of cached pages
    seconds: dict[str, list[float]] = {"steady": [], "turnover": [], "minimal": []}
    for _ in range(windows):
        seconds["minimal"].append(time_minimal(minimal))
        seconds["steady"].append(steady.run(WINDOW))
        seconds["turnover"].append(turnover.run(WINDOW))
    budget_us = 100 + 3 * rows
    micros = {name: median(values) * 1e6 for name, values in seconds.items()}
    return {
        "rows": rows,
        "k": args.k,
        "run_ahead": args.run_ahead,
        "budget_us": budget_us,
        **{f"{name}_us": value for name, value in micros.items()},
        **{f"{name}_us_best": min(values) * 1e6 for name, values in seconds.items()},
        "steady_share_of_budget": micros["steady"] / budget_us,
        "turnover_share_of_budget": micros["turnover"] / budget_us,
        "steady_times_minimal": micros["steady"] / micros["minimal"],
        "turnover_times_minimal": micros["turnover"] / micros["minimal"],
    }


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Resident memory during a long run; flat if the second half adds nothing."""
    loop = EngineLoop(args, rows=64, output=384, spread=256)
    samples = []
    for _ in range(10):
        loop.run(args.steps // 10)
        samples.append(resident_bytes())
    return {
        "steps": args.steps,
        "rows": 64,
        "rss_mib": [round(value / 2**20, 1) for value in samples],
        "growth_second_half_mib": round((samples[-1] - samples[4]) / 2**20, 2),
    }


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--run-ahead", type=int, default=1)
    parser.add_argument("--windows", type=int, default=40, help=f"of {WINDOW} steps each")
    parser.add_argument("--method", default="ngram", choices=["ngram", "suffix"])
    parser.add_argument("--adaptive", action="store_true", help="let k follow acceptance")
    parser.add_argument("--steps", type=int, default=0, help="also record memory over N steps")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    results: dict[str, Any] = {"loop": []}
    columns = ("rows", "budget", "steady", "share", "turnover", "share", "minimal", "steady/min")
    print(" ".join(f"{name:>10}" for name in columns), "  (us per step)")
    for rows in args.rows:
        row = compare(args, rows)
        results["loop"].append(row)
        print(
            f"{rows:>10} {row['budget_us']:>10.0f} {row['steady_us']:>10.1f} "
            f"{row['steady_share_of_budget']:>10.2f} {row['turnover_us']:>10.1f} "
            f"{row['turnover_share_of_budget']:>10.2f} {row['minimal_us']:>10.1f} "
            f"{row['steady_times_minimal']:>10.2f}"
        )
    if args.steps:
        results["memory"] = memory(args)
        print(f"memory over {args.steps} steps of 64 rows, MiB: {results['memory']['rss_mib']}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
