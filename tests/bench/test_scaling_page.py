"""The sizes of messages on the page about scaling are those of the code."""

from __future__ import annotations

import json

from bench.front_scale import message
from paceline.engine.messages import _STEP_TIMES
from paceline.parallel.lockstep import _packed
from paceline.step import StepProposal
from tests.architecture.source_tree import ROOT

PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")


def test_bytes_of_results_and_agreements() -> None:
    per_row = len(message(1, [5])) - len(message(1, []))
    fixed = len(message(1, [])) + _STEP_TIMES.size  # of one step
    assert f"| {fixed} + {per_row} B, one message;" in PAGE
    row = 4 * len(_packed(StepProposal()))
    assert f"| {row} per leader |" in PAGE
    for replicas in (8, 64, 256, 512):
        results, agreement = replicas * (fixed + 64 * per_row), replicas * row
        shown = (
            f"| {replicas} | {replicas}, {short(results)} | {replicas - 1}, {short(agreement)} |"
        )
        assert shown in PAGE, shown


def short(size: int) -> str:
    for unit, name in ((1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{size / unit:.2g} {name}" if size < 100 * unit else f"{size / unit:.0f} {name}"
    return f"{size} B"


def test_the_table_of_the_front_is_the_record() -> None:
    path = ROOT / "bench" / "results" / "cpu" / "front_scale.json"
    for case in json.loads(path.read_text(encoding="utf-8"))["cases"]:
        counts = [f"{case[name]:,}" for name in ("replicas", "open", "active", "rows")]
        times = f"{case['submit_us']:.3g} | {case['token_us']:.3g}"
        assert f"| {' | '.join(counts)} | {times} |" in PAGE, (counts, times)
