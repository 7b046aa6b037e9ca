"""Runs many rounds of faults; goes on where it was interrupted.

usage: python tests/run_faults.py [--rounds 200] [--seed 1] [--layout NAME] [--again]

What is done is in .pytest_cache/faults_SEED.json, what the ranks said in faults_SEED.log beside it;
--again begins anew.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # started as a script, its own folder is there

from tests.faults.rounds import LAYOUTS, STALL_S, Bench, Round  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layout", choices=[*LAYOUTS])
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args(argv)
    folder = ROOT / ".pytest_cache"
    folder.mkdir(exist_ok=True)
    # The ranks report what happened to them; that is much, and of use only if a round is bad.
    with (folder / f"faults_{args.seed}.log").open("a", encoding="utf-8") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    logging.basicConfig(level=logging.WARNING)
    state = folder / f"faults_{args.seed}.json"
    if args.again:
        state.unlink(missing_ok=True)
    done = _read(state)
    if done:
        print(f"{len(done)} of {args.rounds} rounds were done before")
    bench = Bench(folder / "faults_models")
    try:
        for number in range(args.rounds):
            if number in done:
                continue
            done[number] = bench.run(args.seed, number, args.layout)
            print(done[number], flush=True)
            state.write_text(json.dumps([asdict(r) for r in done.values()]), encoding="utf-8")
    finally:
        left = bench.close()
    return report([*done.values()], left)


def _read(state: Path) -> dict[int, Round]:
    if not state.exists():
        return {}
    rounds = [Round(**values) for values in json.loads(state.read_text(encoding="utf-8"))]
    return {r.number: r for r in rounds}


def report(rounds: list[Round], left: list[str]) -> int:
    bad = [r for r in rounds if r.complaints]
    times = sorted(r.recovery_s for r in rounds if r.num_restarts)
    late = [r for r in rounds if r.recovery_s > STALL_S + r.start_s + 2.0 and r.start_s]
    print(f"{len(rounds)} rounds, {sum(r.num_restarts for r in rounds)} restarts, {len(bad)} bad")
    if times:
        print(f"recovery: median {times[len(times) // 2]:.1f} s, longest {times[-1]:.1f} s")
        print(f"{len(late)} recoveries took longer than stall timeout + start + 2 s")
    for line in (*map(str, bad), *left):
        print(line)
    return 1 if bad or left else 0


if __name__ == "__main__":
    sys.exit(main())
