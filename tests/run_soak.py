"""Runs a server at twice its saturation, and writes down what it saw: tests/soak_last_run.json.

usage: python tests/run_soak.py [--minutes 30] [--seed 1] [--report FILE]

A shorter run writes a record only with --report. Exit code 1: the run misses what a soak must show.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # started as a script, its own folder is there

from tests.faults.soak import FLAT_MIB_A_MINUTE, MOST_STILL_S, soak  # noqa: E402
from tests.last_run import about_this_run  # noqa: E402

REPORT = ROOT / "tests" / "soak_last_run.json"
MINUTES = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args(argv)
    folder = ROOT / ".pytest_cache"
    folder.mkdir(exist_ok=True)
    about = about_this_run(ROOT)  # before: the tree may change meanwhile
    log = folder / f"soak_{args.seed}.log"
    report = soak(folder / "faults_models", log, 60 * args.minutes, args.seed)
    misses = report.misses()
    print(report)
    for line in misses:
        print(f"missed: {line}")
    path = args.report or (REPORT if args.minutes >= MINUTES else None)
    if path is not None:
        limits = {"still_s": MOST_STILL_S, "memory_mib_a_minute": FLAT_MIB_A_MINUTE}
        seen = {**vars(report), "memory": [*map(vars, report.memory)]}
        record = {**about, "seed": args.seed, **seen, "limits": limits, "missed": misses}
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
