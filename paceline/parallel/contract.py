"""What every rank is about to do, where all of them can read it: the collective contract.

A board in shared memory holds each rank's latest collectives. It says who is late when a wait runs
out, and with `checks` no collective begins before all members have announced the same one.
"""

from __future__ import annotations

import mmap
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from paceline.errors import CollectiveError
from paceline.step import StepResult

GROUPS = ("tp", "dp", "host", "result", "launch")
# A member may be one collective ahead of one that still compares; a peer's results may be as far
# ahead of its leader's as steps may be in flight (8).
_ENTRIES = 16
_TEXT_BYTES = 232
_ENTRY = np.dtype([("number", "<i8"), ("time_s", "<f8"), ("text", f"S{_TEXT_BYTES}")])
_POLL_S = 20e-6
_KEPT = 4096  # records that a rank remembers of itself


class Board:
    """One row for each rank, mapped by all of them. A row is written by its rank alone."""

    def __init__(self, path: Path, num_ranks: int) -> None:
        self.ranks = range(num_ranks)
        shape = (num_ranks, len(GROUPS), _ENTRIES)
        num_bytes = int(np.prod(shape)) * _ENTRY.itemsize
        with path.open("a+b") as file:
            file.truncate(num_bytes)  # zeros, whoever comes first
            self._memory = mmap.mmap(file.fileno(), num_bytes)
        self._entries = np.frombuffer(self._memory, _ENTRY).reshape(shape)

    def write(self, rank: int, group: int, number: int, text: str) -> None:
        entry = self._entries[rank, group, number % _ENTRIES]
        entry["text"] = text.encode()[:_TEXT_BYTES]
        entry["time_s"] = time.time()
        entry["number"] = number  # last: who sees it may read the rest

    def read(self, rank: int, group: int, number: int) -> str | None:
        """None: this rank has not come so far."""
        entry = self._entries[rank, group, number % _ENTRIES]
        return bytes(entry["text"]).decode() if entry["number"] >= number else None

    def latest(self, rank: int) -> tuple[str, float]:
        """What a rank announced last, in whatever group, and how many seconds ago."""
        row = self._entries[rank].reshape(-1)
        newest = row[int(row["time_s"].argmax())]
        if not newest["number"]:
            return "nothing yet", 0.0
        return bytes(newest["text"]).decode(), max(0.0, time.time() - float(newest["time_s"]))


@dataclass(slots=True, eq=False)
class Contract:
    """One thread's collectives, announced in order. `step` and `phase` are its user's to set."""

    rank: int = 0
    board: Board | None = None
    checks: bool = False
    timeout_s: float = 60.0
    step: int = 0
    phase: str = "start"
    records: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _numbers: dict[str, int] = field(default_factory=dict)
    _entered_s: float = 0.0

    def enter(self, group: str, ranks: Sequence[int], operation: str, what: str) -> None:
        """Before a collective. Raises CollectiveError when members announced different ones."""
        self._entered_s = time.monotonic()
        number = self._numbers[group] = self._numbers.get(group, 0) + 1
        text = f"step {self.step}, {self.phase}: {operation} over {group} of {what}"
        self.records.append(text)
        if self.board is None:
            return
        index = GROUPS.index(group)
        self.board.write(self.rank, index, number, text)
        if self.checks:
            for peer in ranks:
                self._compare(self.board, peer, index, number, text)

    def launch(self, step: int) -> None:
        """A step goes to the device, where its collectives may run without a word: in a graph."""
        self.step, self.phase = step, "device"
        if self.board is not None:
            self.board.write(self.rank, GROUPS.index("launch"), step, f"step {step}, launched")

    def _compare(self, board: Board, peer: int, group: int, number: int, text: str) -> None:
        give_up_s = time.monotonic() + self.timeout_s
        while (theirs := board.read(peer, group, number)) is None:
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
        """The error of a wait that ran out, or broke: where everybody was last seen.

        `waited_s`: None is since the last collective was announced.
        """
        here = f"step {self.step}, {self.phase}"
        waited_s = time.monotonic() - self._entered_s if waited_s is None else waited_s
        waited = f"{waited_s:.1f} s"
        if self.board is None:
            return CollectiveError(f"rank {self.rank} waited in vain for {waited} in {here}. {why}")
        seen = (f"rank {r} at [{x}] {age:.1f} s ago" for r, (x, age) in self._seen(ranks))
        return CollectiveError(
            f"rank {self.rank} waited in vain for {waited} in {here}; last seen: "
            f"{'; '.join(seen)}. {why}".strip()
        )

    def _seen(self, ranks: Sequence[int]) -> list[tuple[int, tuple[str, float]]]:
        assert self.board is not None
        read: Callable[[int], tuple[str, float]] = self.board.latest
        return [(r, read(r)) for r in ranks if r != self.rank]


@dataclass(slots=True)
class ResultCheck:
    """Ranks of one replica compare the tokens that each of them computed for itself.

    The leader does. A peer only says what it has: while it waited for a leader that has not looked
    yet, that one might wait for it in a later step.
    """

    contract: Contract
    ranks: Sequence[int]

    def compare(self, result: StepResult) -> None:
        crc = zlib.crc32(result.token_BW.tobytes(), zlib.crc32(result.count_B.tobytes()))
        self.contract.step, self.contract.phase = result.step, "result"
        self.contract.enter("result", self.ranks, "tokens", f"checksum {crc:08x}")
