"""Runs many rounds of faults, and writes down what it saw: tests/faults_last_run.json.

usage: python tests/run_faults.py [--rounds 200] [--seed 1] [--part I/N] [--again] [--report FILE]

An interrupted run goes on where it stopped, for as long as no source changes; --again begins anew.
With --part 1/2 and --part 2/2 two processes run half of the rounds each, at the same time. The last
one writes the record of all; fewer than 200 rounds write one only with --report. Exit code 1: a
round was bad, or a recovery took longer than it may.

What is done is in .pytest_cache/faults_SEED_I_of_N.json, what the ranks said in the .log beside it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # started as a script, its own folder is there

from tests.faults.rounds import RECOVERY_S, STALL_S, Bench, Round  # noqa: E402
from tests.last_run import about_this_run, hash_of  # noqa: E402

REPORT = ROOT / "tests" / "faults_last_run.json"
FOLDER = ROOT / ".pytest_cache"
NUM_ROUNDS = 200


@dataclass
class Part:
    """The rounds I, I + N, I + 2 N, ... of a seed, counted from 1, and what is done of them."""

    seed: int
    first: int
    stride: int
    sources: str  # a hash: rounds of other sources do not count

    @property
    def file(self) -> Path:
        return FOLDER / f"faults_{self.seed}_{self.first}_of_{self.stride}.json"

    def numbers(self, num_rounds: int) -> range:
        return range(self.first - 1, num_rounds, self.stride)

    def read(self) -> list[Round]:
        if not self.file.exists():
            return []
        stored = json.loads(self.file.read_text(encoding="utf-8"))
        return [Round(**r) for r in stored["rounds"]] if stored["sources"] == self.sources else []

    def write(self, rounds: Sequence[Round]) -> None:
        stored = {"sources": self.sources, "rounds": [asdict(r) for r in rounds]}
        self.file.write_text(json.dumps(stored), encoding="utf-8")

    def of_all(self, num_rounds: int) -> list[Round] | None:
        """The rounds of all parts; None while some are missing."""
        parts = (Part(self.seed, i + 1, self.stride, self.sources) for i in range(self.stride))
        found = {r.number: r for part in parts for r in part.read()}
        if not found.keys() >= {*range(num_rounds)}:
            return None
        return [found[number] for number in range(num_rounds)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args(argv)
    FOLDER.mkdir(exist_ok=True)
    about = about_this_run(ROOT)
    first, stride = args.part
    part = Part(args.seed, first, stride, _sources())
    if args.again:
        part.file.unlink(missing_ok=True)
    left = run(part, args.rounds)
    rounds = part.of_all(args.rounds)
    path = args.report or (REPORT if args.rounds >= NUM_ROUNDS else None)
    if rounds is None:
        print("Other parts are not done yet: the last one writes the record.")
        rounds = part.read()
    elif path is not None:
        record = {**about, "seed": args.seed, **summary(rounds), "sources_sha256": part.sources}
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary(rounds), indent=1))
    for line in left:
        print(line)
    return 1 if left or any(r.complaints or r.is_late for r in rounds) else 0


def run(part: Part, num_rounds: int) -> list[str]:
    """Run what is not done. Returns what is left of the engines."""
    done = part.read()
    numbers = [n for n in part.numbers(num_rounds) if n not in {r.number for r in done}]
    if done:
        print(f"{len(done)} rounds were done before, {len(numbers)} are left")
    if not numbers:
        return []
    # The ranks report what happened to them; that is much, and of use only if a round is bad.
    with part.file.with_suffix(".log").open("a", encoding="utf-8") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    logging.basicConfig(level=logging.WARNING)
    bench = Bench(FOLDER / "faults_models")
    try:
        for number in numbers:
            done.append(bench.run(part.seed, number))
            print(done[-1], flush=True)
            part.write(done)
    finally:
        left = bench.close()
    return left


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    recovered = [r for r in rounds if r.num_restarts]
    times = sorted(r.recovery_s for r in recovered)
    # Beside the stall timeout and the start: what RECOVERY_S limits.
    beside = sorted(r.recovery_s - r.start_s - STALL_S for r in recovered)
    return {
        "rounds": len(rounds),
        "layouts": Counter(r.layout for r in rounds),
        "faults": Counter(fault.rpartition(" ")[0] for r in rounds for fault in r.faults),
        "bad": [str(r) for r in rounds if r.complaints],
        "restarts": sum(r.num_restarts for r in rounds),
        "recoveries": len(recovered),
        "recovery_s": {"median": _middle(times), "longest": round(max(times, default=0.0), 2)},
        "stall_timeout_s": STALL_S,
        "start_s": {"median": _middle(sorted(r.start_s for r in recovered))},
        "limit": f"stall timeout + start + {RECOVERY_S:g} s",
        "longest_beside_stall_timeout_and_start_s": round(max(beside, default=0.0), 2),
        "late": [str(r) for r in rounds if r.is_late],
        "seconds": round(sum(r.seconds for r in rounds)),
    }


def _middle(values: Sequence[float]) -> float:
    return round(values[len(values) // 2], 2) if values else 0.0


def _part(text: str) -> tuple[int, int]:
    first, _, stride = text.partition("/")
    if not (first.isdigit() and stride.isdigit() and 1 <= int(first) <= int(stride)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part: use 1/2 and 2/2, for example.")
    return int(first), int(stride)


def _sources() -> str:
    files = (sorted((ROOT / name).rglob("*.py")) for name in ("paceline", "tests/faults"))
    return hash_of(ROOT, (path for part in files for path in part))


if __name__ == "__main__":
    sys.exit(main())
