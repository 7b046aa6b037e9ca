"""A server that is shared by the end-to-end tests, and what it serves, made once per session."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.disturbance import Disturbance

# What serves is imported where it is used: tests of the engine alone must be collected where the
# server's packages are missing.


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model that can be served: it has a tokenizer and a template."""
    from tests.e2e.serving import save_served

    folder = tmp_path_factory.mktemp("served")
    save_served(folder)
    return folder


@pytest.fixture(scope="session")
def healthy(served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disturbance]:
    """A server with eight streams to disturb. It must get through all of it without a traceback."""
    from tests.e2e.disturbance import Disturbance
    from tests.e2e.serving import served

    log = tmp_path_factory.mktemp("log") / "server.txt"
    with served(served_model, log, "--max-request-bytes", "1M", "--max-num-seqs", "16") as process:
        disturbance = Disturbance(process)
        yield disturbance
        disturbance.close()
        process.await_idle()
        process.send_signal(signal.SIGTERM)
        assert process.await_exit() == 0
        assert "Traceback" not in process.said()
