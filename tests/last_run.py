"""What the record of a test run says: its sources, where it ran, how long each file took."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

VERSIONS = ("torch", "triton", "transformers", "numpy", "pytest")


def hash_of(root: Path, paths: Iterable[Path]) -> str:
    """Over names and bytes."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def sources_hash(root: Path, folders: Sequence[str]) -> str:
    """Of all Python files in these folders of the package."""
    parts = (sorted((root / "paceline" / folder).rglob("*.py")) for folder in folders)
    return hash_of(root, (path for part in parts for path in part))


def git_commit(root: Path) -> str | None:
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except OSError:
        return None
    return done.stdout.strip() or None


def versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def about_this_run(root: Path) -> dict[str, Any]:
    """The beginning of a record. Call it before the run: the tree may change meanwhile."""
    command = ["git", "-C", str(root), "status", "--porcelain", "--", "paceline", "tests"]
    commit = git_commit(root)
    changed = (
        subprocess.run(command, capture_output=True, text=True, check=False) if commit else None
    )
    return {
        "commit": commit,
        "has_local_changes": bool(changed and changed.stdout.strip()),
        "date": time.strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {"python": platform.python_version(), **versions()},
    }


def by_file(seconds: Iterable[tuple[str, float]]) -> dict[str, dict[str, float]]:
    """Tests of each file, and the seconds that they took together; of pairs (test, seconds)."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for test, took_s in seconds:
        found[test.partition("::")[0]].append(took_s)
    return {
        name: {"tests": len(each), "seconds": round(sum(each), 1)}
        for name, each in sorted(found.items())
    }
