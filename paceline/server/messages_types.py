"""The types of /v1/messages, Anthropic's API: blocks, the body of a request, the message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from paceline.errors import InvalidRequest, shown
from paceline.server.requests import GenerationBody, Int


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    text: str
    citations: list[Any] | UnsetType | None = UNSET


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    thinking: str
    signature: str = ""  # not checked


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | UnsetType | None = UNSET


class ToolReferenceBlock(msgspec.Struct, kw_only=True, tag="tool_reference"):
    """From now on the model sees this tool, which had `defer_loading`."""

    tool_name: str


ResultBlock = TextBlock | ToolReferenceBlock


class ToolResultBlock(msgspec.Struct, kw_only=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Message(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessageTool(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None
    # Newer clients send these. Arguments are streamed with or without the first.
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None
    defer_loading: bool | None = None  # not shown before a tool_reference names it
    allowed_callers: list[Literal["direct"]] | None = None


class AutoChoice(msgspec.Struct, kw_only=True, tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, kw_only=True, tag="any"):
    disable_parallel_tool_use: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True, tag="tool"):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoneChoice(msgspec.Struct, kw_only=True, tag="none"):
    pass


Choice = AutoChoice | AnyChoice | ToolChoice | NoneChoice


# Thinking is shown whole, or not at all.
Display = Literal["summarized", "updates", "omitted"]


class ThinkingEnabled(msgspec.Struct, kw_only=True, tag="enabled"):
    budget_tokens: Int | None = None  # a target, which changes nothing
    display: Display | None = None


class ThinkingAdaptive(msgspec.Struct, kw_only=True, tag="adaptive"):
    display: Display | None = None


class ThinkingDisabled(msgspec.Struct, kw_only=True, tag="disabled"):
    pass


Thinking = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled


class OutputSchema(msgspec.Struct, kw_only=True, tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: OutputSchema | None = None


_TEXT_ONLY = "this model reads text only"


class CountTokensRequest(GenerationBody, kw_only=True):
    """Fields of both routes."""

    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"metadata", "service_tier", "cache_control", "inference_geo", "user_profile_id"}
    )
    not_built: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
        "fallbacks": ([],),
    }
    hints: ClassVar[Mapping[str, str]] = {
        "stop": "Did you mean 'stop_sequences'?",
        "reasoning_effort": "Did you mean 'output_config.effort'?",
        "response_format": "Did you mean 'output_config.format'?",
    }
    advice: ClassVar[Mapping[str, str]] = {"content": _TEXT_ONLY, "system": _TEXT_ONLY}

    messages: list[Message]
    system: str | list[TextBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputSchema | None = None  # the older name of output_config.format
    context_management: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's

    @classmethod
    def check_parts(cls, raw: Mapping[str, Any]) -> None:
        tools = raw.get("tools")
        for i, tool in enumerate(tools if isinstance(tools, list) else ()):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if kind not in (None, "custom"):
                raise InvalidRequest(
                    f"tools[{i}].type {shown(kind)} is not supported; offer tools with an "
                    "input_schema, which the client runs.",
                    param=f"tools[{i}].type",
                )
        _check_context(raw.get("context_management"))


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    # vLLM's and ours, as in chat completions; top_k is Anthropic's too
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    priority: Int | None = None
    num_speculative_tokens: Int | None = None
    structured_outputs: dict[str, Any] | None = None


def _check_context(value: Any) -> None:
    """Refuse edits that would change the conversation. Keeping all thinking changes nothing."""
    edits = value.get("edits") if isinstance(value, dict) else []
    for i, edit in enumerate(edits if isinstance(edits, list) else ()):
        kind, keep = (edit.get("type"), edit.get("keep")) if isinstance(edit, dict) else (edit, "")
        if kind != "clear_thinking_20251015" or keep not in ("all", {"type": "all"}):
            raise InvalidRequest(
                f"context_management.edits[{i}]: {shown(kind)} is not supported; only "
                'clear_thinking_20251015 with keep "all" is.',
                param=f"context_management.edits[{i}]",
            )


# ---- replies


class MessagesUsage(msgspec.Struct, kw_only=True):
    """The prompt's tokens are the sum of the first three fields."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int


class MessageReply(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class CountTokensReply(msgspec.Struct):
    input_tokens: int
