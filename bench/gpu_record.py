"""All figures that the docs give for one GPU: writes bench/results/<gpu>/*.json, prints a table.

usage: python bench/gpu_record.py [--only tpot,load] [--seconds 1500] [--out DIR]

The most important runs come first, each in a separate process. Runs that do not fit into --seconds
are skipped and listed. The table also has vLLM 0.26.0 on an H200, measured with the same script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VLLM_TPOT_MS = {
    "sm": (2.16, 2.75, 2.64, 2.92),
    "sm-eagle": (1.33, 1.35, 1.59, 2.24),
    "l8": (4.88, 4.95, 5.48, 6.12),
    "l8-eagle": (2.45, 2.80, 3.02, 4.19),
    "glm": (5.17, 5.91, 6.74, 7.20),
    "glm-mtp": (3.26, 3.48, 3.85, 4.88),
}
VLLM_LOAD = {
    "l8": (39_963, 41_975, 10_955, 6_779, 182, 572),
    "l8-eagle": (38_795, 40_498, 8_911, 6_406, 319, 577),
    "sm-eagle": (108_463, 306_491, 7_852, 16_275, 665, 6_351),
}


@dataclass(frozen=True)
class Run:
    """One call of a bench script."""

    name: str
    arguments: tuple[str, ...]
    seconds: int  # expected time, start-up included
    script: str = "bench_engines"

    def command(self, out: Path) -> list[str]:
        module = [sys.executable, "-m", f"bench.{self.script}", *self.arguments]
        return [*module, "--json", str(out / f"{self.name}.json")]


def _engines(name: str, cases: str, seconds: int, *more: str) -> Run:
    return Run(name, ("paceline", cases, *more), seconds)


# Sampled and greedy figures come from one engine, so their ratio is of one run.
_SAMPLED = {"sm", "sm-eagle", "l8", "l8-eagle"}
RUNS = (
    *(
        _engines(f"tpot-{c}", c, 80, "--check", *(("--sampled", "1,64") if c in _SAMPLED else ()))
        for c in VLLM_TPOT_MS
    ),
    *(_engines(f"load-{case}", case, 75, "--load") for case in VLLM_LOAD),
    Run("start", ("l8,sm-eagle",), 120, "start_up"),
    _engines("sync", "sm,sm-eagle,l8,l8-eagle", 150, "--sync", "--bs", "1,64"),
    *(_engines(f"long-{c}", c, 75, "--prompt", "4000", "--bs", "1,8,32") for c in ("sm", "l8")),
    Run("mixed-sm", ("sm",), 40, "mixed_tpot"),
    _engines("wide", "sm", 40, "--bs", "256"),
    _engines("spread", "q30", 75),
    Run("mixed-l8", ("l8",), 60, "mixed_tpot"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="names or prefixes of runs, separated by commas")
    parser.add_argument("--seconds", type=float, default=1500.0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "h200")
    args = parser.parse_args()
    wanted = tuple(x for x in args.only.split(",") if x)
    end_s, missed = time.monotonic() + args.seconds, []
    args.out.mkdir(parents=True, exist_ok=True)
    for run in RUNS:
        if wanted and not run.name.startswith(wanted):
            continue
        left_s = end_s - time.monotonic()
        if left_s < run.seconds:
            missed.append(run.name)
            continue
        try:
            code = subprocess.run(run.command(args.out), timeout=left_s, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        print(f"== {run.name}: {'ok' if not code else 'failed'}", flush=True)
        if code:
            missed.append(run.name)
    for line in table(args.out):
        print(line)
    if missed:
        print("not run, or failed:", ", ".join(missed))
    return 1 if missed else 0


def table(folder: Path) -> Iterator[str]:
    """Our figures beside vLLM's; above 1 Paceline is faster."""
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        for run in record.get("runs", []):
            is_mixed = record["bench"] == "mixed_tpot"
            yield from (_mixed_rows if is_mixed else _rows)(path.stem, run)


def _mixed_rows(name: str, run: dict[str, Any]) -> Iterator[str]:
    gap_ms = " / ".join(f"{run['itl_ms'][x]:.3f}" for x in ("p50", "p99", "max"))
    yield f"{name:14} {run['rate']:>4.0f} prompts/s: {gap_ms} ms per token (p50, p99, max)"


def _rows(name: str, run: dict[str, Any]) -> Iterator[str]:
    case = run["case"]
    if cached := run.get("cached"):
        first, *others = (start["init_s"] for start in (run["no_cache"], *cached))
        shown = " / ".join(f"{s:.1f}" for s in others)
        yield f"{name:14} {case:9} {first:.1f} s with no kernel cached, then {shown} s"
    tpot = run.get("tpot_ms", {})
    if tpot:
        theirs = VLLM_TPOT_MS[case] if name.startswith("tpot") else ()
        ratios = (f"{t / o:.2f}" for t, o in zip(theirs, tpot.values(), strict=False))
        shown = " / ".join(f"{ms:.3f}" for ms in tpot.values())
        yield f"{name:14} {case:9} {shown} ms  {' / '.join(ratios)}  init {run.get('init_s')} s"
    if sampled := run.get("sampled_tpot_ms", {}):
        ratios = (f"{ms / tpot[n]:.2f}" for n, ms in sampled.items())
        shown = " / ".join(f"{ms:.3f}" for ms in sampled.values())
        yield f"{'':14} {'sampled':9} {shown} ms at {', '.join(sampled)}: {' / '.join(ratios)} x"
    load = [(k, v) for k, v in run.items() if k.endswith("tok/s")]
    for (what, rate), theirs_ in zip(load, VLLM_LOAD.get(case, (0,) * 6), strict=False):
        ratio = f"{rate / theirs_:.2f}" if theirs_ else ""
        yield f"{name:14} {case:9} {what:24} {rate:>9,} {ratio}"


if __name__ == "__main__":
    sys.exit(main())
