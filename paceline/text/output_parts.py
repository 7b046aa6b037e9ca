"""What a model's text holds: reasoning, content and tool calls, as parsers hand them out.

Plain data and the parser protocol. No parser for a model, no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class ToolCallDelta:
    """New text of one tool call."""

    index: int  # of the call in its message
    id: str
    name: str | None  # only in the first delta of a call
    arguments: str  # more of the JSON text


@dataclass(slots=True)
class OutputParts:
    """New output, sorted by what it is."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def add(self, more: OutputParts) -> None:
        self.reasoning += more.reasoning
        self.content += more.content
        self.tool_calls += more.tool_calls

    def whole_calls(self) -> list[ToolCallDelta]:
        """The calls with their deltas joined."""
        calls: dict[int, ToolCallDelta] = {}
        for delta in self.tool_calls:
            call = calls.setdefault(delta.index, ToolCallDelta(delta.index, delta.id, "", ""))
            call.name = (call.name or "") + (delta.name or "")
            call.arguments += delta.arguments
        return list(calls.values())


class OutputParser(Protocol):
    """Sorts the text of one choice as it arrives. A delta may hold any number of tokens."""

    def feed(self, text: str, token_ids: Sequence[int]) -> OutputParts:
        """Take new text. Text that may be the beginning of a marker is held back."""

    def finish(self) -> OutputParts:
        """The output has ended: hand out what was held back."""

    @property
    def has_tool_calls(self) -> bool:
        """Whether a whole call was handed out, which makes the finish reason `tool_calls`."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens so far between the markers of reasoning."""


class PlainParser:
    """All text is content."""

    has_tool_calls = False
    num_reasoning_tokens = 0

    def feed(self, text: str, token_ids: Sequence[int]) -> OutputParts:
        return OutputParts(content=text)

    def finish(self) -> OutputParts:
        return OutputParts()
