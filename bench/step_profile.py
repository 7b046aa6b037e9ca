"""Device time of a step by kernel: one engine in this process, under torch's profiler.

usage: python -m bench.step_profile CASE[,CASE...] [--bs 1,64] [--prompt 128] [--sampled]

The same cases as bench_engines. Device times per step, summed by kernel, also inside replayed
graphs. The time of a dependently launched kernel includes its wait for the kernel before. Then idle
times of the device: from the end of all kernels so far to the start of the next one, summed by that
next kernel. Profiling slows the host down, so compare shares, not totals.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType

from bench.bench_engines import CASES, random_prompt
from bench.model_configs import write_configs
from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.request import EngineRequest, SamplingParams
from paceline.runner.platform_cuda import CudaPlatform
from paceline.runner.startup import build_on
from paceline.step import Runner


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", type=lambda text: text.split(","), metavar="CASE[,CASE...]")
    parser.add_argument("--bs", type=sizes, default=[1, 64], help="requests at once, with commas")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm", type=int, default=20, help="steps before; 3 shows prompts")
    parser.add_argument("--sampled", action="store_true", help="temperature 0.8 and top_p 0.95")
    parser.add_argument("--top", type=int, default=25, help="kernels to show")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("step_profile needs an NVIDIA GPU.", file=sys.stderr)
        return 2
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_configs(Path(folder))
        for case in args.cases:
            engine, runner = open_engine(case, Path(folder), args)
            for batch in args.bs:
                kernels, waits = profile(engine, case, batch, args)
                found[f"{case} {batch}"] = {"kernels": kernels, "waits": waits}
                show(f"{case}, {batch} requests: kernels", kernels, args.top)
                show("   idle before", waits, args.top // 3)
            runner.close()
            del engine, runner
            gc.collect()
            torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


Rows = list[dict[str, Any]]


def profile(engine: Engine, case: str, batch: int, args: argparse.Namespace) -> tuple[Rows, Rows]:
    """Kernels by their time in a step, and by the idle time before them."""
    rng, vocab_size = random.Random(0), CASES[case].vocab_size
    temperature, top_p = (0.8, 0.95) if args.sampled else (0.0, 1.0)
    params = SamplingParams(
        temperature=temperature, top_p=top_p, max_tokens=512, ignore_eos=True, seed=0
    )
    for uid in range(1, batch + 1):
        engine.add(EngineRequest(uid, random_prompt(rng, vocab_size, args.prompt), params))
    for _ in range(args.warm):
        engine.turn()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(args.steps):
            engine.turn()
        torch.cuda.synchronize()
    for uid in range(1, batch + 1):
        engine.abort(uid)
    while engine.turn():
        pass
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    kernels, waits, busy_until = Counts(), Counts(), spans[0][0]
    for begin, end, name in spans:
        kernels.take(name, end - begin)
        if begin > busy_until:
            waits.take(name, begin - busy_until)
        busy_until = max(busy_until, end)
    return kernels.rows(args.steps), waits.rows(args.steps)


class Counts:
    """Microseconds by kernel."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = {}

    def take(self, name: str, us: float) -> None:
        self._found.setdefault(name, []).append(us)

    def rows(self, num_steps: int) -> Rows:
        """Times per step, longest first."""
        rows = [
            {"kernel": name, "us": sum(us) / num_steps, "calls": len(us) / num_steps}
            for name, us in self._found.items()
        ]
        return sorted(rows, key=lambda row: -row["us"])


def open_engine(case: str, models: Path, args: argparse.Namespace) -> tuple[Engine, Runner]:
    config = EngineConfig.from_keywords(
        model=str(models / CASES[case].model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max(2048, args.prompt + 1024),
        max_num_seqs=max(64, *args.bs),
        enable_prefix_caching=False,
        gpu_memory_utilization=0.85,
        speculative_config=CASES[case].speculative_config(models),
    )
    torch.set_grad_enabled(False)
    sized = replace(config, scheduler=config.scheduler.sized(is_gpu=True))
    runner = build_on(CudaPlatform(torch.device("cuda", 0)), sized, lambda stage, share: None)
    return Engine(runner, sized, lambda data: None), runner


def show(title: str, rows: Rows, top: int) -> None:
    print(f"{title}: {sum(row['us'] for row in rows):.0f} us per step")
    for row in rows[:top]:
        each = row["us"] / max(row["calls"], 1e-9)
        print(f"{row['us']:9.1f} us {row['calls']:7.1f} x {each:8.2f} us  {row['kernel'][:100]}")


if __name__ == "__main__":
    sys.exit(main())
