"""The bodies of replies as types, in OpenAI's order of fields, and their encoding.

A field set to UNSET is left out; None is written as null.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

PromptLogprobs = list[dict[str, "PromptLogprob"] | None]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """Drafts count as predictions. Forced tokens, for which a grammar left no choice, are shown for
    requests with structured output."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    forced_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class SpecDecodeMetrics(msgspec.Struct, kw_only=True):
    """How the drafts of one request did. Names are vLLM's."""

    mean_acceptance_length: float  # tokens per step with drafts, the bonus token included
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # steps by the number of drafts that they accepted
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # most drafts of a step
    per_step_accepted: list[int] | UnsetType = UNSET
    per_step_drafted: list[int] | UnsetType = UNSET


class ReplyMetrics(msgspec.Struct):
    speculative_decoding: SpecDecodeMetrics


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """The legacy form: four lists of equal length."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str | None


class CalledFunction(msgspec.Struct, omit_defaults=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolCallChunk(msgspec.Struct, kw_only=True):
    """The first chunk of a call has its id, type and name; the others have more arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class TokenOrigin(msgspec.Struct):
    """An output token and where it came from: an accepted draft, an accepted draft for which a
    grammar left no other choice, or drawn from the model's distribution."""

    token: str
    source: Literal["draft", "forced", "drawn"]


class ChatMessage(msgspec.Struct, kw_only=True):
    """Reasoning has two names: vLLM's `reasoning` and DeepSeek's `reasoning_content`."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    token_sources: list[TokenOrigin] | UnsetType = UNSET


class ChatReply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    metrics: ReplyMetrics | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallChunk] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    token_sources: list[TokenOrigin] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    metrics: ReplyMetrics | UnsetType = UNSET


class TextChoice(msgspec.Struct, kw_only=True):
    text: str
    index: int
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    token_sources: list[TokenOrigin] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class TextReply(msgspec.Struct, kw_only=True):
    """Whole replies and chunks have the same fields; chunks have usage only on request."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: ReplyMetrics | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "paceline"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(msgspec.Struct, kw_only=True):
    vocab_size: int
    model_max_length: int
    bos_token_id: int | None
    eos_token_id: int | None
    special_tokens: dict[str, str]  # by name, such as eos_token
    all_special_ids: list[int]
    chat_template: str | dict[str, str] | None  # a dict if there are several


class Text(msgspec.Struct):
    prompt: str


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct):
    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicErrorDetail


_encoder = msgspec.json.Encoder()


def to_json(reply: Any) -> bytes:
    return _encoder.encode(reply)


def to_event(reply: Any) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % _encoder.encode(reply)


def to_named_event(name: str, reply: Any) -> bytes:
    """One server-sent event with its name, as Responses and Messages have them."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encoder.encode(reply))


DONE_EVENT = b"data: [DONE]\n\n"
PING_EVENT = b": waiting\n\n"  # a comment, which clients skip
