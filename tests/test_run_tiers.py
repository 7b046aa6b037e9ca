"""The tiers of tests: what a long run writes down, and how an interrupted one goes on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import run_tiers
from tests.architecture.source_tree import ROOT
from tests.last_run import sources_hash
from tests.run_tiers import HASHED, warn_if_stale
from tests.tiers import first_or_more

SAMPLE = """
import pathlib
import pytest

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.more)])
def test_numbers(n):
    assert n

@pytest.mark.more
def test_until_it_is_mended():
    assert (pathlib.Path(__file__).parents[1] / "mended").exists()

@pytest.mark.gpu
@pytest.mark.more
def test_elsewhere():
    raise AssertionError

@pytest.mark.slow
def test_ladder():
    pass
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with four tests and its own way to run them."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    (tests / "test_sample.py").write_text(SAMPLE, encoding="utf-8")
    for name in ("run_tiers.py", "last_run.py"):
        shutil.copy(ROOT / "tests" / name, tests / name)
    marks = "".join(f' "{name}",' for name in ("more", "slow", "gpu", "multi_gpu"))
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\nmarkers = [{marks}]\n")
    return tmp_path


def run(project: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "tests/run_tiers.py", *arguments, "-v"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_the_record_of_more_says_what_ran_and_on_which_sources(project: Path) -> None:
    command = [sys.executable, "tests/run_tiers.py", "more"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    record = json.loads((project / "tests" / "more_last_run.json").read_text(encoding="utf-8"))
    assert (record["passed"], record["failed"], record["skipped"]) == (1, 1, 0)
    assert record["failures"] == ["tests/test_sample.py::test_until_it_is_mended"]
    assert record["files"]["tests/test_sample.py"]["tests"] == 2
    assert record["sources_sha256"] == sources_hash(project, HASHED)


def test_a_part_of_more_leaves_the_record_alone(project: Path) -> None:
    status, said = run(project, "more", "-k", "numbers")
    assert status == 0, said
    assert "No record is written" in said
    assert not (project / "tests" / "more_last_run.json").exists()


def test_all_goes_on_where_it_stopped_until_a_source_changes(project: Path) -> None:
    status, said = run(project, "all", "-x")
    assert status == 1, said
    assert "2 passed" in said, "both numbers, before the first failure"
    (project / "mended").touch()
    status, said = run(project, "all")
    assert status == 0, said
    assert "2 tests have passed before and are left out" in said
    assert "test_until_it_is_mended PASSED" in said
    assert "test_ladder PASSED" in said
    assert "test_numbers" not in said
    assert "test_elsewhere" not in said
    sample = project / "tests" / "test_sample.py"
    sample.write_text(SAMPLE + "\n# changed\n", encoding="utf-8")
    status, said = run(project, "all")
    assert status == 0, said
    assert "4 passed" in said


def test_a_change_of_the_sources_makes_the_record_of_more_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "paceline" / "engine" / "engine.py"
    source.parent.mkdir(parents=True)
    source.write_text("x = 1\n", encoding="utf-8")
    monkeypatch.setattr(run_tiers, "ROOT", tmp_path)
    monkeypatch.setattr(run_tiers, "REPORT", tmp_path / "more_last_run.json")
    warn_if_stale()
    assert "no run of `make test-more` is on record" in capsys.readouterr().out
    record = {"sources_sha256": sources_hash(tmp_path, HASHED), "date": "2026-01-01"}
    run_tiers.REPORT.write_text(json.dumps({**record, "commit": "abc", "failed": 0}))
    warn_if_stale()
    assert capsys.readouterr().out == ""
    source.write_text("x = 2\n", encoding="utf-8")
    warn_if_stale()
    assert "have changed since the last `make test-more` (2026-01-01, commit abc)" in (
        capsys.readouterr().out
    )


def test_values_that_are_not_chosen_belong_to_more() -> None:
    found = first_or_more([1, 2, (3, 4)], lambda value: value == 2)
    assert [(one.values, [mark.name for mark in one.marks]) for one in found] == [
        ((1,), ["more"]),
        ((2,), []),
        ((3, 4), ["more"]),
    ]
