"""What the long runs write down, and by which rules they judge."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

import pytest

from tests import run_faults, run_soak
from tests.faults.rounds import RECOVERY_S, STALL_S, Round
from tests.faults.soak import FLAT_MIB_A_MINUTE, JUDGED_FROM_S, MemoryTrend, SoakReport
from tests.run_faults import Part

MIB = 2**20


class FakeBench:
    """Every round is good, and has recovered in time."""

    def __init__(self, folder: Path) -> None:
        pass

    def run(self, seed: int, number: int) -> Round:
        return Round(number, "dp2", ["front clock 0"], [], 1, STALL_S + 3.0, 2.0, 9.0)

    def close(self) -> list[str]:
        return []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_faults, "FOLDER", tmp_path)
    monkeypatch.setattr(run_faults, "Bench", FakeBench)
    monkeypatch.setattr("os.dup2", lambda old, new: None)
    return tmp_path


def test_the_parts_of_a_run_are_all_rounds_once_and_the_last_writes_the_record(
    folder: Path,
) -> None:
    report = folder / "report.json"
    arguments = ["--rounds", "7", "--seed", "4", "--report", str(report)]
    assert run_faults.main([*arguments, "--part", "1/2"]) == 0
    assert not report.exists()
    assert run_faults.main([*arguments, "--part", "2/2"]) == 0
    record = json.loads(report.read_text(encoding="utf-8"))
    assert (record["seed"], record["rounds"], record["restarts"]) == (4, 7, 7)
    assert record["faults"] == {"front clock": 7}
    assert (record["recoveries"], record["late"], record["bad"]) == (7, [], [])
    assert record["longest_beside_stall_timeout_and_start_s"] == 1.0
    assert "commit" in record


def test_rounds_of_other_sources_do_not_count(folder: Path) -> None:
    part = Part(1, 1, 1, "now")
    part.write([Round(0, "dp2")])
    assert [r.number for r in part.read()] == [0]
    assert replace(part, sources="later").read() == []
    assert part.of_all(1) is not None
    assert part.of_all(2) is None


def test_a_recovery_is_late_after_the_stall_timeout_the_start_and_two_seconds() -> None:
    done = Round(0, "dp2", num_restarts=1, start_s=3.0, recovery_s=STALL_S + 3.0 + RECOVERY_S)
    assert not done.is_late
    late = replace(done, recovery_s=done.limit_s + 0.1)
    assert late.is_late
    assert run_faults.summary([done, late])["late"] == [str(late)]


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "a/b"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="1/2"):
        run_faults._part(text)


def trend(*mib: float) -> MemoryTrend:
    """Of one sample a minute."""
    return MemoryTrend.of("front", [(60.0 * i, round(m * MIB)) for i, m in enumerate(mib)])


def test_memory_that_has_filled_up_is_flat_and_a_leak_is_not() -> None:
    assert trend(10, 14, 17, 19, 20, 20, 20, 20, 20).slope == 0.0
    assert trend(10, 10, 10, 10, 10, 10, 10, 16, 16, 16, 16, 16).slope <= 2.0  # a jump
    assert trend(*(20 + 0.5 * i for i in range(20))).slope == 0.5
    noisy = [20 + 0.5 * i + (3 if i == 15 else 0) for i in range(20)]
    assert trend(*noisy).slope == pytest.approx(0.5)


def test_a_long_soak_misses_growth_a_short_one_does_not() -> None:
    leak = MemoryTrend("front", 50.0, 2 * FLAT_MIB_A_MINUTE)
    assert SoakReport(60.0, memory=[leak]).misses() == []
    assert "front" in SoakReport(JUDGED_FROM_S, memory=[leak]).misses()[0]
    flat = SoakReport(JUDGED_FROM_S, memory=[replace(leak, slope=FLAT_MIB_A_MINUTE)])
    assert flat.misses() == []
    assert replace(flat, after={"num_requests_running": 1.0}).misses()
    assert replace(flat, still_at_least_s=1.5).misses()
    assert replace(flat, complaints=["429 without Retry-After"]).misses()


def test_a_soak_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SoakReport(60.0, memory=[trend(1, 2, 3)], after={"num_requests_running": 0.0})
    seen.outcomes["429"] += 1
    monkeypatch.setattr(run_soak, "soak", lambda *arguments: seen)
    report = tmp_path / "report.json"
    assert run_soak.main(["--minutes", "1", "--report", str(report)]) == 0
    record = json.loads(report.read_text(encoding="utf-8"))
    assert (record["outcomes"], record["missed"]) == ({"429": 1}, [])
    assert record["memory"][0]["name"] == "front"
