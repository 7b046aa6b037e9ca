"""Which snapshot entry holds the recurrent state of which prefix. Entries have their own LRU order.

Knows nothing of requests or of the tensors. A prefix is named by the chain value of the page that
ends at its length.
"""

from __future__ import annotations

from typing import NamedTuple


class SnapshotStats(NamedTuple):
    usage: float = 0.0  # entries that are not free; 1 is all of them
    num_hits: int = 0  # admissions that continued from a snapshot
    num_misses: int = 0  # admissions whose pages were known further than any snapshot
    num_evictions: int = 0


class SnapshotPool:
    """Entries 0 ... num_entries - 1. An entry is free, held by a mark, or known: it has a prefix.

    Why an entry may change its owner while steps are in flight: on the device everything runs in
    plan order, and within a plan the snapshots of admissions are read before the step's rows write
    theirs. So

    - a later plan may write any entry that earlier plans read or wrote;
    - an entry of which a mark is listed in the plan being made must not get a second one. Entries
      taken for this plan are *fresh*: they are not evicted, and those that lose their prefix become
      free only when the plan is launched;
    - a fresh entry is not written when this plan's admissions are: it is no hit before the next
      plan.
    """

    def __init__(self, num_entries: int) -> None:
        self.num_entries = num_entries
        self.num_evictions = 0
        self._free = list(range(num_entries - 1, -1, -1))
        self._entry_of: dict[int, int] = {}  # by chain value; the least recently used first
        self._fresh: dict[int, int] = {}  # known since the last launch: chain value -> entry
        self._lost: list[int] = []  # fresh entries without a prefix

    def __contains__(self, chain: int) -> bool:
        return chain in self._entry_of

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_known(self) -> int:
        return len(self._entry_of)

    def find(self, chain: int) -> int:
        """The entry that an admission of the plan being made may read; -1: none."""
        return -1 if chain in self._fresh else self._entry_of.get(chain, -1)

    def use(self, chain: int) -> None:
        """It becomes the most recently used."""
        self._entry_of[chain] = self._entry_of.pop(chain)

    def take(self) -> int:
        """An entry for a mark: a free one, or that of the least recently used prefix; else -1."""
        if self._free:
            return self._free.pop()
        oldest = next((chain for chain in self._entry_of if chain not in self._fresh), None)
        if oldest is None:
            return -1
        self.num_evictions += 1
        return self._entry_of.pop(oldest)

    def give_back(self, entry: int) -> None:
        """A mark was not passed, or its prefix is known already."""
        self._free.append(entry)

    def keep(self, chain: int, entry: int, *, is_fresh: bool) -> None:
        """The entry has a prefix. Fresh: the plan being made writes it."""
        assert chain not in self._entry_of, f"two snapshots of chain {chain}"
        self._entry_of[chain] = entry
        if is_fresh:
            self._fresh[chain] = entry

    def forget(self, chain: int) -> None:
        """The prefix cache has forgotten the page, so the snapshot cannot be found any more."""
        self.num_evictions += chain in self._entry_of
        self.drop(chain)

    def drop(self, chain: int) -> None:
        """The snapshot is not wanted any more, if there is one."""
        entry = self._entry_of.pop(chain, None)
        if entry is not None:
            is_fresh = self._fresh.pop(chain, None) is not None
            (self._lost if is_fresh else self._free).append(entry)

    def launch(self) -> list[int]:
        """The plan is complete. Returns the chain values whose snapshots it writes."""
        chains = list(self._fresh)
        self._fresh.clear()
        self._free += self._lost
        self._lost.clear()
        return chains
