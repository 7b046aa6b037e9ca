"""Half an hour with a GPU is rehearsed without one: every script starts, ends and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import gpu_session
from bench.gpu_session import CALLS, LIMIT_S, Step, main, unpack


@pytest.mark.parametrize("call", CALLS)
def test_a_call_has_a_name_for_every_step_and_fits_its_time(call: str) -> None:
    steps = CALLS[call]
    assert len({x.name for x in steps}) == len(steps)
    assert sum(x.seconds for x in steps) <= LIMIT_S
    assert any(x.tiny for x in steps), "something of every call can be rehearsed"


@pytest.mark.more
@pytest.mark.timeout(900)
@pytest.mark.parametrize("call", CALLS)
def test_every_call_is_rehearsed(call: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    assert main([call, "--tiny", "--out", str(tmp_path)]) == 0
    steps = json.loads((tmp_path / f"{call}.json").read_text())["steps"]
    assert [x.name for x in CALLS[call]] == list(steps)


def test_a_step_that_fails_does_not_end_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writes = (
        "import json, sys; json.dump({'bench': 'x'}, open(sys.argv[1], 'w')); print('RESULT 7')"
    )
    steps = (
        Step("fails", ("-c", "print('oh'); exit(3)"), 1, "nothing"),
        Step("hangs", ("-c", "import threading; threading.Event().wait()"), 1, "nothing"),
        Step("missing", ("-c", "exit(4)"), 1, "nothing", needs="no_such_module"),
        Step("late", ("-c", "exit(4)"), 10**6, "nothing"),
        Step("writes", ("-c", writes, "{json}"), 1, "all"),
    )
    monkeypatch.setitem(CALLS, "sample", steps)
    listen = gpu_session._listen
    monkeypatch.setattr(
        gpu_session,
        "_listen",
        lambda process, limit_s: listen(process, 0.5 if "Event" in process.args[-1] else limit_s),
    )
    assert gpu_session.run_call("sample", tmp_path, False) == 1
    found = json.loads((tmp_path / "sample.json").read_text())["steps"]
    assert found["fails"]["failed"] == "exit status 3"
    assert found["hangs"]["failed"] == "no time"
    assert found["missing"] == {"skipped": "not here"}
    assert "left" in found["late"]["failed"]
    assert found["writes"]["record"] == {"bench": "x"}
    assert "RESULT 7" in capsys.readouterr().out.split("---- writes")[1]
    assert "oh\n" in (tmp_path / "sample.log").read_text()
    unpack(tmp_path / "sample.json", tmp_path / "records")
    assert [x.name for x in (tmp_path / "records").iterdir()] == ["writes.json"]
