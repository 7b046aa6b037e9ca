"""Parses a body into a typed request, and decides which field names it may have.

A field is supported, accepted without effect on tokens, known but not built (400 unless its value
is neutral), or unknown (400 with the nearest name). Objects inside a body, such as messages, may
also have fields that clients copy from earlier replies, and unknown fields whose value is null.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec

from paceline.errors import InvalidRequest, cut, nearest, shown
from paceline.server.limits import check_body, check_fields
from paceline.server.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    Role,
)

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

# Older names of vLLM -> what has replaced them.
_GUIDED: Mapping[str, str] = {
    **{
        f"guided_{kind}": f"structured_outputs.{kind}"
        for kind in ("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern")
    },
    "structural_tag": "structured_outputs.structural_tag",
    "guided_decoding_backend": "",
    "guided_decoding_disable_fallback": "",
    "guided_decoding_disable_any_whitespace": "structured_outputs.disable_any_whitespace",
    "guided_decoding_disable_additional_properties": (
        "structured_outputs.disable_additional_properties"
    ),
}
# Fields of other servers that are refused in every API, with what to do instead.
_OF_OTHER_SERVERS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_GUIDED, ()),
    "request_id": (),
    "num_ctx": (),
}
# Fields of OpenAI, then of vLLM, that are not supported -> their neutral values besides
# null.
NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": ([], ["text"]),
    "prediction": (),
    "moderation": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "store": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    **_OF_OTHER_SERVERS,
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "cache_salt": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}
_ADVICE = {
    "functions": " Send tools.",
    "function_call": " Send tool_choice.",
    "store": " Nothing is stored; send false.",
    "best_of": " Request n choices and compare their logprobs.",
    "vllm_xargs": " Custom logits processors read extra_args.",
    "request_id": " Send the X-Request-Id header.",
    "num_ctx": " The server's --max-model-len sets the context length.",
    **{old: f" Send {new}." if new else " There is one backend." for old, new in _GUIDED.items()},
}
# Fields that belong to another route: (request type, name) -> advice.
_OF_CHAT = ("messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort")
_ELSEWHERE: Mapping[tuple[type[msgspec.Struct], str], str] = {
    **{(CompletionRequest, n): f"Send {n} to /v1/chat/completions." for n in _OF_CHAT},
    (ChatRequest, "prompt"): "Send a prompt to /v1/completions.",
    (CompletionRequest, "max_completion_tokens"): "Did you mean 'max_tokens'?",
    (CompletionRequest, "top_logprobs"): "Did you mean 'logprobs'? It is a number here.",
}
# Below this similarity, names may only share a word.
_SURELY_MEANT = 0.8

_PATH = re.compile(r" - at (`key` in )?`\$\.?(?P<path>[^`]*)`$")
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
    try:
        return msgspec.convert(raw, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _as_invalid(error) from None
    except (OverflowError, ValueError) as error:  # an integer that is too large for a float
        raise InvalidRequest(f"The request holds a number that cannot be used: {error}.") from None


def decode_object(body: bytes, kind: type[msgspec.Struct] | None = None) -> dict[str, Any]:
    """Any JSON object. `kind` is only used to find the path of a number that is out of range."""
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
        raise _as_invalid(error) from None
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
        advice = _ELSEWHERE.get((kind, name)) or getattr(kind, "hints", {}).get(name)
        if advice is not None:
            raise InvalidRequest(f"Unknown field {name!r}. {advice}", param=name)
        raise _unknown(name, known)


@cache
def _other_names(
    kind: type[msgspec.Struct],
) -> tuple[frozenset[str], Mapping[str, tuple[Any, ...]]]:
    if not issubclass(kind, GenerationBody):
        return frozenset(), {}
    own = NOT_BUILT if kind.not_built is None else kind.not_built
    return kind.without_effect, {**own, **_OF_OTHER_SERVERS}


def check_echoed(raw: Mapping[str, Any], known: Collection[str], where: str) -> None:
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
        check_echoed(value, (*tag, *kind.__struct_encode_fields__), where)
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
    field = re.findall(r"[a-z_]+", where)[-1]
    told = advice.get(field, f"use one of {', '.join(map(str, by_tag))}")
    raise InvalidRequest(f"{where}.type {said}; {told}.", param=f"{where}.type")


@cache
def _fields_with_structs(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of those fields that may hold objects with known names."""
    fields = msgspec.structs.fields(kind)
    return {field.encode_name: field.type for field in fields if _has_struct(field.type)}


def _has_struct(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return True
    return any(map(_has_struct, get_args(hint)))


def _refuse_unless_neutral(
    name: str, value: Any, raw: Mapping[str, Any], neutral: tuple[Any, ...]
) -> None:
    if name == "best_of" and raw.get("n") is not None:
        neutral = (raw["n"],)  # the best n of n are all n
    if value is None or any(value == v and type(value) is type(v) for v in neutral):
        return
    advice = _ADVICE.get(name, "")
    raise InvalidRequest(f"{name!r} is not supported; leave it out.{advice}", param=name)


def _unknown(name: str, known: Iterable[str], where: str = "") -> InvalidRequest:
    hint = nearest(name, known, cutoff=_SURELY_MEANT)
    return InvalidRequest(f"Unknown field {shown(name)}.{hint}", param=where + name)


def _as_invalid(error: msgspec.ValidationError) -> InvalidRequest:
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
    if param and param.endswith(".role"):
        reason += f"; use one of {', '.join(get_args(Role))}"
    return InvalidRequest(f"{param}: {reason}." if param else f"{reason}.", param=param)


def _json_name(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
