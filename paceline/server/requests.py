"""The bodies of requests as types. Owns names and JSON types; ranges are SamplingParams' business.

A field that is absent or null is None: it then follows the model's or OpenAI's default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

import msgspec

# Integers past 64 bits are refused here, by name, before anything tries to print or pack them.
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding of chunks; ours never have any


class GenerateFields(msgspec.Struct, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # OpenAI's sampling
    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Int, float] | None = None
    max_tokens: Int | None = None
    stop: str | list[str] | None = None
    seed: Int | None = None
    # vLLM's
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[TokenId] | None = None
    prompt_logprobs: Int | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    priority: Int | None = None
    return_token_ids: bool | None = None
    logits_processors: list[str] | None = None
    # ours
    extra_args: dict[str, Any] | None = None
    num_speculative_tokens: Int | None = None


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation. Parts of `content` are checked where they are read."""

    role: Role
    content: str | list[str | dict[str, Any]] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same by its newer name
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class Templated(Protocol):
    """A request whose messages become a prompt. (msgspec types have one base at most.)"""

    messages: list[Message]
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None


class ChatRequest(GenerateFields, kw_only=True):
    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None


class CompletionRequest(GenerateFields, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Int | None = None


class TokenizeText(msgspec.Struct, kw_only=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(msgspec.Struct, kw_only=True):
    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Detokenize(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None
