"""How large each part of a request may be. Checked before anything is done with it.

LIMITS is the one table: requests are checked against it and docs/reference shows it. Work that a
request causes is bounded by these sizes, so that one request cannot hold the event loop.
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
    MAX_LOGIT_BIAS,
    MAX_OWN_STOP_TOKEN_IDS,
)

KIB = 1 << 10

# Of a whole body. A JSON decoder builds an object for each of these without pause.
MAX_VALUES = 1 << 20
MAX_MEMBERS = 1 << 17
MAX_CONTAINERS = 1 << 17
_MEMBERS = "members of objects"
_MOST = {"values": MAX_VALUES, _MEMBERS: MAX_MEMBERS, "objects and arrays": MAX_CONTAINERS}
# A smaller body cannot break any limit above, and no field in it any limit in bytes.
_SMALL_BODY = 64 * KIB

# A string with its quotes. The last one of a broken body may lack its end: without that case each
# of its escaped quotes would be tried as a beginning.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_PIECES = 4096
_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])  # finds where each value ends


@dataclass(frozen=True)
class Limit:
    """None is no limit other than that of the body."""

    entries: int | None = None  # of a list or an object
    chars: int | None = None  # of the string, or of each string in the list
    json_bytes: int | None = None  # of any value, as it was sent


_FREE_FORM = Limit(json_bytes=64 * KIB)
LIMITS: Mapping[str, Limit] = {
    "model": Limit(chars=4096),
    "messages": Limit(entries=16_384),
    "messages[].content": Limit(entries=16_384),
    "messages[].name": Limit(chars=256),
    "prompt": Limit(entries=MAX_VALUES),
    "tokens": Limit(entries=MAX_VALUES),
    # Each emitted text is searched for every one of them. OpenAI allows 4.
    "stop": Limit(entries=64, chars=1024),
    "stop_token_ids": Limit(entries=MAX_OWN_STOP_TOKEN_IDS),
    "bad_words": Limit(entries=MAX_BAD_WORDS, chars=MAX_BAD_WORD_CHARS),
    "allowed_token_ids": Limit(entries=1 << 19),
    "logit_bias": Limit(entries=MAX_LOGIT_BIAS),
    "logits_processors": Limit(entries=16, chars=256),
    "chat_template": Limit(chars=128 * KIB),
    "chat_template_kwargs": _FREE_FORM,
    "extra_args": _FREE_FORM,
    "metadata": _FREE_FORM,
    "user": _FREE_FORM,
    "service_tier": _FREE_FORM,
    "prompt_cache_key": _FREE_FORM,
    "prompt_cache_options": _FREE_FORM,
    "prompt_cache_retention": _FREE_FORM,
    "safety_identifier": _FREE_FORM,
}


def check_body(body: bytes) -> None:
    """Limits that must hold before a body is decoded. A body that is not JSON may pass."""
    if len(body) <= _SMALL_BODY:
        return
    broken = _broken_limit(body)
    # Millions of members may all be fields: finding their sizes would build them.
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
    """The bytes of each field's value. Empty for a body that is no JSON object."""
    try:
        return {name: len(memoryview(raw)) for name, raw in _RAW_FIELDS.decode(body).items()}
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}  # decoding it stops at the same place and explains why


def check_fields(raw: Mapping[str, Any]) -> None:
    """Limits of each field of a decoded body. Values of a wrong type are left to conversion."""
    for name, value in raw.items():
        if name in LIMITS:
            _check_one(name, value, LIMITS[name])
    for i, message in enumerate(raw["messages"] if type(raw.get("messages")) is list else ()):
        if type(message) is dict:
            # A text has no entries: only a list of parts is counted.
            content, where = message.get("content"), f"messages[{i}]"
            _check_one(f"{where}.content", content, LIMITS["messages[].content"])
            _check_one(f"{where}.name", message.get("name"), LIMITS["messages[].name"])


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
    """The key in _MOST of the first limit that the body breaks."""
    # Strings hold such bytes too, but seldom that many: most bodies need no second look.
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
    # Beyond this many strings a valid body has broken a limit.
    for string in islice(_STRING.finditer(body), 2 * MAX_VALUES):
        yield body[at : string.start()]
        at = string.end()
    yield body[at:]
