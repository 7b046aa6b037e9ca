"""Which replica gets a request: the one with the fewest open sequences, ties in turn.

Counts what the front itself has submitted and seen end, so a burst never meets an old number.
"""

from __future__ import annotations

from collections.abc import Sequence


class Router:
    """Who has which sequence."""

    def __init__(self, num_replicas: int) -> None:
        self.num_open = [0] * num_replicas  # sequences of each replica
        self._owner: dict[int, int] = {}
        self._next = 0  # who is first among equals

    def assign(self, uids: Sequence[int]) -> int:
        """The replica for all of a request's sequences: they share their prompt's pages."""
        count = len(self.num_open)
        replica = min(range(count), key=lambda r: (self.num_open[r], (r - self._next) % count))
        self._next = (replica + 1) % count
        self.num_open[replica] += len(uids)
        for uid in uids:
            self._owner[uid] = replica
        return replica

    @property
    def num_held(self) -> int:
        """Sequences of all replicas."""
        return sum(self.num_open)

    def owner(self, uid: int) -> int:
        return self._owner[uid]

    def release(self, uid: int) -> None:
        """The sequence is over. One that was aborted is over when its replica says so."""
        self.num_open[self._owner.pop(uid)] -= 1
