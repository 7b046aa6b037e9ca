"""The start-up benchmark: what it starts, what it keeps, and that other tokens fail it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_record, start_up


def run(monkeypatch: pytest.MonkeyPatch, tokens: list[list[int]], out: Path) -> tuple[int, Any]:
    """(exit code, caches) of a run whose starts take 20, 10 and 10 seconds."""
    caches: list[str] = []

    def start_apart(name: str, models: str, cache: str, settings: list[str]) -> dict[str, Any]:
        assert (Path(models) / "l8" / "config.json").exists()
        assert settings == ["block_size=32"]
        caches.append(cache)
        number = len(caches)
        init_s = 20.0 if number == 1 else 10.0
        return {"init_s": init_s, "startup_s": {"loading": 5.0}, "tokens": tokens[number - 1]}

    monkeypatch.setattr(start_up, "start_apart", start_apart)
    flags = ["l8", "--set", "block_size=32", "--json", str(out / "start.json")]
    monkeypatch.setattr(sys, "argv", ["start_up.py", *flags])
    return start_up.main(), caches


def test_the_first_start_has_an_empty_cache_and_the_others_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, caches = run(monkeypatch, [[1, 2]] * 3, tmp_path)
    assert code == 0
    assert len(caches) == 3
    assert len(set(caches)) == 1
    assert not Path(caches[0]).exists()
    assert "l8: 20.0 s with no kernel cached, then 10.0, 10.0 s" in capsys.readouterr().out
    (line,) = gpu_record.table(tmp_path)
    assert " ".join(line.split()) == "start l8 20.0 s with no kernel cached, then 10.0 / 10.0 s"
    (kept,) = json.loads((tmp_path / "start.json").read_text())["runs"]
    assert kept["no_cache"] == {"init_s": 20.0, "startup_s": {"loading": 5.0}}


def test_starts_that_give_other_tokens_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, [[1, 2], [1, 2], [1, 3]], tmp_path)[0] == 1
    assert "l8: starts give different tokens" in capsys.readouterr().err
