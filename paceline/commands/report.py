"""Results of a benchmark: JSON to compare, and a table to read."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.commands.machine import cpu_info, package_version
from paceline.config import EngineConfig
from paceline.engine.messages import StepTimes
from paceline.errors import ConfigError
from paceline.step import RunnerInfo

_PERCENTILES = (50, 90, 99)
_PACKAGES = ("paceline", "torch", "numpy", "triton")


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Mean and percentiles; {} without values."""
    if not values:
        return {}
    scaled = np.asarray(values, np.float64) * scale
    points = np.percentile(scaled, _PERCENTILES)
    found = {"mean": float(scaled.mean())}
    found |= {f"p{p}": float(v) for p, v in zip(_PERCENTILES, points, strict=True)}
    return {name: round(value, 4) for name, value in found.items()}


def acceptance(num_drafts: float, num_draft_tokens: float, num_accepted: float) -> dict[str, float]:
    """Accepted drafts as a share of verified drafts, and as tokens per step with drafts."""
    if not num_draft_tokens:
        return {}
    found = {"acceptance_rate": round(num_accepted / num_draft_tokens, 4)}
    if num_drafts:
        found["tokens_per_step"] = round(1 + num_accepted / num_drafts, 4)
    return found


def step_times(times: Sequence[StepTimes]) -> dict[str, Any]:
    """Step time, device idle time before the step, and host time.

    The first step after the engine was idle has no bubble and is left out.
    """
    steady = [t for t in times if t.idle_s >= 0.0]
    if not steady:
        return {}
    step_s = [t.idle_s + t.busy_s for t in steady]
    idle_share = [t.idle_s / s for t, s in zip(steady, step_s, strict=True) if s > 0.0]
    device_ms = spread([t.busy_s for t in steady], 1e3)
    host_ms = spread([t.host_s for t in steady], 1e3)
    found: dict[str, Any] = {
        "num_steps": len(steady),
        "step_ms": spread(step_s, 1e3),
        "device_ms": device_ms,
        "host_ms": host_ms,
        "idle_us": spread([t.idle_s for t in steady], 1e6),
        "idle_share": spread(idle_share),
    }
    if sum(step_s) > 0.0:
        found["bubble_share"] = round(sum(t.idle_s for t in steady) / sum(step_s), 4)
    if device_ms["p50"] > 0.0:
        found["host_share_of_device"] = round(host_ms["p50"] / device_ms["p50"], 4)
    return found


def step_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not found:
        return []
    rows = [
        *spread_rows("Step", "ms", found["step_ms"]),
        *spread_rows("Device idle between steps", "µs", found["idle_us"]),
    ]
    if "bubble_share" in found:
        shares = f"p50 {found['idle_share']['p50']:.2%}  all {found['bubble_share']:.2%}"
        rows.append(("Device idle, share of the step", shares))
    rows += spread_rows("Host work per step", "ms", found["host_ms"])
    if "host_share_of_device" in found:
        device_ms, share = found["device_ms"]["p50"], found["host_share_of_device"]
        rows.append(("Host work, share of device work", f"p50 {share:.1%} of {device_ms:,.3f} ms"))
    return rows


def resolved(config: EngineConfig, info: RunnerInfo) -> dict[str, Any]:
    """The configuration, with the values that the engine chose."""
    return config.flat() | {
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.num_slots,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "num_gpu_blocks": info.num_pages,
    }


def machine() -> dict[str, Any]:
    """Machine, versions and commit: what must be equal for results to be comparable."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_info()[0],
        "cores": len(os.sched_getaffinity(0)),
        "commit": _commit(),
        "versions": {name: v for name in _PACKAGES if (v := package_version(name)) is not None},
    }


def publish(result: Mapping[str, Any], rows: Sequence[tuple[str, str]], path: str | None) -> None:
    """Print the table, and write the JSON to `path`. For "-" the JSON goes to standard output."""
    text = json.dumps(result, indent=2)
    if path == "-":
        print(text)
        print(render(rows), file=sys.stderr)
        return
    print(render(rows))
    if path is not None:
        try:
            Path(path).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output-json {path}: {error.strerror}.") from None


def render(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def spread_rows(title: str, unit: str, values: Mapping[str, float]) -> list[tuple[str, str]]:
    """`TTFT (ms)   mean 12.1  p50 11.9  p90 13.0  p99 20.2`."""
    if not values:
        return []
    digits = 3 if unit == "ms" else 1
    return [(f"{title} ({unit})", "  ".join(f"{n} {v:,.{digits}f}" for n, v in values.items()))]


def token_latency_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        *spread_rows("Time to first token", "ms", result["ttft_ms"]),
        *spread_rows("Time per output token", "ms", result["tpot_ms"]),
    ]


def acceptance_rows(values: Mapping[str, float]) -> list[tuple[str, str]]:
    if "acceptance_rate" not in values:
        return []
    rows = [("Drafts accepted", f"{values['acceptance_rate']:.1%}")]
    if "tokens_per_step" in values:
        rows.append(("Tokens per verify step", f"{values['tokens_per_step']:.2f}"))
    return rows


def _commit() -> str | None:
    """The commit of this checkout, with "-dirty" if files differ; None if it is not a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    describe = ("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    command = ["git", "-C", str(root), *describe]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
