"""Responses that were stored: encoded, in memory, bounded in number and bytes.

The least recently used ones are dropped first. Nothing survives the process. A response can be
found only by the API key that made it; without keys all requests have the same owner.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

import msgspec

from paceline.server.replies import to_json
from paceline.server.responses_types import Item, Response

_ITEMS = msgspec.json.Decoder(list[Item])
NO_KEY = b""
Key = tuple[bytes, str]  # owner, id


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """JSON, so that the memory that it takes is known."""

    reply: bytes
    items: bytes  # the whole input, those of earlier responses included, then the output
    num_input: int
    output_keys: tuple[Key, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.reply) + len(self.items)

    def all_items(self) -> list[Item]:
        return _ITEMS.decode(self.items)

    def input_items(self) -> list[Item]:
        return self.all_items()[: self.num_input]


class LiveResponse(Protocol):
    """A response that is being streamed."""

    def current(self) -> Response: ...
    def cancel(self) -> Response: ...
    def discard(self) -> None: ...


class ResponseStore:
    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.num_bytes = 0
        # Streams that still run. An entry goes with its stream.
        self.live: WeakValueDictionary[Key, LiveResponse] = WeakValueDictionary()
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, StoredResponse] = OrderedDict()  # newest use last
        self._holders: dict[Key, Key] = {}  # output item -> its response

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def stores(self) -> bool:
        return self._max_count > 0

    def put(self, reply: Response, input_items: Sequence[Item], owner: bytes = NO_KEY) -> None:
        """A response larger than the whole store is not kept."""
        items = to_json([*input_items, *reply.output])
        keys = tuple((owner, str(item.id)) for item in reply.output)
        entry = StoredResponse(to_json(reply), items, len(input_items), keys)
        if entry.num_bytes > self._max_bytes:
            return
        self._entries[owner, reply.id] = entry
        self._holders |= dict.fromkeys(keys, (owner, reply.id))
        self.num_bytes += entry.num_bytes
        while len(self._entries) > self._max_count or self.num_bytes > self._max_bytes:
            oldest_owner, oldest_id = next(iter(self._entries))
            self.remove(oldest_id, oldest_owner)

    def get(self, response_id: str, owner: bytes = NO_KEY) -> StoredResponse | None:
        entry = self._entries.get((owner, response_id))
        if entry is not None:
            self._entries.move_to_end((owner, response_id))
        return entry

    def remove(self, response_id: str, owner: bytes = NO_KEY) -> bool:
        entry = self._entries.pop((owner, response_id), None)
        if entry is None:
            return False
        self.num_bytes -= entry.num_bytes
        for key in entry.output_keys:
            self._holders.pop(key, None)
        return True

    def finder(self, owner: bytes = NO_KEY) -> Callable[[str], Item | None]:
        """Finds output items of stored responses. It decodes each response once."""
        decoded: dict[Key, dict[str, Item]] = {}

        def find(item_id: str) -> Item | None:
            holder = self._holders.get((owner, item_id))
            entry = None if holder is None else self._entries.get(holder)
            if holder is None or entry is None:
                return None
            if holder not in decoded:
                decoded[holder] = {str(item.id): item for item in entry.all_items()}
            return decoded[holder].get(item_id)

        return find
