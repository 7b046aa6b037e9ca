"""Responses that were stored: encoded, in memory, bounded in number and bytes.

The least recently used ones are dropped first. Nothing survives the process.
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


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """JSON, so that the memory that it takes is known."""

    id: str
    reply: bytes
    items: bytes  # the whole input, those of earlier responses included, then the output
    num_input: int
    output_ids: tuple[str, ...]

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


class ResponseStore:
    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.num_bytes = 0
        # Streams that still run. An entry goes with its stream.
        self.live: WeakValueDictionary[str, LiveResponse] = WeakValueDictionary()
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()  # newest use last
        self._owners: dict[str, str] = {}  # id of an output item -> of its response

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def stores(self) -> bool:
        return self._max_count > 0

    def put(self, reply: Response, input_items: Sequence[Item]) -> None:
        """A response larger than the whole store is not kept."""
        items = to_json([*input_items, *reply.output])
        ids = tuple(str(item.id) for item in reply.output)
        entry = StoredResponse(reply.id, to_json(reply), items, len(input_items), ids)
        if entry.num_bytes > self._max_bytes:
            return
        self._entries[entry.id] = entry
        self._owners |= dict.fromkeys(ids, entry.id)
        self.num_bytes += entry.num_bytes
        while len(self._entries) > self._max_count or self.num_bytes > self._max_bytes:
            self.remove(next(iter(self._entries)))

    def get(self, response_id: str) -> StoredResponse | None:
        entry = self._entries.get(response_id)
        if entry is not None:
            self._entries.move_to_end(response_id)
        return entry

    def remove(self, response_id: str) -> bool:
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return False
        self.num_bytes -= entry.num_bytes
        for item_id in entry.output_ids:
            self._owners.pop(item_id, None)
        return True

    def finder(self) -> Callable[[str], Item | None]:
        """Finds output items of stored responses. It decodes each response once."""
        decoded: dict[str, dict[str, Item]] = {}

        def find(item_id: str) -> Item | None:
            owner = self._owners.get(item_id, "")
            entry = self._entries.get(owner)
            if entry is None:
                return None
            if owner not in decoded:
                decoded[owner] = {str(item.id): item for item in entry.all_items()}
            return decoded[owner].get(item_id)

        return find
