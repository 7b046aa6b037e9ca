"""Tables of measurements in docs/benchmarks.md say what the recorded runs say.

The README repeats some of their rows."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from bench.gpu_record import VLLM_LOAD, VLLM_TPOT_MS
from tests.architecture.source_tree import ROOT

PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()
README = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
RESULTS = ROOT / "bench" / "results"
# Rows of the H200's tables, in order.
TPOT_CASES = ("sm", "sm-eagle", "l8", "l8-eagle", "glm", "glm-mtp")
LOAD_CASES = ("l8", "l8-eagle", "sm-eagle")


def table(head: str) -> list[list[str]]:
    """Cells of the table whose first line begins so, without its head and the rows' names."""
    first = next(i for i, line in enumerate(PAGE) if line.startswith(head)) + 2
    last = PAGE.index("", first)
    return [[c.strip() for c in line.strip("|").split("|")[1:]] for line in PAGE[first:last]]


def numbers(cell: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", cell.replace(",", ""))


def is_rounded(shown: str, measured: float) -> bool:
    digits = len(shown.partition(".")[2])
    return abs(float(shown) - measured) <= 0.5001 * 0.1**digits


def h200(name: str) -> dict[str, Any]:
    (run,) = json.loads((RESULTS / "h200" / f"{name}.json").read_text(encoding="utf-8"))["runs"]
    return dict(run)


@pytest.mark.parametrize(("row", "case"), list(enumerate(TPOT_CASES)), ids=TPOT_CASES)
def test_times_per_token_on_an_h200(row: int, case: str) -> None:
    ours, theirs = table("| | Paceline | vLLM")[row]
    measured = h200(f"tpot-{case}")["tpot_ms"].values()
    assert all(is_rounded(*pair) for pair in zip(numbers(ours), measured, strict=True)), ours
    assert tuple(float(x) for x in numbers(theirs)) == VLLM_TPOT_MS[case]


@pytest.mark.parametrize(("row", "case"), list(enumerate(LOAD_CASES)), ids=LOAD_CASES)
def test_rates_under_load_on_an_h200(row: int, case: str) -> None:
    run = h200(f"load-{case}")
    heads = ["in 1x4096", "in 8x2048", "in 1x128", "out 256x512+128", "out 1x4000+256"]
    theirs = dict(zip([*heads, "out 64x4000+64"], VLLM_LOAD[case], strict=True))
    shown = [h for h in theirs if h != "in 1x128"]
    for what, cell in zip(shown, table("| | prompts 1x4096")[row], strict=True):
        rate, ratio = numbers(cell)
        assert int(rate) == run[f"{what} tok/s"]
        assert is_rounded(ratio, int(rate) / theirs[what]), (what, cell)


def runs(name: str) -> dict[Any, dict[str, Any]]:
    """By case, or by what else tells them apart."""
    record = json.loads((RESULTS / "h200" / f"{name}.json").read_text(encoding="utf-8"))
    return {run.get("case", run.get("rate")): run for run in record["runs"]}


def test_other_figures_of_an_h200() -> None:
    """Sentences, built from the files again."""
    text = "\n".join(PAGE)
    records = {case: h200(f"tpot-{case}") for case in TPOT_CASES}
    sync = {case: run["tpot_ms"] for case, run in runs("sync").items()}
    both = "{:.2f} against {:.2f} and {:.2f} against {:.2f}"
    for case, pattern in (
        ("sm", both.replace(" and", " ms per token for the 135M shape at one request and")),
        ("l8", f"{both} for the 8B shape"),
        ("l8-eagle", f"hide most of what the host does, {both}"),
    ):
        pairs = [(records[case]["tpot_ms"][n], sync[case][n]) for n in ("1", "64")]
        assert pattern.format(*pairs[0], *pairs[1]) in text
    sampled = max(
        ms / run["tpot_ms"][n]
        for run in records.values()
        for n, ms in run.get("sampled_tpot_ms", {}).items()
    )
    assert f"temperature and top_p costs {100 * (sampled - 1):.0f} % at most" in text
    steps = [step for run in records.values() for step in run["steps"].values()]
    assert f"to {100 * max(s['bubble_share'] for s in steps):.0f} % at worst" in text
    host_ms = [s["host_ms"]["p50"] for s in steps]
    assert f"the host needs {min(host_ms):.2f} to {max(host_ms):.2f} ms for a step" in text
    alone, busy = (runs("mixed-sm")[rate]["itl_ms"] for rate in (0.0, 32.0))
    assert f"at {alone['p50']:.2f} ms per token (median, p99 {alone['p99']:.2f})" in text
    assert f"at {busy['p50']:.2f} (p99 {busy['p99']:.2f}, at most {busy['max']:.1f})" in text
    start = runs("start")["l8"]
    first, warm = start["no_cache"]["init_s"], [x["init_s"] for x in start["cached"]]
    assert f"{first:.0f} s with no kernel cached, 8 to 9 s after that" in text
    assert all(8 <= seconds <= 9 for seconds in warm)


def test_the_readme_has_rows_of_this_page() -> None:
    rows = [line for line in README if line.startswith("|")]
    assert len(rows) > 3
    assert not [row for row in rows if row not in PAGE]


def test_figures_on_a_cpu() -> None:
    found: dict[str, Any] = {}
    for file in ("peers", "ngram"):
        record = json.loads((RESULTS / "cpu" / f"{file}.json").read_text(encoding="utf-8"))
        found |= {case["name"]: case for case in record["cases"]}
    rows = table("| | Paceline | transformers")
    for name, cells in zip(("one-request", "batch-8", "ttft-512", "n-gram"), rows, strict=True):
        case = found[name]
        scale = 1e-3 if case["unit"] == "ms" else 1.0
        compared = [r for r in case["rows"] if r["theirs"] != "paceline"]
        expected = [case["contenders"][compared[0]["ours"]]["median"] * scale]
        for row in compared:
            median = case["contenders"][row["theirs"]]["median"]
            expected += [median * scale, row["ratio"]["median"]]
        shown = [x for cell in cells for x in numbers(cell)]
        assert all(is_rounded(*pair) for pair in zip(shown, expected, strict=True)), (name, shown)
