"""Runs the tests that need an NVIDIA GPU and writes down what ran where: tests/gpu_last_run.json.

usage: python tests/run_gpu.py [--jobs N] [--report FILE] [--commit SHA] [-k WORDS] [pytest ...]
       python tests/run_gpu.py --stale    (warns when the sources have changed since that run)

Starting engines and compiling kernels keep the host busy, not the GPU, so several processes share
it. Needs pytest and hypothesis beside what the engine needs, and no plugin of pytest. Files whose
own imports are missing are left out and named.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # started as a script, its own folder is there

from tests.last_run import by_file, git_commit, sources_hash, versions  # noqa: E402
from tests.parallel_pytest import Done, ParallelRun  # noqa: E402

REPORT = ROOT / "tests" / "gpu_last_run.json"
# What a GPU run says something about.
HASHED = ("kernels", "parallel", "runner", "drafters", "sampling", "state")
MARK = "gpu"
MOST_JOBS = 8
NUM_SLOWEST = 10


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", type=Path, help=f"[{REPORT.relative_to(ROOT)}]")
    parser.add_argument("--commit", help="for a copy of the tree that is no git checkout")
    parser.add_argument("--stale", action="store_true")
    num_cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=min(MOST_JOBS, num_cores), help="[%(default)s]")
    parser.add_argument("--seconds", type=float, default=1800.0, help="the most for all [1800]")
    parser.add_argument("--test-seconds", type=float, default=300.0, help="the most for one [300]")
    parser.add_argument("-k", dest="words", default="")
    args, rest = parser.parse_known_args()
    if args.stale:
        warn_if_stale()
        return 0
    if importlib.util.find_spec("pytest") is None:
        print("pytest is missing: pip install pytest hypothesis")
        return 1
    import torch

    has_gpu = torch.cuda.is_available()
    if args.report is None and not has_gpu:
        print("No NVIDIA GPU here: every test will be skipped, and no report is written.")
    files, left_out = gpu_files()
    for name in left_out:
        print(f"left out: {name}")
    began_s = time.perf_counter()
    done = run_tests(args, files, rest)
    seconds = time.perf_counter() - began_s
    counts = Counter(one.outcome for one in done)
    print_times(done)
    print(
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped "
        f"in {seconds:.0f} s with {args.jobs} processes"
    )
    record = {
        "commit": args.commit or git_commit(ROOT),
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **versions()},
        "selection": args.words or None,
        "jobs": args.jobs,
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "failures": sorted(one.test for one in done if one.outcome == "failed"),
        "left_out": left_out,
        "seconds": round(seconds),
        "files": by_file((one.test, one.seconds) for one in done),
        "sources_sha256": sources_hash(ROOT, HASHED),
    }
    if args.report is not None or has_gpu:
        (args.report or REPORT).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if counts["failed"] or not done else 0


def run_tests(args: argparse.Namespace, files: Sequence[Path], rest: Sequence[str]) -> list[Done]:
    words = ["-k", args.words] if args.words else []
    arguments = [*map(str, files), "-m", MARK, f"--rootdir={ROOT}", *words, *rest]
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-", ignore_cleanup_errors=True) as folder:
        run = ParallelRun(
            ROOT,
            arguments,
            Path(folder),
            lambda line: print(line, flush=True),
            test_s=args.test_seconds,
            seconds=args.seconds,
        )
        return run.run(args.jobs)


def print_times(done: Sequence[Done]) -> None:
    print("\n  tests  seconds  file (seconds of all processes together)")
    for name, row in by_file((one.test, one.seconds) for one in done).items():
        print(f"{row['tests']:>7} {row['seconds']:>8.1f}  {name}")
    print(f"\n          seconds  the slowest {NUM_SLOWEST} tests")
    for one in sorted(done, key=lambda one: -one.seconds)[:NUM_SLOWEST]:
        print(f"{one.seconds:>16.1f}  {one.test}")


def gpu_files() -> tuple[list[Path], list[str]]:
    """Test files with GPU tests, and those among them that cannot be imported here."""
    files, left_out = [], []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if f"pytest.mark.{MARK}" not in text:
            continue
        missing = sorted(_imports(text) - _importable(_imports(text)))
        if missing:
            left_out.append(f"{path.relative_to(ROOT)} (needs {', '.join(missing)})")
        else:
            files.append(path)
    return files, left_out


def _imports(text: str) -> set[str]:
    """Packages that a file imports when it is imported itself."""
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def _importable(names: set[str]) -> set[str]:
    return {n for n in names if n in sys.modules or importlib.util.find_spec(n) is not None}


def warn_if_stale() -> None:
    try:
        record = json.loads(REPORT.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        print("warning: no GPU run is on record; `make test-gpu` on a machine with one writes it")
        return
    if record["sources_sha256"] != sources_hash(ROOT, HASHED):
        print(
            f"warning: {', '.join(HASHED)} have changed since the last GPU run ({record['date']}, "
            f"{record['gpu']}, commit {str(record['commit'])[:10]}); run `make test-gpu`"
        )
    if record["failed"] or record["selection"]:
        print(f"warning: the last GPU run: {record['failed']} failed, -k {record['selection']!r}")


if __name__ == "__main__":
    sys.exit(main())
