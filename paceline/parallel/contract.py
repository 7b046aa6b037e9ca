"""The collective contract: every rank announces each collective before it runs.

A log in shared memory holds each rank's latest announcements. If a wait times out, the error
names the rank that is late. With `checks`, no collective begins before all members of the group
have announced the same one.
"""

from __future__ import annotations

import mmap
import os
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.errors import CollectiveError, EngineDead
from paceline.step import StepResult

GROUPS = ("tp", "dp", "host", "result", "launch")
# Announcements kept per rank and group. A member may be one collective ahead of another that still
# compares; a peer's results may be ahead of its leader's by the steps in flight (at most 8).
_ENTRIES = 16
_TEXT_BYTES = 232
_ENTRY = np.dtype([("number", "<i8"), ("time_s", "<f8"), ("text", f"S{_TEXT_BYTES}")])
_POLL_S = 20e-6
_KEPT = 4096  # announcements that a rank remembers of itself


class CollectiveLog:
    """Shared memory with one row per rank. Only the rank itself writes its row."""

    def __init__(self, path: str, num_ranks: int) -> None:
        """`path` names a file that all ranks open; empty: memory of this rank alone."""
        self.ranks = range(num_ranks)
        shape = (num_ranks, len(GROUPS), _ENTRIES)
        num_bytes = int(np.prod(shape)) * _ENTRY.itemsize
        memory = _map_file(path, num_bytes) if path else mmap.mmap(-1, num_bytes)
        self._entries = np.frombuffer(memory, _ENTRY).reshape(shape)

    def write(self, rank: int, group: int, number: int, text: str) -> None:
        entry = self._entries[rank, group, number % _ENTRIES]
        entry["text"] = text.encode()[:_TEXT_BYTES]
        entry["time_s"] = time.time()
        entry["number"] = number  # written last: once it is visible, so is the rest

    def read(self, rank: int, group: int, number: int) -> str | None:
        """The rank's announcement; None if the rank has not made it yet."""
        entry = self._entries[rank, group, number % _ENTRIES]
        return bytes(entry["text"]).decode() if entry["number"] >= number else None

    def latest(self, rank: int) -> tuple[str, float]:
        """A rank's latest announcement in any group, and its age in seconds."""
        row = self._entries[rank].reshape(-1)
        newest = row[int(row["time_s"].argmax())]
        if not newest["number"]:
            return "nothing yet", 0.0
        return bytes(newest["text"]).decode(), max(0.0, time.time() - float(newest["time_s"]))


def _map_file(path: str, num_bytes: int) -> mmap.mmap:
    """Zeros, whichever rank is first. The room is taken now: a write to a file that was only made
    longer is a SIGBUS when its file system is full."""
    with open(path, "a+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            raise EngineDead(
                f"{path}, which the ranks share, cannot get its {num_bytes} bytes: "
                f"{error.strerror}. Free some space there."
            ) from error
        return mmap.mmap(file.fileno(), num_bytes)


@dataclass(slots=True, eq=False)
class Contract:
    """Announces one thread's collectives, in order. The user of the group sets `step`, `phase`."""

    rank: int = 0
    log: CollectiveLog | None = None
    checks: bool = False
    timeout_s: float = 60.0
    step: int = 0
    phase: str = "start"
    records: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _numbers: dict[str, int] = field(default_factory=dict)
    _entered_s: float = 0.0

    def enter(self, group: str, ranks: Sequence[int], operation: str, what: str) -> None:
        """Announce a collective. Raises CollectiveError if members announced different ones."""
        self._entered_s = time.monotonic()
        number = self._numbers[group] = self._numbers.get(group, 0) + 1
        text = f"step {self.step}, {self.phase}: {operation} over {group} of {what}"
        self.records.append(text)
        if self.log is None:
            return
        index = GROUPS.index(group)
        self.log.write(self.rank, index, number, text)
        if self.checks:
            for peer in ranks:
                self._compare(self.log, peer, index, number, text)

    def launch(self, step: int) -> None:
        """Announce a launched step. Collectives inside a CUDA graph make no announcements."""
        self.step, self.phase = step, "device"
        if self.log is not None:
            self.log.write(self.rank, GROUPS.index("launch"), step, f"step {step}, launched")

    def _compare(self, log: CollectiveLog, peer: int, group: int, number: int, text: str) -> None:
        give_up_s = time.monotonic() + self.timeout_s
        while (theirs := log.read(peer, group, number)) is None:
            if time.monotonic() > give_up_s:
                raise self.stalled([peer])
            time.sleep(_POLL_S)
        if theirs != text:
            raise CollectiveError(
                f"ranks disagree about collective {number} over {GROUPS[group]!r}: rank "
                f"{self.rank} is at [{text}], rank {peer} at [{theirs}]."
            )

    def stalled(
        self, ranks: Sequence[int], why: str = "", waited_s: float | None = None
    ) -> CollectiveError:
        """The error of a wait that timed out or failed: the latest announcement of each rank.

        `waited_s` None: the time since this rank's last announcement.
        """
        here = f"step {self.step}, {self.phase}"
        waited_s = time.monotonic() - self._entered_s if waited_s is None else waited_s
        waited = f"{waited_s:.1f} s"
        if self.log is None:
            return CollectiveError(f"rank {self.rank} waited in vain for {waited} in {here}. {why}")
        others = ((r, *self.log.latest(r)) for r in ranks if r != self.rank)
        seen = (f"rank {r} at [{text}] {age:.1f} s ago" for r, text, age in others)
        return CollectiveError(
            f"rank {self.rank} waited in vain for {waited} in {here}; last seen: "
            f"{'; '.join(seen)}. {why}".strip()
        )


@dataclass(slots=True)
class ResultCheck:
    """Compares the tokens that the ranks of one replica computed.

    Only the leader compares; a peer announces its checksum and goes on. If a peer waited for the
    leader, the leader might already wait for that peer in a later step: a deadlock.
    """

    contract: Contract
    ranks: Sequence[int]

    def compare(self, result: StepResult) -> None:
        crc = zlib.crc32(result.token_BW.tobytes(), zlib.crc32(result.count_B.tobytes()))
        self.contract.step, self.contract.phase = result.step, "result"
        self.contract.enter("result", self.ranks, "tokens", f"checksum {crc:08x}")
