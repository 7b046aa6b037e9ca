"""The command line as a process: exit codes, one line per error, quiet when its reader leaves."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.architecture.source_tree import ROOT
from tests.server.processes import processes_of

PACELINE = [sys.executable, "-m", "paceline"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*PACELINE, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_port_in_use_is_one_line_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("serve", "no/such-model", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "is in use" in done.stderr


def test_a_model_that_is_not_there_is_one_line() -> None:
    done = run("serve", "./no-such-model.gguf", "--port", "0")
    assert done.returncode == 1
    assert "no-such-model.gguf is no file or folder" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_convert_of_a_missing_file_is_one_line(tmp_path: Path) -> None:
    done = run("convert", str(tmp_path / "none.gguf"), str(tmp_path / "out"))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_reader_that_leaves_is_no_error() -> None:
    for command in ("serve --help", "doctor --json"):
        line = f"{sys.executable} -m paceline {command} | true; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.stderr == "", command


def test_ctrl_c_while_loading_leaves_at_once_and_no_child() -> None:
    process = subprocess.Popen(
        [*PACELINE, "generate", "--input", "-"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(b"a prompt\n")
    process.stdin.close()
    process.stdin = None
    while len(processes_of(process.pid)) < 2:  # until the engine process exists
        assert process.poll() is None
        time.sleep(0.01)
    interrupted_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - interrupted_s < 2.0
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert processes_of(process.pid) == [], "a child is left"
