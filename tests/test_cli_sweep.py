"""`paceline bench sweep` on the echo engine: rows, pictures, and a sweep that goes on."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline.cli import main
from paceline.commands import bench_sweep
from paceline.commands.bench_sweep import best_k, by_position, drafter_name
from tests.echo_session import use_echo

LOAD = ["--num-prompts", "5", "--input-len", "6", "--output-len", "5"]


@pytest.fixture(autouse=True)
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    use_echo(monkeypatch)


def sweep(folder: Path, *flags: str, code: int = 0, model: str = "k=2") -> list[dict[str, str]]:
    """The echo engine drafts k=2 whatever the drafter is."""
    argv = ["bench", "sweep", f"{model} slots=4", "--output-dir", str(folder / "out"), *LOAD]
    assert main([*argv, *flags]) == code
    path = folder / "out" / "sweep.csv"
    return read(path) if path.exists() else []


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_each_load_k_and_drafter_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = sweep(tmp_path, "--concurrency", "1", "4", "--draft-tokens", "1", "2")
    keys = [(r["drafter"], r["k"], r["concurrency"]) for r in rows]
    variants = [("none", "0"), ("ngram", "1"), ("ngram", "2")]
    assert keys == [(*v, n) for v in variants for n in ("1", "4")]
    assert [r["num_prompts"] for r in rows] == ["5", "8"] * 3
    assert {r["model"] for r in rows} == {"echo"}
    assert all(float(r["output_tokens_per_s"]) > 0 for r in rows)
    assert {len(r["acceptance_by_position"].split()) for r in rows} == {2}
    table = capsys.readouterr().out
    assert re.search(
        r"Model +echo\nDevice +cpu, float32\nDrafter +none, ngram K=1, ngram K=2", table
    )
    assert len(re.findall(r"Best with [14] at once +\S+.* tok/s", table)) == 2
    picture = (tmp_path / "out" / "sweep.svg").read_text(encoding="utf-8")
    titles = [e.text for e in ElementTree.fromstring(picture).iter() if e.get("class") == "title"]
    assert len(titles) == 4


def test_a_sweep_that_was_stopped_measures_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    limit = 2
    measuring = bench_sweep.keep_busy

    def watched(*arguments: Any) -> Any:
        if len(asked) == limit:
            raise KeyboardInterrupt
        asked.append(arguments[3])
        return measuring(*arguments)

    monkeypatch.setattr(bench_sweep, "keep_busy", watched)
    flags = ["--concurrency", "1", "2", "--drafters", "none", "ngram", "--draft-tokens", "2"]
    before = sweep(tmp_path, *flags, code=130)
    assert [(r["drafter"], r["concurrency"]) for r in before] == [("none", "1"), ("none", "2")]
    asked.clear()
    limit = 9
    after = sweep(tmp_path, *flags)
    assert asked == [1, 2]
    assert after[:2] == before
    assert [r["drafter"] for r in after[2:]] == ["ngram", "ngram"]
    asked.clear()
    assert sweep(tmp_path, *flags) == after
    assert asked == []


def test_other_settings_need_another_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--concurrency", "1", "--drafters", "none"]
    (only,) = sweep(tmp_path, *flags, model="delay_s=0")
    assert (only["acceptance_rate"], only["acceptance_by_position"]) == ("", "")
    sweep(tmp_path, *flags, "--output-len", "7", code=2, model="delay_s=0")
    assert "holds a sweep with another load;" in capsys.readouterr().err
    flags = ["--concurrency", "1", "2", "--drafters", "none"]  # more rows fit the same folder
    assert len(sweep(tmp_path, *flags, model="delay_s=0")) == 2


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--drafters", "ngramm"], "ngramm"),
        (["--drafters", "ngram", "ngram"], "ngram twice"),
        (["--draft-tokens", "0"], "--draft-tokens 0"),
        (["--concurrency", "0"], "--concurrency 0"),
        (["--spec-method", "ngram"], "name the drafters of a sweep with --drafters"),
        (["--speculative-config", '{"method": "ngram"}'], "with --drafters"),
        (["--dataset", "prompt_tokens=0"], "at least 1"),
        (["--concurrency", "5"], "needs --max-num-seqs 5"),
    ],
)
def test_wrong_flags_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    assert sweep(tmp_path, *flags, code=2) == []
    assert says in capsys.readouterr().err


def test_a_wrong_model_does_not_claim_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--concurrency", "1", "--drafters", "none"]
    monkeypatch.setattr(bench_sweep, "keep_busy", None)  # fails at the first measurement
    with pytest.raises(TypeError):
        sweep(tmp_path, *flags)
    monkeypatch.undo()
    use_echo(monkeypatch)
    assert len(sweep(tmp_path, *flags, model="delay_s=0")) == 1


def test_the_name_of_a_drafter_has_all_of_it_but_k() -> None:
    names: dict[str, dict[str, Any]] = {
        "none": {},
        "ngram": {"method": "ngram", "num_speculative_tokens": 4},
        "suffix+mtp": {"method": ["suffix", "mtp"]},
        "eagle3 a/head": {"method": "eagle3", "model": "a/head"},
        "ngram prompt_lookup_max=8": {"method": "ngram", "prompt_lookup_max": 8},
    }
    assert {drafter_name(spec): spec for spec in names.values()} == names


def row(drafter: str, k: str, load: str, speed: float, shares: str = "") -> dict[str, str]:
    found = {"drafter": drafter, "k": k, "concurrency": load, "acceptance_by_position": shares}
    return {**found, "output_tokens_per_s": str(speed)}


def test_the_best_k_may_be_none_at_all() -> None:
    rows = [row("none", "0", "1", 10), row("none", "0", "8", 50)]
    rows += [row("ngram", "1", "1", 15), row("ngram", "1", "8", 40)]
    rows += [row("ngram", "5", "1", 20), row("ngram", "5", "8", 30)]
    rows += [row("ngram", "auto", "1", 99), row("ngram", "auto", "8", 99)]
    assert best_k(rows) == {"ngram": {"1": 5.0, "8": 0.0}}


def test_acceptance_is_shown_for_the_largest_k_at_the_smallest_load() -> None:
    rows = [row("none", "0", "1", 10), row("ngram", "1", "1", 1, "0.9")]
    rows += [row("ngram", "2", "8", 1, "0.7 0.3"), row("ngram", "2", "1", 1, "0.8 0.4")]
    assert by_position(rows) == {"ngram K=2": {"1": 0.8, "2": 0.4}}
