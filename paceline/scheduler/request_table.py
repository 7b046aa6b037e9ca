"""Every unfinished request: by uid, by slot, or in the waiting queue.

Bookkeeping only: the allocator decides which request gets a slot.
"""

from __future__ import annotations

from paceline.scheduler.live_request import LiveRequest
from paceline.scheduler.waiting_queue import WaitingQueue


class RequestTable:
    """A request either waits (slot -1) or holds one slot."""

    def __init__(self, num_slots: int) -> None:
        self.by_uid: dict[int, LiveRequest] = {}
        self.waiting = WaitingQueue(self.by_uid)
        self.prefilling: dict[int, LiveRequest] = {}  # running, last prompt chunk not launched
        self.num_constrained = 0  # running requests with a token constraint
        self._by_slot: list[LiveRequest | None] = [None] * num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def num_running(self) -> int:
        return len(self._by_slot) - len(self._free_slots)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def running(self) -> list[LiveRequest]:
        return [live for live in self._by_slot if live is not None]

    def owner(self, slot: int) -> LiveRequest:
        live = self._by_slot[slot]
        assert live is not None, f"slot {slot} is free"
        return live

    def add(self, live: LiveRequest) -> None:
        assert live.uid not in self.by_uid, f"request {live.uid} was added twice"
        self.by_uid[live.uid] = live
        self.waiting.push(live)

    def take_slot(self, live: LiveRequest) -> int:
        """The head of the waiting queue gets a free slot and starts its prefill."""
        self.waiting.pop()
        live.slot = slot = self._free_slots.pop()
        self._by_slot[slot] = live
        self.prefilling[live.uid] = live
        self.num_constrained += live.constraint is not None
        return slot

    def leave_slot(self, live: LiveRequest) -> None:
        """The slot is free; the request is in no queue until the caller puts it into one."""
        self._by_slot[live.slot] = None
        self._free_slots.append(live.slot)
        self.prefilling.pop(live.uid, None)
        self.num_constrained -= live.constraint is not None
        live.drafts = []
        live.slot = -1
