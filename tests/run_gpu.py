"""Runs the tests that need an NVIDIA GPU and writes down what ran where: tests/gpu_last_run.json.

usage: python tests/run_gpu.py [--report FILE] [--commit SHA] [--jobs N] [-k WORDS] [pytest ...]
       python tests/run_gpu.py --stale    (warns when the sources have changed since that run)

Needs torch, triton, numpy, safetensors, tokenizers, transformers and jinja2; pytest if it is there.
Files whose own imports are missing are left out and named.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "tests" / "gpu_last_run.json"
# What a GPU run says something about.
HASHED = ("kernels", "parallel", "runner", "drafters", "sampling", "state")
VERSIONS = ("torch", "triton", "transformers", "numpy", "pytest")
MARK = "gpu"
ALONE = "alone"  # not beside others


@dataclass(eq=False)
class Outcomes:
    """How each test ended. As a plugin it learns that from pytest."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    share: tuple[int, ...] = (0, 1)  # which tests of all: from this one on, every so manyeth

    def add(self, other: Outcomes) -> None:
        self.counts += other.counts
        self.failures += other.failures

    def take(self, name: str, state: str) -> None:
        self.counts[state] += 1
        if state == "failed":
            self.failures.append(name)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        first, step = self.share
        items[:] = items[first::step]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.take(report.nodeid, report.outcome)

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self.take(report.nodeid, "failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help=f"[{REPORT.relative_to(ROOT)}]")
    parser.add_argument("--commit", help="for a copy of the tree that is no git checkout")
    parser.add_argument("--stale", action="store_true")
    parser.add_argument("--plain", action="store_true", help="without pytest, even if it is there")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, with pytest")
    parser.add_argument("--seconds", type=float, help="--jobs that take longer are stopped")
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)  # of one such process
    parser.add_argument("-k", dest="words", default="")
    args, rest = parser.parse_known_args()
    if args.stale:
        warn_if_stale()
        return 0
    sys.path.insert(0, str(ROOT))
    import torch

    if args.report is None and not torch.cuda.is_available():
        print("No NVIDIA GPU here: every test will be skipped, and no report is written.")
    started_s = time.perf_counter()
    with_pytest = not args.plain and importlib.util.find_spec("pytest") is not None
    files, left_out = gpu_files(with_pytest=with_pytest)
    if with_pytest and args.jobs > 1:
        outcomes = run_side_by_side(args.jobs, args.seconds, args.words, rest)
        outcomes.add(run_with_pytest(files, args.words, rest, f"{MARK} and {ALONE}"))
    elif with_pytest:
        marks = MARK if args.share is None else f"{MARK} and not {ALONE}"
        share = (0, 1) if args.share is None else tuple(args.share)
        outcomes = run_with_pytest(files, args.words, rest, marks, share)
    else:
        outcomes = run_plainly(files, args.words, rest)
    for name in left_out:
        print(f"left out: {name}")
    counts = {state: outcomes.counts[state] for state in ("passed", "failed", "skipped")}
    print(f"{counts} in {time.perf_counter() - started_s:.0f} s")
    record = {
        "commit": args.commit or git_commit(),
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **versions()},
        "runner": "pytest" if with_pytest else "plain",
        "selection": args.words or None,
        **counts,
        "failures": outcomes.failures,
        "left_out": left_out,
        "seconds": round(time.perf_counter() - started_s),
        "sources_sha256": sources_hash(),
    }
    if args.report is not None or torch.cuda.is_available():
        (args.report or REPORT).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if counts["failed"] or not sum(counts.values()) else 0


def gpu_files(*, with_pytest: bool) -> tuple[list[Path], list[str]]:
    """Test files with GPU tests, and those among them that cannot be imported here."""
    files, left_out = [], []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if f"pytest.mark.{MARK}" not in text:
            continue
        known = set() if with_pytest else {"pytest"}
        missing = sorted(_imports(text) - known - _importable(_imports(text)))
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


def run_with_pytest(
    files: list[Path], words: str, rest: list[str], marks: str, share: tuple[int, ...] = (0, 1)
) -> Outcomes:
    import pytest

    outcomes = Outcomes(share=share)
    chosen = ["-k", words] if words else []
    arguments = [*map(str, files), "-m", marks, f"--rootdir={ROOT}", *chosen, *rest]
    code = pytest.main(arguments, plugins=[outcomes])
    fine = {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}
    if marks != MARK:
        fine.add(pytest.ExitCode.NO_TESTS_COLLECTED)
    if code not in fine and not outcomes.failures:
        outcomes.take(f"pytest ended with {code!r}", "failed")
    return outcomes


def run_side_by_side(num_jobs: int, seconds: float | None, words: str, rest: list[str]) -> Outcomes:
    """Compiling and starting engines keep the host busy, not the GPU: processes share it well."""
    outcomes = Outcomes()
    end_s = None if seconds is None else time.monotonic() + seconds
    # Threads of all of them together would wait for each other in loops.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"{job}.json" for job in range(num_jobs)]
        jobs = []
        for job, report in enumerate(reports):
            command = [sys.executable, __file__, "--share", str(job), str(num_jobs)]
            command += ["--report", str(report), "-k", words, *rest]
            log = report.with_suffix(".log").open("w")
            jobs.append(subprocess.Popen(command, stdout=log, env=environment))
        for job, (process, report) in enumerate(zip(jobs, reports, strict=True)):
            code: int | str = "no time left"
            try:
                code = process.wait(None if end_s is None else max(0.1, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            print(report.with_suffix(".log").read_text(encoding="utf-8"))
            if not report.exists():
                outcomes.take(f"process {job} of {num_jobs} ended with {code}", "failed")
                continue
            found = json.loads(report.read_text(encoding="utf-8"))
            counts = Counter({s: found[s] for s in ("passed", "failed", "skipped")})
            outcomes.add(Outcomes(counts, found["failures"]))
    return outcomes


def run_plainly(files: list[Path], words: str, rest: list[str]) -> Outcomes:
    import torch

    from tests import plain_pytest

    if rest:
        print(f"without pytest these are ignored: {' '.join(rest)}")
    plain_pytest.install()
    outcomes, shared = Outcomes(), plain_pytest.Shared()
    for path in files:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for done in plain_pytest.run_module(
            name, MARK, shared, words, can_run=torch.cuda.is_available()
        ):
            outcomes.take(done.name, done.state)
            print(f"{done.state:>7} {done.name} {done.seconds:.1f} s\n{done.text}".rstrip())
    shared.close()
    return outcomes


def sources_hash() -> str:
    """Over names and bytes of what the GPU tests are about."""
    digest = hashlib.sha256()
    for folder in HASHED:
        for path in sorted((ROOT / "paceline" / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def warn_if_stale() -> None:
    try:
        record = json.loads(REPORT.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        print("warning: no GPU run is on record; `make test-gpu` on a machine with one writes it")
        return
    if record["sources_sha256"] != sources_hash():
        print(
            f"warning: {', '.join(HASHED)} have changed since the last GPU run ({record['date']}, "
            f"{record['gpu']}, commit {str(record['commit'])[:10]}); run `make test-gpu`"
        )
    if record["failed"] or record["selection"]:
        print(f"warning: the last GPU run: {record['failed']} failed, -k {record['selection']!r}")


def versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except OSError:
        return None
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
