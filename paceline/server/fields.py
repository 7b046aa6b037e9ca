"""Parses a body into a typed request, and decides which field names it may have.

A field is supported, accepted without effect on tokens, known but not built (400 unless its value
is neutral), or unknown (400 with the nearest name). Objects inside a body, such as messages, may
also have fields that clients copy from earlier replies, and unknown fields whose value is null.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from paceline.errors import InvalidRequest, cut, nearest, shown
from paceline.server.limits import check_body, check_fields
from paceline.server.requests import OF_OTHER_SERVERS, GenerationBody

T = TypeVar("T", bound=msgspec.Struct)

# Fields of an earlier reply that clients send back (model_dump of openai and litellm), and marks
# for the prompt caches of other servers. They do not change the tokens.
ECHOED = frozenset(
    {
        "annotations",
        "cache_control",
        "logprobs",
        "parsed",
        "prompt_cache_breakpoint",
        "provider_specific_fields",
        "reasoning_details",
        "thinking_blocks",
    }
)

# Fields that are not supported -> what to do, beside leaving them out.
_ADVICE = {
    "functions": "Send tools.",
    "function_call": "Send tool_choice.",
    "store": "Nothing is stored; send false.",
    "best_of": "Request n choices and compare their logprobs.",
    "vllm_xargs": "Custom logits processors read extra_args.",
    **OF_OTHER_SERVERS,
}
# Below this similarity, names may only share a word.
_SURELY_MEANT = 0.8

_PATH = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")
_BYTE = re.compile(r"\(byte (\d+)\)")


def parse(body: bytes, kind: type[T]) -> T:
    """The typed request in `body`, or InvalidRequest that says which field is wrong and why."""
    return convert(decode_object(body, kind), kind)


def convert(raw: Mapping[str, Any], kind: type[T]) -> T:
    check_fields(raw)
    check_names(raw, kind)
    if issubclass(kind, GenerationBody):
        kind.check_parts(raw)
    for name, hint in _fields_with_structs(kind).items():
        _check_inside(raw.get(name), hint, name, getattr(kind, "advice", {}))
    # JSON has one type of number, and some clients write each with a fraction: 16.0
    floats = {n: v for n, v in raw.items() if type(v) is float and n in _int_fields(kind)}
    whole = {n: int(v) for n, v in floats.items() if v.is_integer()}
    try:
        return msgspec.convert({**raw, **whole}, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _as_invalid(error, kind) from None
    except (OverflowError, ValueError) as error:  # an integer that is too large for a float
        raise InvalidRequest(f"The request holds a number that cannot be used: {error}.") from None


def decode_object(body: bytes, kind: type[msgspec.Struct] | None = None) -> dict[str, Any]:
    """Any JSON object. `kind` is only used to find the path of a number that is out of range."""
    body = body.removeprefix(codecs.BOM_UTF8)  # files that Windows wrote begin with it
    if not body.strip():
        raise InvalidRequest("The request body is empty; send a JSON object.")
    check_body(body)
    try:
        raw = msgspec.json.decode(body)
    except msgspec.ValidationError as error:
        if kind is not None:
            _say_where(body, kind)
        raise InvalidRequest(
            f"The request body holds a value that cannot be used: {error}."
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The request body is not UTF-8: {error}.") from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.") from None
    except ValueError as error:
        hint = _hint_at(body, str(error))
        raise InvalidRequest(f"The request body is not JSON: {error}.{hint}") from None
    if not isinstance(raw, dict):
        raise InvalidRequest(f"The request body must be a JSON object, not {_json_name(raw)}.")
    return raw


def _hint_at(body: bytes, reason: str) -> str:
    """A hint about NaN and Infinity, which some JSON writers emit."""
    at = _BYTE.search(reason)
    if at and body.startswith((b"NaN", b"Infinity", b"nan", b"inf"), int(at[1])):
        return " JSON has no NaN and no Infinity; leave the field out."
    return ""


def _say_where(body: bytes, kind: type[msgspec.Struct]) -> None:
    """Raise with the path of a number that is out of range; untyped decoding gives no path."""
    try:
        msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _as_invalid(error, kind) from None
    except (ValueError, RecursionError):
        pass


def check_names(raw: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    known = kind.__struct_fields__
    without_effect, not_built = _other_names(kind)
    for name, value in raw.items():
        if name in known or name in without_effect:
            continue
        if name in not_built:
            _refuse_unless_neutral(name, value, raw, not_built[name])
            continue
        if (hint := getattr(kind, "hints", {}).get(name)) is not None:
            raise InvalidRequest(f"Unknown field {name!r}. {hint}", param=name)
        raise _unknown(name, known)


@cache
def _other_names(
    kind: type[msgspec.Struct],
) -> tuple[frozenset[str], Mapping[str, tuple[Any, ...]]]:
    if not issubclass(kind, GenerationBody):
        return frozenset(), {}
    return kind.without_effect, {**kind.not_built, **dict.fromkeys(OF_OTHER_SERVERS, ())}


def check_inner_names(raw: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Check the field names of an object inside a body."""
    for name, value in raw.items():
        if name not in known and name not in ECHOED and value is not None:
            raise _unknown(name, known, f"{where}.")


def _check_inside(value: Any, hint: Any, where: str, advice: Mapping[str, str]) -> None:
    """Check the field names and the `type` of all objects in a value, by the types of its field.

    Values of another type are left to conversion, which reports them with their path.
    """
    hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if isinstance(value, list):
        inner = next((get_args(h)[0] for h in hints if get_origin(h) is list), None)
        for i, entry in enumerate(value):
            _check_inside(entry, inner, f"{where}[{i}]", advice)
    kinds = [h for h in hints if isinstance(h, type) and issubclass(h, msgspec.Struct)]
    if isinstance(value, dict) and kinds:
        kind = _kind_of(value, kinds, where, advice)
        tag = () if kind.__struct_config__.tag is None else ("type",)
        check_inner_names(value, (*tag, *kind.__struct_encode_fields__), where)
        for name, field in _fields_with_structs(kind).items():
            _check_inside(value.get(name), field, f"{where}.{name}", advice)


def _kind_of(
    value: dict[str, Any],
    kinds: list[type[msgspec.Struct]],
    where: str,
    advice: Mapping[str, str],
) -> type[msgspec.Struct]:
    """The one of these types that the value's `type` names."""
    by_tag = {kind.__struct_config__.tag: kind for kind in kinds}
    if None in by_tag:
        return by_tag[None]
    tag = value.get("type")
    if isinstance(tag, str) and tag in by_tag:
        return by_tag[tag]
    said = "is missing" if tag is None else f"{shown(tag)} is not supported"
    what_to_do = advice.get(_last_name(where), f"use one of {', '.join(map(str, by_tag))}")
    raise InvalidRequest(f"{where}.type {said}; {what_to_do}.", param=f"{where}.type")


@cache
def _fields_with_structs(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of those fields that may hold objects with known names."""
    fields = msgspec.structs.fields(kind)
    return {field.encode_name: field.type for field in fields if _has_struct(field.type)}


def _has_struct(hint: Any) -> bool:
    return any(isinstance(part, type) and issubclass(part, msgspec.Struct) for part in _parts(hint))


@cache
def _int_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    fields = msgspec.structs.fields(kind)
    return frozenset(field.encode_name for field in fields if int in _parts(field.type))


def _choices(kind: type[msgspec.Struct], name: str) -> list[str]:
    """The values that a Literal field of this name takes, in this type or in one inside it."""
    found: list[str] = []
    for field in msgspec.structs.fields(kind):
        for part in _parts(field.type):
            if field.encode_name == name and get_origin(part) is Literal:
                found += get_args(part)
            elif _has_struct(part) and isinstance(part, type):
                found += _choices(part, name)
    return list(dict.fromkeys(found))


def _parts(hint: Any) -> Iterator[Any]:
    """A type and all types that it is made of."""
    yield hint
    for inner in get_args(hint):
        yield from _parts(inner)


def _last_name(path: str) -> str:
    """The field that a path such as messages[0].role ends with."""
    return str(re.findall(r"[a-z_]+", path)[-1])


def _refuse_unless_neutral(
    name: str, value: Any, raw: Mapping[str, Any], neutral: tuple[Any, ...]
) -> None:
    if name == "best_of" and raw.get("n") is not None:
        neutral = (raw["n"],)  # the best n of n are all n
    if value is None or any(value == v and type(value) is type(v) for v in neutral):
        return
    advice = f" {_ADVICE[name]}" if name in _ADVICE else ""
    raise InvalidRequest(f"{name!r} is not supported; leave it out.{advice}", param=name)


def _unknown(name: str, known: Iterable[str], where: str = "") -> InvalidRequest:
    hint = nearest(name, known, cutoff=_SURELY_MEANT)
    return InvalidRequest(f"Unknown field {shown(name)}.{hint}", param=where + name)


def _as_invalid(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> InvalidRequest:
    """msgspec gives the path as `$.messages[0].role`; OpenAI's `param` has no `$.`."""
    text = str(error)  # may quote the body
    match = _PATH.search(text)
    param = match["path"] if match and match["path"] else None
    reason = text[: match.start()] if match else text
    missing = re.search(r"missing required field `(\w+)`", reason)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return InvalidRequest(f"{param!r} is missing.", param=param)
    reason = cut(reason.replace("`", "'"))
    if match and match["key"]:
        reason += " as a key"
    if param and "Invalid enum value" in reason and (choices := _choices(kind, _last_name(param))):
        reason += f"; it takes {', '.join(choices)}"
    return InvalidRequest(f"{param}: {reason}." if param else f"{reason}.", param=param)


def _json_name(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
