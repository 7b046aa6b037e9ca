"""Which replica gets a request: one that knows its prompt's beginning, or the least loaded one.

The front counts what it submits and what ends, so the counts are current in a burst of requests.
The time of a choice depends on the length of the prompt, not on the number of replicas.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

BLOCK_TOKENS = 128  # prompts are compared by blocks of this size
# A prefix hit of this many tokens outweighs one open sequence: `bench/simulate.py --worth`.
WORTH_TOKENS = 2048


class PrefixOwners:
    """The replica that computed each known prompt prefix last.

    Prefixes are chained hashes of whole blocks. The oldest are forgotten at `capacity` blocks.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._owner: OrderedDict[int, int] = OrderedDict()

    def longest(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The replica that owns the longest known prefix of a prompt, and its tokens: (-1, 0) if
        none is known."""
        owner, length = -1, 0
        for number, prefix in enumerate(_prefixes(tokens), 1):
            found = self._owner.get(prefix)
            if found is None:
                break
            owner, length = found, number * BLOCK_TOKENS
        return owner, length

    def add(self, tokens: Sequence[int], replica: int) -> None:
        owners = self._owner
        # The longest first: the shorter ones are needed to reach them, so they are dropped last.
        for prefix in reversed(list(_prefixes(tokens))):
            owners[prefix] = replica
            owners.move_to_end(prefix)
        while len(owners) > self._capacity:
            owners.popitem(last=False)

    def __len__(self) -> int:
        return len(self._owner)


def _prefixes(tokens: Sequence[int]) -> Iterator[int]:
    prefix = 0
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        prefix = hash((prefix, *tokens[start : start + BLOCK_TOKENS]))
        yield prefix


class Router:
    """The replica of each sequence. `capacity_tokens`: what the KV caches of all replicas hold."""

    def __init__(self, num_replicas: int, capacity_tokens: int = 0) -> None:
        self.num_open = [0] * num_replicas  # sequences of each replica
        self._owner: dict[int, int] = {}
        self._prefixes: PrefixOwners | None = None
        if num_replicas > 1 and capacity_tokens:
            self._prefixes = PrefixOwners(capacity_tokens // BLOCK_TOKENS)
        self._turn = 0
        self._last_turn = [0] * num_replicas  # when each replica was chosen last
        # (open sequences, turn, replica). Entries with an old count are skipped.
        self._heap = [(0, 0, replica) for replica in range(num_replicas)]

        self.closed: set[int] = set()  # replicas that take no request now

    def assign(
        self, uids: Sequence[int], prompt: Sequence[int] = (), *, replica: int | None = None
    ) -> int | None:
        """Choose one replica for all sequences of a request: they share the prompt's pages. None:
        every replica is closed.

        `replica`: the request names it. Another one serves it while that one is closed.
        """
        if replica is None or replica in self.closed:
            replica = self._choose(prompt)
        if replica is None:
            return None
        if self._prefixes is not None:
            self._prefixes.add(prompt, replica)
        self._turn += 1
        self._last_turn[replica] = self._turn
        self._count(replica, len(uids))
        for uid in uids:
            self._owner[uid] = replica
        return replica

    def _choose(self, prompt: Sequence[int]) -> int | None:
        least = self._least_loaded()
        if self._prefixes is None or least is None:
            return least
        owner, length = self._prefixes.longest(prompt)
        extra = length // WORTH_TOKENS
        is_worth_it = extra and self.num_open[owner] <= self.num_open[least] + extra
        return owner if is_worth_it and owner not in self.closed else least

    def _least_loaded(self) -> int | None:
        """Among equals the one that was chosen the longest time ago. None: all are closed."""
        heap, closed = self._heap, []
        while heap:
            count, turn, replica = heap[0]
            is_current = (count, turn) == (self.num_open[replica], self._last_turn[replica])
            if is_current and replica not in self.closed:
                break
            entry = heapq.heappop(heap)
            if is_current:
                closed.append(entry)
        found = heap[0][2] if heap else None
        for entry in closed:
            heapq.heappush(heap, entry)
        return found

    def _count(self, replica: int, change: int) -> None:
        self.num_open[replica] += change
        entry = (self.num_open[replica], self._last_turn[replica], replica)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 8 * len(self.num_open) + 64:
            self._heap = [(n, self._last_turn[r], r) for r, n in enumerate(self.num_open)]
            heapq.heapify(self._heap)

    @property
    def num_held(self) -> int:
        """Sequences of all replicas."""
        return len(self._owner)

    def remember(self, uid: int, tokens: Callable[[], Sequence[int]]) -> None:
        """A sequence has ended: its replica knows all its tokens, which the next turn of the
        conversation may begin with."""
        if self._prefixes is not None:
            self._prefixes.add(tokens(), self._owner[uid])

    def owner(self, uid: int) -> int:
        return self._owner[uid]

    def of(self, replica: int) -> list[int]:
        """The sequences of a replica, the oldest first."""
        return sorted(uid for uid, owner in self._owner.items() if owner == replica)

    def release(self, uid: int) -> None:
        """The sequence has ended. An aborted one ends when its replica says so."""
        self._count(self._owner.pop(uid), -1)
