"""Size limits of each part of a request, checked before any other work.

LIMITS is the only table: requests are checked against it, and docs/reference shows it. The sizes
bound the work of a request, so that one request cannot block the event loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from paceline.errors import InvalidRequest, shown
from paceline.request import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_ENTRIES,
    MAX_OWN_STOP_TOKEN_IDS,
)
from paceline.server.requests import WITHOUT_EFFECT

KIB = 1 << 10

# Limits of a whole body. A JSON decoder builds an object for each of these without a pause.
MAX_VALUES = 1 << 20
MAX_MEMBERS = 1 << 17
MAX_CONTAINERS = 1 << 17
_MEMBERS = "members of objects"
_MOST = {"values": MAX_VALUES, _MEMBERS: MAX_MEMBERS, "objects and arrays": MAX_CONTAINERS}
# A smaller body cannot exceed any limit above, nor any limit in bytes of LIMITS.
_SMALL_BODY = 64 * KIB

# A string with its quotes. The last string of a broken body may have no end quote; without that
# case the regex would try each of its escaped quotes as a beginning.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_PIECES = 4096
_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])  # finds where each value ends


@dataclass(frozen=True)
class Limit:
    """None: limited only by the size of the body."""

    entries: int | None = None  # of a list or an object
    chars: int | None = None  # of the string, or of each string in the list
    json_bytes: int | None = None  # of any value, as it was sent


_FREE_FORM = Limit(json_bytes=64 * KIB)
_GRAMMAR = Limit(json_bytes=256 * KIB)  # the engine has a smaller limit for the grammar in it
_STOPS = Limit(entries=64, chars=1024)  # each new text is searched for all; OpenAI allows 4
LIMITS: Mapping[str, Limit] = {
    "model": Limit(chars=4096),
    "messages": Limit(entries=16_384),
    "messages[].content": Limit(entries=16_384),
    "messages[].name": Limit(chars=256),
    "messages[].tool_calls": Limit(entries=1024),
    "messages[].tool_call_id": Limit(chars=256),
    # Every prompt shows all tools, and a grammar may hold all of their schemas.
    "tools": Limit(entries=1024, json_bytes=1 << 20),
    "tool_choice": _FREE_FORM,
    "reasoning_effort": Limit(chars=256),
    "input": Limit(entries=16_384),
    "include": Limit(entries=64),
    "text": _GRAMMAR,
    "output_config": _GRAMMAR,
    "output_format": _GRAMMAR,
    "context_management": _FREE_FORM,
    "client_metadata": _FREE_FORM,
    "stop_sequences": _STOPS,
    "prompt": Limit(entries=MAX_VALUES),
    "tokens": Limit(entries=MAX_VALUES),
    "stop": _STOPS,
    "stop_token_ids": Limit(entries=MAX_OWN_STOP_TOKEN_IDS),
    **{name: Limit(entries=most) for name, most in MAX_ENTRIES.items()},
    "bad_words": Limit(entries=MAX_BAD_WORDS, chars=MAX_BAD_WORD_CHARS),
    "logits_processors": Limit(entries=16, chars=256),
    "chat_template": Limit(chars=128 * KIB),
    "chat_template_kwargs": _FREE_FORM,
    "extra_args": _FREE_FORM,
    "speculative": _FREE_FORM,
    "response_format": _GRAMMAR,
    "structured_outputs": _GRAMMAR,
    **dict.fromkeys(sorted(WITHOUT_EFFECT), _FREE_FORM),
}


def check_body(body: bytes) -> None:
    """Check the limits that must hold before decoding. A body that is not JSON may pass."""
    if len(body) <= _SMALL_BODY:
        return
    broken = _broken_limit(body)
    # Finding field sizes builds an object per field, and there may be millions.
    sizes = {} if broken == _MEMBERS else _field_sizes(body)
    for name, size in sizes.items():
        limit = LIMITS[name].json_bytes if name in LIMITS else None
        if limit is not None and size > limit:
            raise _too_much(name, size, limit, "bytes of JSON")
    if broken is not None:
        largest = max(sizes, key=sizes.__getitem__, default=None)
        where = f"; its largest field is {shown(largest)}" if largest is not None else ""
        raise InvalidRequest(
            f"The request body holds more than {_MOST[broken]} {broken}{where}. Split the request.",
            param=largest,
        )


def _field_sizes(body: bytes) -> dict[str, int]:
    """The size in bytes of each field's value; {} if the body is not a JSON object."""
    try:
        return {name: len(memoryview(raw)) for name, raw in _RAW_FIELDS.decode(body).items()}
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}  # decoding fails later and explains why


def check_fields(raw: Mapping[str, Any]) -> None:
    """Check the limits of each field of a decoded body. Conversion reports wrong types."""
    for name, value in raw.items():
        if name in LIMITS:
            _check_one(name, value, LIMITS[name])
    for i, message in enumerate(raw["messages"] if type(raw.get("messages")) is list else ()):
        if type(message) is dict:
            # Only a list of content parts has entries; text has none.
            for name in ("content", "name", "tool_calls", "tool_call_id"):
                _check_one(f"messages[{i}].{name}", message.get(name), LIMITS[f"messages[].{name}"])


def _check_one(name: str, value: Any, limit: Limit) -> None:
    if isinstance(value, list | dict):
        if limit.entries is not None and len(value) > limit.entries:
            raise _too_much(name, len(value), limit.entries, "entries")
        texts = [v for v in value if isinstance(v, str)] if limit.chars is not None else ()
    else:
        texts = [value] if isinstance(value, str) else ()
    longest = max(map(len, texts), default=0)
    if limit.chars is not None and longest > limit.chars:
        raise _too_much(name, longest, limit.chars, "characters")


def _too_much(name: str, size: int, limit: int, unit: str) -> InvalidRequest:
    return InvalidRequest(f"{name} has {size} {unit}; the limit is {limit}.", param=name)


def _broken_limit(body: bytes) -> str | None:
    """The key in _MOST of the first limit that the body exceeds."""
    # This also counts bytes inside strings. Most bodies are below the limits anyway.
    if _over(_counts(body)) is None:
        return None
    counts = (0, 0, 0)
    pieces = _outside_strings(body)
    while batch := b"".join(islice(pieces, _PIECES)):
        more = _counts(batch)
        counts = (counts[0] + more[0], counts[1] + more[1], counts[2] + more[2])
        broken = _over(counts)
        if broken is not None:
            return broken
    return None


def _over(counts: tuple[int, int, int]) -> str | None:
    return next(
        (what for what, count in zip(_MOST, counts, strict=True) if count > _MOST[what]), None
    )


def _counts(piece: bytes) -> tuple[int, int, int]:
    """Values (less the first of each container), members, and containers."""
    return piece.count(b","), piece.count(b":"), piece.count(b"[") + piece.count(b"{")


def _outside_strings(body: bytes) -> Iterator[bytes]:
    at = 0
    # A valid body with more strings exceeds a limit.
    for string in islice(_STRING.finditer(body), 2 * MAX_VALUES):
        yield body[at : string.start()]
        at = string.end()
    yield body[at:]
