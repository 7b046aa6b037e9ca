"""deploy/ray: `serve run` with the files as they are and a small model, and what is refused."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.errors import ConfigError
from tests.deploy.test_deploy import RAY, ray_serve
from tests.e2e.serving import save_served
from tests.parallel.test_serving import PROMPTS, plain_answers
from tests.patience import PATIENCE_S, wait_for

pytestmark = pytest.mark.more


@pytest.fixture(autouse=True)
def serve_is_installed() -> None:
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'ray[serve]'")


def test_serve_accepts_the_file() -> None:
    schema: Any = importlib.import_module("ray.serve.schema")
    read = schema.ServeDeploySchema(**ray_serve())
    assert [a.import_path for a in read.applications] == ["paceline_app:build"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["m", "--nnodes=2"], "--nnodes has no meaning"), (["m", "--port=1"], "--port has no")],
)
def test_flags_of_a_front_are_refused_before_a_replica_starts(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(RAY))
    application = importlib.import_module("paceline_app")
    with pytest.raises(ConfigError, match=message):
        application.build({"flags": flags})


def small_application(folder: Path, path: Path) -> int:
    """The file with a model of the tests. Returns the port."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = int(sock.getsockname()[1])
    values = ray_serve()
    values["http_options"] |= {"host": "127.0.0.1", "port": port}
    (application,) = values["applications"]
    on_cpu = ["--device=cpu", "--dtype=float32", "--cpu-threads=1", "--max-restarts=0"]
    application["args"]["flags"] = [str(folder), *on_cpu]
    (deployment,) = application["deployments"]
    deployment["ray_actor_options"] = {"num_cpus": 1}
    deployment["health_check_period_s"] = 1
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return port


def ask(port: int, **fields: Any) -> tuple[int, bytes]:
    """(0, b""): nothing listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 64, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "Host": "models.example"}
        connection.request("POST", "/v1/completions", json.dumps({**body, **fields}), headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


def engine_pids(mark: str) -> set[int]:
    """Engines (they are named so, worker.main) whose environment has the mark."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_engine = (path / "comm").read_text().strip() == "paceline-engine"
            if is_engine and mark.encode() in (path / "environ").read_bytes():
                found.add(int(path.name))
    return found


def test_a_replica_answers_streams_and_starts_again_when_its_engine_is_killed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    save_served(folder, "llama")
    ((text, tokens),) = plain_answers(folder)[:1]
    port = small_application(folder, tmp_path / "serve.yaml")
    script = "from ray.serve.scripts import cli; cli()"
    command = [sys.executable, "-c", script, "run", str(tmp_path / "serve.yaml")]
    mark = f"of {tmp_path}"
    with (tmp_path / "log").open("w") as log:
        environment = {**os.environ, "TEST_MARK": mark}
        process = subprocess.Popen(command, cwd=RAY, env=environment, stdout=log, stderr=log)
    try:
        wait_for(lambda: process.poll() is not None or ask(port)[0] == 200)
        assert process.poll() is None, (tmp_path / "log").read_text()
        reply = json.loads(ask(port, return_token_ids=True)[1])
        assert reply["choices"][0]["token_ids"] == tokens
        events = ask(port, stream=True)[1].decode().split("\n\n")
        assert len(events) > 10
        parts = [json.loads(e.removeprefix("data: "))["choices"][0]["text"] for e in events[:-2]]
        assert "".join(parts) == text
        assert events[-2] == "data: [DONE]"
        (first,) = engine_pids(mark)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: bool(engine_pids(mark) - {first}) and ask(port)[0] == 200)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)
    wait_for(lambda: not engine_pids(mark))
