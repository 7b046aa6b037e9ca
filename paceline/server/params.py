"""Request fields to SamplingParams: the request's value, else the model's default, else OpenAI's.

Knows no engine and no text; what values may be is checked by SamplingParams itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidRequest
from paceline.request import SamplingParams
from paceline.server.requests import ChatRequest, CompletionRequest, GenerateFields

OPENAI_COMPLETION_TOKENS = 16
# Entries of tables that every sequence of a request is sent with, over all its sequences.
MAX_TABLE_ENTRIES = 1 << 19

# Fields that go to SamplingParams under their own name.
_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "seed",
    "skip_special_tokens",
    "prompt_logprobs",
    "logits_processors",
    "extra_args",
    "num_speculative_tokens",
)


def chat_params(request: ChatRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Chat without max_tokens may fill the room that the prompt leaves."""
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
            "echo in chat shows the message that is continued; it needs continue_final_message.",
            param="echo",
        )
    values = _common(request, defaults)
    asked = new if new is not None else old
    if asked is not None:
        values["max_tokens"] = asked
    values.setdefault("max_tokens", None)
    values["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    return _build(values, request)


def completion_params(request: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Text completion without max_tokens gives OpenAI's 16."""
    values = _common(request, defaults)
    if request.max_tokens is not None:
        values["max_tokens"] = request.max_tokens
    values.setdefault("max_tokens", OPENAI_COMPLETION_TOKENS)
    if values["max_tokens"] == 0 and request.echo:
        # Scores the prompt alone: the engine must sample a token, and the reply leaves it out.
        values["max_tokens"], values["min_tokens"] = 1, 0
    values["logprobs"] = request.logprobs
    if request.echo and request.logprobs is not None:
        values["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    return _build(values, request)


def scores_prompt_only(request: CompletionRequest) -> bool:
    return bool(request.echo) and request.max_tokens == 0


def _common(request: GenerateFields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise InvalidRequest(
            "continuous_usage_stats needs include_usage: true.",
            param="stream_options.continuous_usage_stats",
        )
    values = dict(defaults)
    for name in _SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            values[name] = value
    return values


def check_tables(params: SamplingParams, num_sequences: int) -> None:
    """Raise when the tables of a request, once for each sequence, come to too much."""
    sizes = {name: len(getattr(params, name) or ()) for name in ("allowed_token_ids", "logit_bias")}
    sizes["extra_args"] = len(json.dumps(params.extra_args)) if params.extra_args else 0
    name = max(sizes, key=sizes.__getitem__)
    if sum(sizes.values()) * num_sequences > MAX_TABLE_ENTRIES:
        unit = "bytes of JSON" if name == "extra_args" else "entries"
        raise InvalidRequest(
            f"{name} has {sizes[name]} {unit} for each of {num_sequences} sequences; "
            f"{MAX_TABLE_ENTRIES} in all is the limit. Ask for fewer sequences at a time.",
            param=name,
        )


def _build(values: Mapping[str, Any], request: GenerateFields) -> SamplingParams:
    try:
        return SamplingParams(**values)
    except InvalidRequest as error:
        raise as_asked(error, request) from None


def as_asked(error: InvalidRequest, request: GenerateFields) -> InvalidRequest:
    """The error by the name that the client wrote, where ours is another."""
    if not isinstance(request, ChatRequest) or error.param is None:
        return error
    names = {"logprobs": "top_logprobs", "prompt": "messages"}
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    name = names.get(error.param, error.param)
    # Messages about a parameter begin with its name; those about a prompt do not.
    error.args = (re.sub(rf"^{error.param}\b", name, str(error)),)
    error.param = name
    return error
