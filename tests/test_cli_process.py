"""The command line as a process: exit codes, one line per error, quiet when its reader leaves."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline import __version__
from tests.architecture.source_tree import ROOT
from tests.patience import PATIENCE_S, wait_for
from tests.server.processes import processes_of

PACELINE = [sys.executable, "-m", "paceline"]


# Ends at the first text on standard error, and says on standard output what was imported by then.
FIRST_LINE = """
import os, sys
from paceline import cli
slow = {"numpy", "torch", "tokenizers", "jinja2", "starlette", "uvicorn", "gguf"}
class Watch:
    def write(self, text):
        print(text, *sorted(slow & sys.modules.keys()), sep="; ", flush=True)
        os._exit(0)
sys.stderr = Watch()
cli.main(sys.argv[1:])
"""


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
    opening, error = done.stderr.splitlines()
    assert opening.startswith("Paceline 0.")
    assert opening.endswith(": loading no/such-model")
    assert "is in use; stop the process that uses it" in error


def test_a_model_that_is_not_there_is_one_line() -> None:
    done = run("serve", "./no-such-model.gguf", "--port", "0")
    assert done.returncode == 1
    assert "no-such-model.gguf is not a file or folder" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("serve", "loading SmolLM2-135M-Instruct"),
        ("generate some/model --device cpu", "loading some/model on cpu"),
        ("chat some/model", "loading some/model"),
        ("bench latency", "loading SmolLM2-135M-Instruct"),
        ("bench serve --base-url http://127.0.0.1:9", "measuring http://127.0.0.1:9"),
        ("bench sweep some/model", "sweeping some/model"),
        ("convert a.gguf b", "converting a.gguf"),
    ],
)
def test_the_first_line_comes_before_anything_slow_is_imported(command: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LINE, *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"Paceline {__version__}: {says}\n"


def test_convert_of_a_missing_file_is_one_line(tmp_path: Path) -> None:
    done = run("convert", str(tmp_path / "none.gguf"), str(tmp_path / "out"))
    assert done.returncode == 1
    assert "none.gguf is not a file" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_reader_that_leaves_is_no_error() -> None:
    for command in ("serve --help", "doctor --json"):
        line = f"{sys.executable} -m paceline {command} | true; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.stderr == "", command


def test_ctrl_c_while_loading_ends_it_and_leaves_no_child() -> None:
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
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert errors.decode().splitlines()[-1] == "paceline: stopped while loading"
    assert b"Traceback" not in errors
    wait_for(lambda: processes_of(process.pid) == [])  # the engine ends by itself, a moment later
