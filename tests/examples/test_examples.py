"""Every file of examples/ runs as its docstring says, with the default model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.checkpoint.default_model import fetch_default_model
from paceline.errors import CheckpointError
from tests.e2e.serving import ServerProcess, started

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# What each must print. Examples that talk to a server get its address.
ALONE = {
    "offline.py": "Paris",
    "custom_processor.py": "forbidden:",
    "several_ranks.py": "'8 times two is' ->",
}
WITH_SERVER = {"chat.py": "Paris", "streaming.py": "chunks", "tools.py": "result: A table for"}
FLAGS = ["--cpu-threads", "1", "--port", "0", "--kv-cache-memory-bytes", "256M"]


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*ALONE, *WITH_SERVER}


def said(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def model() -> None:
    try:
        fetch_default_model()
    except CheckpointError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")


@pytest.fixture(scope="module")
def server(model: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with started(["serve", *FLAGS], tmp_path_factory.mktemp("examples") / "log") as process:
        process.await_ready()
        yield process


@pytest.mark.more
@pytest.mark.parametrize(("name", "expected"), ALONE.items())
def test_an_offline_example_runs(model: None, name: str, expected: str) -> None:
    assert expected in said(name)


@pytest.mark.more
@pytest.mark.parametrize(("name", "expected"), WITH_SERVER.items())
def test_an_example_runs_against_a_server(server: ServerProcess, name: str, expected: str) -> None:
    assert expected in said(name, f"http://127.0.0.1:{server.port}/v1")
