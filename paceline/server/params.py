"""Request fields to SamplingParams: the request's value, else the model's default, else OpenAI's.

SamplingParams checks the ranges of values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from paceline.errors import InvalidRequest
from paceline.request import SamplingParams
from paceline.server.requests import ChatRequest, CompletionRequest, GenerateFields
from paceline.server.structured import structured_outputs

OPENAI_COMPLETION_TOKENS = 16
# Entries of per-sequence tables, summed over all sequences of a request.
MAX_TABLE_ENTRIES = 1 << 19
_TEXT_PER_ENTRY = 16  # a grammar is only copied; its bytes count less than the entries of a table
_UNITS = {"extra_args": "bytes of JSON", "structured_outputs": f"times {_TEXT_PER_ENTRY} bytes"}

_SHARED_NAMES = [
    f.name for f in fields(SamplingParams) if f.name in GenerateFields.__struct_fields__
]


def chat_params(request: ChatRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Without max_tokens, a chat reply may fill the rest of the context."""
    new, old = request.max_completion_tokens, request.max_tokens
    if new is not None and old is not None and new != old:
        raise InvalidRequest(
            f"max_completion_tokens is {new} and max_tokens is {old}; send one of them.",
            param="max_completion_tokens",
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    if request.echo and not request.continue_final_message:
        raise InvalidRequest(
            "echo in chat repeats the continued message; it needs continue_final_message: true.",
            param="echo",
        )
    values = _common(request, defaults)
    if new is not None:
        values["max_tokens"] = new
    values.setdefault("max_tokens", None)
    values["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    return SamplingParams(**values)


def completion_params(request: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Without max_tokens, a text completion has OpenAI's 16 tokens."""
    values = _common(request, defaults)
    values.setdefault("max_tokens", OPENAI_COMPLETION_TOKENS)
    if values["max_tokens"] == 0 and request.echo:
        # Only the prompt is scored. The engine must sample one token; the reply omits it.
        values["max_tokens"], values["min_tokens"] = 1, 0
    values["logprobs"] = request.logprobs
    if request.echo and request.logprobs is not None:
        values["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    return SamplingParams(**values)


def _common(request: GenerateFields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise InvalidRequest(
            "continuous_usage_stats needs include_usage: true.",
            param="stream_options.continuous_usage_stats",
        )
    given = {name: getattr(request, name) for name in _SHARED_NAMES}
    given["structured_outputs"] = structured_outputs(request)
    return {**defaults, **{name: value for name, value in given.items() if value is not None}}


def check_table_sizes(params: SamplingParams, num_sequences: int) -> None:
    """Raise if the tables of all sequences together are too large; each sequence has a copy."""
    sizes = {name: len(getattr(params, name) or ()) for name in ("allowed_token_ids", "logit_bias")}
    sizes["extra_args"] = len(json.dumps(params.extra_args)) if params.extra_args else 0
    structured = params.structured_outputs
    if structured is not None:
        sizes["structured_outputs"] = len(json.dumps(structured.as_dict())) // _TEXT_PER_ENTRY
    name = max(sizes, key=sizes.__getitem__)
    if sum(sizes.values()) * num_sequences > MAX_TABLE_ENTRIES:
        unit = _UNITS.get(name, "entries")
        raise InvalidRequest(
            f"{name} has {sizes[name]} {unit} for each of {num_sequences} sequences; "
            f"{MAX_TABLE_ENTRIES} in all is the limit. Ask for fewer sequences at a time.",
            param=name,
        )


@contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Errors that are raised within have the client's names of fields."""
    try:
        yield
    except InvalidRequest as error:
        raise with_client_names(error, names) from None


def with_client_names(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """The error with the client's name of a field. `names` maps our names, which may be the
    beginning of a path, to the client's."""
    param = error.param or ""
    ours = [n for n in names if param == n or param.startswith((f"{n}.", f"{n}["))]
    if ours:
        longest = max(ours, key=len)
        name = names[longest] + param[len(longest) :]
        # Messages about a parameter begin with its name; messages about a prompt do not.
        error.args = (re.sub(rf"^'?{re.escape(param)}(?!\w)'?", name, str(error)),)
        error.param = name
    return error
