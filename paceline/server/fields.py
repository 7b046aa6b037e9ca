"""Which names a request may hold, and bytes to typed requests. Owns the field policy.

A name is supported, has no effect on tokens (accepted), is OpenAI's or vLLM's and not built (400
unless its value asks for nothing), or is unknown (400 with the nearest name). Messages and content
parts also take what clients echo from earlier replies, and unknown names whose value is null.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar, get_args

import msgspec

from paceline.errors import InvalidRequest, cut, nearest, shown
from paceline.server.limits import check_body, check_fields
from paceline.server.requests import ChatRequest, CompletionRequest, Message, Role, StreamOptions

T = TypeVar("T", bound=msgspec.Struct)

# Bookkeeping for OpenAI's own service; whatever they hold, the tokens are the same.
WITHOUT_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
    }
)

# Parts of an earlier reply that clients send back (OpenAI's and litellm's model_dump), and marks
# for prompt caches of other servers. They have no effect on tokens.
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

# Fields of OpenAI, then of vLLM, that are not supported -> values that ask for nothing (null
# always does).
NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (False,),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "audio": (),
    "modalities": ([], ["text"]),
    "prediction": (),
    "moderation": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "store": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
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
    "reasoning_effort": " Steer a template that can think through chat_template_kwargs.",
    "store": " Nothing is stored; send false.",
    "best_of": " Ask for n choices and compare their logprobs.",
    "vllm_xargs": " Custom logits processors read extra_args.",
}
# Names that another route has: (what was asked, name) -> what to do.
_ELSEWHERE: Mapping[tuple[type[msgspec.Struct], str], str] = {
    (CompletionRequest, "messages"): "Send messages to /v1/chat/completions.",
    (ChatRequest, "prompt"): "Send a prompt to /v1/completions.",
    (CompletionRequest, "max_completion_tokens"): "Did you mean 'max_tokens'?",
    (CompletionRequest, "top_logprobs"): "Did you mean 'logprobs'? It is a number here.",
}
# Names that share a word are less alike than this.
_SURELY_MEANT = 0.8

_PATH = re.compile(r" - at (`key` in )?`\$\.?(?P<path>[^`]*)`$")
_BYTE = re.compile(r"\(byte (\d+)\)")


def parse(body: bytes, kind: type[T]) -> T:
    """The typed request in `body`, or InvalidRequest that says which field is wrong and why."""
    return convert(decode_object(body, kind), kind)


def convert(raw: Mapping[str, Any], kind: type[T]) -> T:
    check_fields(raw)
    check_names(raw, kind)
    try:
        return msgspec.convert(raw, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _as_invalid(error) from None
    except (OverflowError, ValueError) as error:  # an integer no float can hold
        raise InvalidRequest(f"The request holds a number that cannot be used: {error}.") from None


def decode_object(body: bytes, kind: type[msgspec.Struct] | None = None) -> dict[str, Any]:
    """Any JSON object; `kind` only helps to say where a number is out of range."""
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
    """For numbers that other languages' writers put out and JSON does not have."""
    at = _BYTE.search(reason)
    if at and body.startswith((b"NaN", b"Infinity", b"nan", b"inf"), int(at[1])):
        return " JSON has no NaN and no Infinity; leave the field out."
    return ""


def _say_where(body: bytes, kind: type[msgspec.Struct]) -> None:
    """Raise with the path of a number out of range, which untyped decoding does not know."""
    try:
        msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _as_invalid(error) from None
    except (ValueError, RecursionError):
        pass


def check_names(raw: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    known = kind.__struct_fields__
    generates = kind in (ChatRequest, CompletionRequest)
    for name, value in raw.items():
        if name in known:
            continue
        if generates and name in WITHOUT_EFFECT:
            continue
        if generates and name in NOT_BUILT:
            _refuse_unless_nothing(name, value, raw)
            continue
        advice = _ELSEWHERE.get((kind, name))
        if advice is not None:
            raise InvalidRequest(f"Unknown field {name!r}. {advice}", param=name)
        raise _unknown(name, known)
    for position, message in enumerate(_objects(raw.get("messages"))):
        check_echoed(message, Message.__struct_fields__, f"messages[{position}]")
    for options in _objects([raw.get("stream_options")]):
        for name in options:
            if name not in StreamOptions.__struct_fields__:
                raise _unknown(name, StreamOptions.__struct_fields__, "stream_options.")


def check_echoed(raw: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Names inside a message or a content part."""
    for name, value in raw.items():
        if name not in known and name not in ECHOED and value is not None:
            raise _unknown(name, known, f"{where}.")


def _refuse_unless_nothing(name: str, value: Any, raw: Mapping[str, Any]) -> None:
    nothing = NOT_BUILT[name]
    if name == "best_of" and raw.get("n") is not None:
        nothing = (raw["n"],)  # best n of n is what n alone gives
    if value is None or any(value == v and type(value) is type(v) for v in nothing):
        return
    advice = _ADVICE.get(name, "")
    raise InvalidRequest(f"{name!r} is not supported; leave it out.{advice}", param=name)


def _unknown(name: str, known: Iterable[str], where: str = "") -> InvalidRequest:
    hint = nearest(name, known, cutoff=_SURELY_MEANT)
    return InvalidRequest(f"Unknown field {shown(name)}.{hint}", param=where + name)


def _objects(values: Any) -> Iterable[dict[str, Any]]:
    if not isinstance(values, list):
        return ()
    # Anything but an object is a type error, which conversion reports with its path.
    return (v if isinstance(v, dict) else {} for v in values)


def _as_invalid(error: msgspec.ValidationError) -> InvalidRequest:
    """msgspec says where as `$.messages[0].role`; OpenAI's `param` is the same without `$.`."""
    text = str(error)  # quotes what was sent
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
