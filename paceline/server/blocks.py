"""The output of one choice as a sequence of blocks: reasoning, text, tool calls.

Responses and Messages write each block with a beginning, deltas and an end. One block is open at a
time. The same blocks make the whole reply.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from paceline.server.failures import Failure
from paceline.server.job import ChoiceDelta, Job
from paceline.text.output_parts import OutputParser, OutputParts, ToolCallDelta


class BlockKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    kind: BlockKind
    index: int  # in the reply
    call: ToolCallDelta | None = None  # the first delta of a call: its id and name
    texts: list[str] = field(default_factory=list)
    is_closed: bool = False
    is_cut: bool = False  # max_tokens ended the output inside it

    @property
    def text(self) -> str:
        """Of a call: its arguments as JSON text."""
        return "".join(self.texts)


class BlockFormat(ABC):
    """A ReplyFormat for one choice. Subclasses write events and the whole reply."""

    def __init__(self, make_parser: Callable[[], OutputParser]) -> None:
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None  # when the output has ended
        self.stop_reason: int | str | None = None
        self._parser = make_parser()
        self._blank = ""  # white space that is text only if more text follows
        self._has_begun = False

    @property
    def has_tool_calls(self) -> bool:
        return self._parser.has_tool_calls

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parser.num_reasoning_tokens

    # ---- what an API writes

    @abstractmethod
    def whole(self, job: Job) -> Any:
        """The whole reply."""

    @abstractmethod
    def begin(self, job: Job) -> bytes:
        """Events before the first block."""

    @abstractmethod
    def open_block(self, block: Block) -> bytes: ...

    @abstractmethod
    def extend_block(self, block: Block, text: str) -> bytes: ...

    @abstractmethod
    def close_block(self, block: Block) -> bytes: ...

    @abstractmethod
    def last_events(self, job: Job) -> bytes: ...

    @abstractmethod
    def error_events(self, failure: Failure) -> bytes: ...

    @abstractmethod
    def ping(self) -> bytes: ...

    # ---- ReplyFormat

    def reply(self, job: Job, deltas: list[ChoiceDelta]) -> Any:
        for delta in deltas:
            for _ in self._take(delta):
                pass
        return self.whole(job)

    def events(self, job: Job, delta: ChoiceDelta) -> Iterator[bytes]:
        yield self._beginning(job)
        yield from self._take(delta)

    def ping_events(self, job: Job) -> bytes:
        return self._beginning(job) + self.ping()

    # ---- parts to blocks

    def _beginning(self, job: Job) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return self.begin(job)

    def _take(self, delta: ChoiceDelta) -> Iterator[bytes]:
        yield from self._add(self._parser.feed(delta.text, delta.token_ids))
        if delta.finish_reason is None:
            return
        yield from self._add(self._parser.finish())
        if self._blank and not self.blocks:
            yield from self._text(BlockKind.TEXT, self._blank)
        yield from self._close(is_cut=delta.finish_reason == "length")
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def _add(self, parts: OutputParts) -> Iterator[bytes]:
        if parts.reasoning:
            yield from self._text(BlockKind.REASONING, parts.reasoning)
        if parts.content:
            text = self._blank + parts.content
            is_open = bool(self._open and self._open.kind is BlockKind.TEXT)
            # Models put line breaks between their reasoning and a call; they are no block.
            self._blank = "" if is_open or text.strip() else text
            if not self._blank:
                yield from self._text(BlockKind.TEXT, text)
        for call in parts.tool_calls:
            yield from self._call(call)

    @property
    def _open(self) -> Block | None:
        return self.blocks[-1] if self.blocks and not self.blocks[-1].is_closed else None

    def _text(self, kind: BlockKind, text: str) -> Iterator[bytes]:
        block = self._open
        if block is None or block.kind is not kind:
            yield from self._begin_block(kind, None)
        yield from self._extend(text)

    def _call(self, call: ToolCallDelta) -> Iterator[bytes]:
        block = self._open
        if block is None or block.call is None or block.call.index != call.index:
            yield from self._begin_block(BlockKind.CALL, call)
        if call.arguments:
            yield from self._extend(call.arguments)

    def _begin_block(self, kind: BlockKind, call: ToolCallDelta | None) -> Iterator[bytes]:
        yield from self._close()
        self._blank = ""
        self.blocks.append(Block(kind, len(self.blocks), call))
        yield self.open_block(self.blocks[-1])

    def _extend(self, text: str) -> Iterator[bytes]:
        block = self.blocks[-1]
        block.texts.append(text)
        yield self.extend_block(block, text)

    def _close(self, *, is_cut: bool = False) -> Iterator[bytes]:
        block = self._open
        if block is not None:
            block.is_closed, block.is_cut = True, is_cut
            yield self.close_block(block)
