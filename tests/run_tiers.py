"""Runs a tier of tests that takes long: `more` is written down, `all` can be interrupted.

usage: python tests/run_tiers.py more [pytest ...]    writes tests/more_last_run.json
       python tests/run_tiers.py more --stale         warns when the sources have changed since
       python tests/run_tiers.py all [pytest ...]     goes on where the last such run stopped

What `all` has passed is in .pytest_cache/passed.txt, for as long as no source changes; delete the
file to begin anew. It runs in one process: the ladders start their own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # started as a script, its own folder is there

from tests.last_run import about_this_run, by_file, hash_of, sources_hash  # noqa: E402

REPORT = ROOT / "tests" / "more_last_run.json"
PASSED = ROOT / ".pytest_cache" / "passed.txt"
# What the tests of `more` say something about.
HASHED = (
    *("drafters", "engine", "kernels", "layers", "models", "parallel"),
    *("runner", "sampling", "scheduler", "server", "state"),
)
NOT_GPU = "not gpu and not multi_gpu"
HARMLESS = ("-n", "--dist", "--durations", "-q", "-v")  # options that leave no test out


class Outcomes:
    """A plugin: how each test ended, and how long it took."""

    def __init__(self) -> None:
        self.outcome: dict[str, str] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by test

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self.seconds[test] += report.duration
        if report.failed:
            self.outcome[test] = "failed"
        elif report.skipped:
            self.outcome.setdefault(test, "skipped")
        elif report.when == "teardown":
            self.outcome.setdefault(test, "passed")


class Resumed(Outcomes):
    """A plugin that leaves out what has passed, and writes down what passes."""

    def __init__(self, file: Path, tree: str) -> None:
        """`tree` says which sources passed; what others passed counts for nothing."""
        super().__init__()
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self._passed = set(lines[1:]) if lines[:1] == [tree] else set()
        file.parent.mkdir(exist_ok=True)
        if not self._passed:
            file.write_text(f"{tree}\n", encoding="utf-8")
        self._file = file

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        done = [item for item in items if item.nodeid in self._passed]
        if done:
            print(f"\n{len(done)} tests have passed before and are left out")
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item.nodeid not in self._passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        super().pytest_runtest_logreport(report)
        if report.when == "teardown" and self.outcome.get(report.nodeid) == "passed":
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tier", choices=["more", "all"])
    parser.add_argument("--stale", action="store_true")
    args, rest = parser.parse_known_args(argv)
    if args.stale:
        warn_if_stale()
        return 0
    return run_more(rest) if args.tier == "more" else run_all(rest)


def run_more(rest: Sequence[str]) -> int:
    outcomes, began_s = Outcomes(), time.perf_counter()
    status = pytest.main(["-m", f"more and {NOT_GPU}", *rest], plugins=[outcomes])
    counts = Counter(outcomes.outcome.values())
    is_part = any(not word.startswith(HARMLESS) for word in rest)
    if is_part or not counts or status not in (0, 1):
        print("No record is written: not every test of the tier was run.")
        return int(status)
    record: dict[str, Any] = {
        **about_this_run(ROOT),
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "failures": sorted(test for test, how in outcomes.outcome.items() if how == "failed"),
        "seconds": round(time.perf_counter() - began_s),
        "files": by_file(outcomes.seconds.items()),
        "sources_sha256": sources_hash(ROOT, HASHED),
    }
    REPORT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(status)


def warn_if_stale() -> None:
    try:
        record = json.loads(REPORT.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        print("warning: no run of `make test-more` is on record; run it")
        return
    if record["sources_sha256"] != sources_hash(ROOT, HASHED):
        print(
            f"warning: the sources have changed since the last `make test-more` "
            f"({record['date']}, commit {str(record['commit'])[:10]}); run it again"
        )
    if record["failed"]:
        print(f"warning: the last `make test-more`: {record['failed']} failed")


def run_all(rest: Sequence[str]) -> int:
    return int(pytest.main(["-m", NOT_GPU, *rest], plugins=[Resumed(PASSED, tree_hash())]))


def tree_hash() -> str:
    """Over all that can change how a test ends."""
    parts = (sorted((ROOT / name).rglob("*.py")) for name in ("paceline", "tests", "bench", "docs"))
    return hash_of(ROOT, [ROOT / "pyproject.toml", *(path for part in parts for path in part)])


if __name__ == "__main__":
    sys.exit(main())
