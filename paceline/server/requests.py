"""The bodies of requests as types: field names and JSON types. SamplingParams checks ranges.

A field that is absent or null is None and takes the model's or OpenAI's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Protocol

import msgspec

from paceline.request import SamplingParams

# Integers beyond 64 bits are refused here, with the name of the field.
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]

# Accounting fields of OpenAI's service; they do not change the tokens.
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

# Fields of other servers, and older ones of vLLM, that every API refuses -> what to do instead.
OF_OTHER_SERVERS: Mapping[str, str] = {
    **{
        f"guided_{kind}": f"Send structured_outputs.{kind}."
        for kind in ("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern")
    },
    "structural_tag": "Send structured_outputs.structural_tag.",
    "guided_decoding_backend": "There is one backend.",
    "guided_decoding_disable_fallback": "There is one backend.",
    **{
        f"guided_decoding_{name}": f"Send structured_outputs.{name}."
        for name in ("disable_any_whitespace", "disable_additional_properties")
    },
    "request_id": "Send the X-Request-Id header.",
    "num_ctx": "The server's --max-model-len sets the context length.",
    "enable_thinking": "Chat takes chat_template_kwargs.enable_thinking.",
    "extra_body": "Send its fields beside the others, as the openai package does.",
}
# Fields of OpenAI, then of vLLM, that are not supported -> their neutral values besides null.
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
    **dict.fromkeys(OF_OTHER_SERVERS, ()),
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


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding of chunks, which Paceline does not add


class GenerationBody(msgspec.Struct, kw_only=True):
    """Fields of every API that generates."""

    # Names that are accepted and change no token.
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT
    # Names that are not supported -> their neutral values besides null.
    not_built: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    hints: ClassVar[Mapping[str, str]] = {}  # other APIs' names -> what to do instead
    # Field -> what to do if an object in it has a `type` that is not supported.
    advice: ClassVar[Mapping[str, str]] = {}

    model: str | None = None
    stream: bool | None = None

    @classmethod
    def check_parts(cls, raw: Mapping[str, Any]) -> None:
        """Check or complete what the types cannot say, before a body is converted."""


class SampledBody(GenerationBody, kw_only=True):
    """Fields of sampling that all of OpenAI's APIs have here."""

    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    seed: Int | None = None
    # vLLM's
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    priority: Int | None = None
    # Paceline's
    num_speculative_tokens: Int | None = None


# The type of a sampling parameter -> that of its field.
_FIELD_TYPES: Mapping[str, Any] = {
    "int": Int,
    "float": float,
    "bool": bool,
    "Sequence[int]": list[TokenId],
    "Sequence[str]": list[str],
    "Mapping[int, float]": dict[Int, float],
    "Mapping[str, Any]": dict[str, Any],
}
_NOT_FIELDS = {"detokenize", "logprobs"}  # replies have text; each API has its own logprobs


def _with_sampling_params(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The same with a field for every sampling parameter that it does not declare."""
    more = [
        (f.name, _FIELD_TYPES[str(f.type).removesuffix(" | None")] | None, None)
        for f in fields(SamplingParams)
        if f.name not in {*kind.__struct_fields__, *_NOT_FIELDS}
    ]
    return msgspec.defstruct(kind.__name__, more, bases=(kind,), module=__name__, kw_only=True)


@_with_sampling_params
class GenerateFields(SampledBody, kw_only=True):
    """Fields of both chat and text completions: all sampling parameters, and these. A parameter is
    declared here only if other modules read it, or if its type differs."""

    not_built: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_BUILT

    stream_options: StreamOptions | None = None
    max_tokens: Int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Int | None = None
    # vLLM's
    add_special_tokens: bool | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    # Structured output: OpenAI's field and vLLM's. `structured.py` reads them.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    # Paceline's
    return_token_sources: bool | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation. `text/messages.py` checks the parts of `content`."""

    role: Role
    content: str | list[str | dict[str, Any]] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same by its newer name
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class TemplatedRequest(Protocol):
    """A request whose messages become a prompt. A protocol: msgspec types have at most one base."""

    messages: list[InputMessage]
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None


class ChatRequest(GenerateFields, kw_only=True):
    hints: ClassVar[Mapping[str, str]] = {"prompt": "Send a prompt to /v1/completions."}

    messages: list[InputMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None


_OF_CHAT = ("messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort")


class CompletionRequest(GenerateFields, kw_only=True):
    hints: ClassVar[Mapping[str, str]] = {
        **{name: f"Send {name} to /v1/chat/completions." for name in _OF_CHAT},
        "max_completion_tokens": "Did you mean 'max_tokens'?",
        "top_logprobs": "Did you mean 'logprobs'? It is a number here.",
    }

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Int | None = None


class Tokenize(msgspec.Struct, kw_only=True):
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeText(Tokenize, kw_only=True):
    prompt: str


class TokenizeChat(Tokenize, kw_only=True):
    messages: list[InputMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class Detokenize(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None
