"""The bodies of requests as types: field names and JSON types. SamplingParams checks ranges.

A field that is absent or null is None and takes the model's or OpenAI's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol

import msgspec

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


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding of chunks, which Paceline does not add


class GenerationBody(msgspec.Struct, kw_only=True):
    """Fields of every API that generates."""

    # Names that are accepted and change no token, and names that are not supported with the values
    # that ask for nothing. None: those of `fields.NOT_BUILT`.
    without_effect: ClassVar[frozenset[str]] = WITHOUT_EFFECT
    not_built: ClassVar[Mapping[str, tuple[Any, ...]] | None] = None
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


class GenerateFields(SampledBody, kw_only=True):
    """Fields of both chat and text completions."""

    stream_options: StreamOptions | None = None
    # OpenAI's sampling
    n: Int | None = None
    logit_bias: dict[Int, float] | None = None
    max_tokens: Int | None = None
    # vLLM's sampling
    min_tokens: Int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[TokenId] | None = None
    prompt_logprobs: Int | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    logits_processors: list[str] | None = None
    # Structured output: OpenAI's field and vLLM's. `structured.py` reads them.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    # Paceline's
    return_token_sources: bool | None = None
    extra_args: dict[str, Any] | None = None
    speculative: dict[str, Any] | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation. `conversation.py` checks the parts of `content`."""

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


class CompletionRequest(GenerateFields, kw_only=True):
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
