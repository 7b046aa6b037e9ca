"""Fetches a repository from the Hugging Face hub into its cache. The caller chooses the files.

The only module that imports huggingface_hub, which reads HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from paceline.errors import CheckpointError, MissingExtra

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A repository's files on this disk. `offline`: why the hub could not be asked."""

    folder: Path
    offline: str | None = None


def fetch(repo_id: str, revision: str | None, wanted: Callable[[list[str]], list[str]]) -> Snapshot:
    """The repository's snapshot, with the files that `wanted` picks from the list of its names.

    If the hub cannot be reached, the cached snapshot is returned as it is.
    """
    hf = _huggingface_hub()
    try:
        # One request without retries. Listing the tree instead would retry for half a minute if
        # the hub does not answer.
        info = hf.HfApi().model_info(repo_id, revision=revision, timeout=_TIMEOUT_S)
    except Exception as error:
        reason = _out_of_reach(hf, error)
        if reason is None:
            raise _explained(hf, repo_id, revision, error) from None
        return _cached(hf, repo_id, revision, reason)
    names = wanted([file.rfilename for file in info.siblings or ()])
    if not names:
        raise CheckpointError(f"{_shown(repo_id, revision)} holds no file that Paceline could use.")
    try:
        return Snapshot(_download(hf, repo_id, revision, names))
    except Exception as error:
        raise _explained(hf, repo_id, revision, error) from None


def _download(hf: Any, repo_id: str, revision: str | None, names: list[str]) -> Path:
    """The folder with these files, fetched by several daemon threads.

    The hub library's own `snapshot_download` waits for its threads. If the hub does not answer,
    Ctrl-C would then take minutes.
    """
    # The first download resolves the revision to a commit; the others use that commit.
    folder = Path(hf.hf_hub_download(repo_id, names[0], revision=revision)).parent
    todo: SimpleQueue[str] = SimpleQueue()
    ends: SimpleQueue[Exception | None] = SimpleQueue()
    for name in names[1:]:
        todo.put(name)

    def work() -> None:
        with contextlib.suppress(Empty):
            while True:
                name = todo.get_nowait()
                try:
                    hf.hf_hub_download(repo_id, name, revision=folder.name)
                    ends.put(None)
                except Exception as error:
                    ends.put(error)

    for _ in range(min(_MAX_THREADS, len(names) - 1)):
        threading.Thread(target=work, name="paceline-hub", daemon=True).start()
    for _ in names[1:]:
        failure = ends.get()
        if failure is not None:
            raise failure
    return folder


def _cached(hf: Any, repo_id: str, revision: str | None, reason: str) -> Snapshot:
    try:
        # Ask for one file only: newer versions of the library refuse a snapshot that lacks any
        # requested file, and the cache holds only the files that were fetched before.
        folder = hf.snapshot_download(
            repo_id, revision=revision, local_files_only=True, allow_patterns=["config.json"]
        )
    except Exception:
        raise CheckpointError(
            f"{_shown(repo_id, revision)} is not in the cache ({hf.constants.HF_HUB_CACHE}) and "
            f"the hub cannot be asked: {reason}. {remedy(repo_id)}"
        ) from None
    logger.warning("Using the cached %s: %s.", _shown(repo_id, revision), reason)
    return Snapshot(Path(folder), offline=reason)


def remedy(repo_id: str) -> str:
    return (
        f"Connect to the hub, or run `hf download {repo_id}` on a machine that can and give the "
        "folder as the model."
    )


def _out_of_reach(hf: Any, error: BaseException) -> str | None:
    """Why the hub could not be reached; None if it answered."""
    if isinstance(error, hf.errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    status = _status(error)
    if status is not None:
        return f"{hf.constants.ENDPOINT} answers {status}" if status >= 500 else None
    # The HTTP client is httpx in one version of the hub's library and httpx2 in another.
    network = type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore")
    if network or isinstance(error, ConnectionError | TimeoutError):
        return f"{hf.constants.ENDPOINT} cannot be reached ({_first_line(error)})"
    return None


def _explained(
    hf: Any, repo_id: str, revision: str | None, error: BaseException
) -> CheckpointError:
    shown = _shown(repo_id, revision)
    if isinstance(error, hf.errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # the cause; "not in the cache" only followed from it
    if isinstance(error, hf.errors.GatedRepoError):
        return CheckpointError(
            f"{shown} is gated ({_status(error)}): ask for access at "
            f"{hf.constants.ENDPOINT}/{repo_id}, then log in with `hf auth login` or set HF_TOKEN."
        )
    if isinstance(error, hf.errors.RevisionNotFoundError):
        return CheckpointError(
            f"{repo_id} has no revision {revision or 'main'!r} on {hf.constants.ENDPOINT} (404). "
            "Give a branch, tag or commit that it has."
        )
    status = _status(error)
    if isinstance(error, hf.errors.RepositoryNotFoundError) or status in (401, 403):
        meaning = "there is no such repository" if status == 404 else "access is refused"
        return CheckpointError(
            f"{shown} cannot be read from {hf.constants.ENDPOINT}: {meaning} ({status}). Check the "
            "name; for a private or gated repository log in with `hf auth login` or set HF_TOKEN."
        )
    reason = _out_of_reach(hf, error)
    if reason is not None:
        return CheckpointError(f"{shown} could not be fetched: {reason}. {remedy(repo_id)}")
    if isinstance(error, OSError) and error.errno is not None:
        return CheckpointError(
            f"{shown} could not be written to {hf.constants.HF_HUB_CACHE}: {error.strerror}. Free "
            "some space or set HF_HOME to another folder, then start again; whole files are kept."
        )
    return CheckpointError(f"{shown} could not be fetched: {_first_line(error)}")


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    return int(status) if status is not None else None


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _shown(repo_id: str, revision: str | None) -> str:
    return f"{repo_id} at revision {revision!r}" if revision else repo_id


def _huggingface_hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise MissingExtra(
            f"a hub id needs the huggingface_hub package ({error}); install it: "
            "pip install huggingface-hub"
        ) from None
    return huggingface_hub
