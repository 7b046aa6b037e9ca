"""Results of a benchmark: JSON to compare, and a table to read."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from math import floor, log10
from pathlib import Path
from typing import Any

import numpy as np

from paceline.commands.machine import cpu_info, package_version
from paceline.commands.session import Answer
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


def short(value: float) -> str:
    """Three significant digits: `0.0123`, `4.56`, `78.9`, `1,230`."""
    rounded = float(f"{value:.3g}")
    digits = 2 - floor(log10(abs(rounded))) if rounded else 0
    return f"{rounded:,.{max(digits, 0)}f}"


def percent(share: float) -> str:
    return f"{short(100 * share)}%"


def acceptance(
    num_drafts: float,
    num_draft_tokens: float,
    num_accepted: float,
    accepted_per_position: Sequence[float] = (),
) -> dict[str, Any]:
    """Accepted drafts as a share of verified drafts, and as tokens per step with drafts.

    By position it is the share of steps with drafts whose draft at this position was accepted.
    """
    if not num_draft_tokens:
        return {}
    found: dict[str, Any] = {"acceptance_rate": round(num_accepted / num_draft_tokens, 4)}
    if num_drafts:
        found["tokens_per_step"] = round(1 + num_accepted / num_drafts, 4)
        shares = [round(count / num_drafts, 4) for count in accepted_per_position]
        found["acceptance_by_position"] = shares
    return found


def engine_rows(model: str, device: str, dtype: str, drafter: str) -> list[tuple[str, str]]:
    """What was measured: the first rows of every table."""
    return [("Model", model), ("Device", f"{device}, {dtype}"), ("Drafter", drafter)]


def token_latencies(answers: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """Time to first token, and mean time of the tokens after the first arrival, per answer."""
    ttft_s, tpot_s = [], []
    for answer in answers:
        if answer.arrivals:
            first, last = answer.arrivals[0], answer.arrivals[-1]
            ttft_s.append(first[0] - answer.metrics.arrival_time)
            if len(answer.arrivals) > 1:
                tpot_s.append((last[0] - first[0]) / (answer.num_tokens - first[1]))
    return {"ttft_ms": spread(ttft_s, 1e3), "tpot_ms": spread(tpot_s, 1e3)}


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
        shares = f"p50 {percent(found['idle_share']['p50'])}  all {percent(found['bubble_share'])}"
        rows.append(("Device idle, share of the step", shares))
    rows += spread_rows("Host work per step", "ms", found["host_ms"])
    if "host_share_of_device" in found:
        device_ms, share = found["device_ms"]["p50"], found["host_share_of_device"]
        rows.append(
            ("Host work, share of device work", f"p50 {percent(share)} of {short(device_ms)} ms")
        )
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
    return [(f"{title} ({unit})", "  ".join(f"{n} {short(v)}" for n, v in values.items()))]


def token_latency_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        *spread_rows("Time to first token", "ms", result["ttft_ms"]),
        *spread_rows("Time per output token", "ms", result["tpot_ms"]),
    ]


def acceptance_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "acceptance_rate" not in values:
        return []
    rows = [("Drafts accepted", percent(values["acceptance_rate"]))]
    if by_position := values.get("acceptance_by_position"):
        rows.append(("Accepted by position", "  ".join(map(percent, by_position))))
    if "tokens_per_step" in values:
        rows.append(("Tokens per verify step", short(values["tokens_per_step"])))
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
