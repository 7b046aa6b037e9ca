"""Facts about this machine. Needs the standard library alone, for `paceline doctor`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def cpu_info() -> tuple[str, set[str]]:
    """The CPU's name and its feature flags."""
    found: dict[str, str] = {}
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    name = found.get("model name") or platform.processor() or platform.machine()
    return name, set((found.get("flags") or found.get("Features") or "").split())


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
