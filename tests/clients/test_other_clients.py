"""Clients of other projects: each is a program that checks what it gets, in its own environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.clients.scripted import MODEL, scripted_server
from tests.e2e.serving import ServerProcess

HERE = Path(__file__).parent
PYTHON = Path(sys.executable).parent.parent / "clients" / "bin" / "python"
SCRIPTS = sorted((HERE / "python").glob("use_*.py")), sorted((HERE / "js").glob("use_*.mjs"))
pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with scripted_server(tmp_path_factory.mktemp("clients")) as process:
        yield process
        refused = [line for line in process.said().splitlines() if " POST /v1/" in line]
        assert [line for line in refused if " 200 " not in line] == []


@pytest.mark.parametrize("program", SCRIPTS[0], ids=lambda path: path.stem)
def test_python_clients(program: Path, server: ServerProcess) -> None:
    if not PYTHON.exists():
        pytest.skip("the Python clients are not installed: `make test-more` does it")
    succeeds([str(PYTHON), str(program)], server)


@pytest.mark.parametrize("program", SCRIPTS[1], ids=lambda path: path.stem)
def test_javascript_clients(program: Path, server: ServerProcess) -> None:
    node = shutil.which("node")
    if node is None or not (HERE / "js" / "node_modules" / "ai").exists():
        pytest.skip("the npm clients are not installed: `make test-more` does it, and needs npm")
    succeeds([node, str(program)], server)


def succeeds(command: Sequence[str], server: ServerProcess) -> None:
    # The clients' environment does not have Paceline; tests/clients/script.py does not need it.
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(
        [*command, f"http://127.0.0.1:{server.port}", MODEL],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
