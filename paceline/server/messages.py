"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from paceline.server import messages_types as wire
from paceline.server.as_chat import TranslatedEndpoint
from paceline.server.blocks import Block, BlockFormat, BlockKind
from paceline.server.failures import Failure
from paceline.server.generate import CheckedRequest, json_response
from paceline.server.job import Job
from paceline.server.messages_input import translate
from paceline.server.replies import to_named_event
from paceline.server.service import Client
from paceline.text.output_parts import OutputParser

if TYPE_CHECKING:
    from starlette.requests import Request

# Clients send a thinking block back only if it has one. It is not checked.
_SIGNATURE = "unsigned"


class MessagesEndpoint(TranslatedEndpoint[wire.CountTokensRequest]):
    body_type = wire.MessagesRequest
    id_prefix = "msg_"

    async def check(
        self, client: Client, body: wire.CountTokensRequest, size: int, owner: bytes
    ) -> CheckedRequest:
        checked, _ = await self.check_as_chat(client, size, owner, lambda: translate(body))
        shows_thinking = getattr(body.thinking, "display", None) != "omitted"
        body.messages = []  # the prompt holds them, and a stream may last for hours
        reply_format = MessagesFormat(checked.make_parser, shows_thinking=shows_thinking)
        return replace(checked, reply_format=reply_format)

    async def count_tokens(self, request: Request) -> Response:
        return json_response(
            wire.CountTokensReply(await self.count(request, wire.CountTokensRequest))
        )


class MessagesFormat(BlockFormat):
    def __init__(self, make_parser: Callable[[], OutputParser], *, shows_thinking: bool) -> None:
        super().__init__(make_parser)
        self._shows_thinking = shows_thinking  # else its blocks are empty, as at Anthropic

    def whole(self, job: Job) -> wire.MessageReply:
        reply = _empty(job)
        reply.content = [self._content(block) for block in self.blocks]
        reply.stop_reason, reply.stop_sequence = self._stop()
        return reply

    def begin(self, job: Job) -> bytes:
        return _event("message_start", message=_empty(job))

    def open_block(self, block: Block) -> bytes:
        return _event("content_block_start", index=block.index, content_block=self._content(block))

    def _content(self, block: Block) -> wire.OutputBlock:
        """The block as far as it has come."""
        if block.call is not None:
            called, arguments = block.call, _arguments(block.text)
            return wire.ToolUseBlock(id=called.id, name=called.name or "", input=arguments)
        if block.kind is BlockKind.TEXT:
            return wire.TextBlock(text=block.text)
        signature = _SIGNATURE if block.is_closed else ""
        return wire.ThinkingBlock(
            thinking=block.text if self._shows_thinking else "", signature=signature
        )

    def extend_block(self, block: Block, text: str) -> bytes:
        if block.kind is BlockKind.CALL:
            delta = {"type": "input_json_delta", "partial_json": text}
        elif block.kind is BlockKind.TEXT:
            delta = {"type": "text_delta", "text": text}
        elif self._shows_thinking:
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            return b""
        return _event("content_block_delta", index=block.index, delta=delta)

    def close_block(self, block: Block) -> bytes:
        signature = b""
        if block.kind is BlockKind.REASONING:
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            signature = _event("content_block_delta", index=block.index, delta=delta)
        return signature + _event("content_block_stop", index=block.index)

    def last_events(self, job: Job) -> bytes:
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        last = _event("message_delta", delta=delta, usage=_usage(job))
        return last + _event("message_stop")

    def error_events(self, failure: Failure) -> bytes:
        return to_named_event("error", failure.anthropic_reply)

    def ping(self) -> bytes:
        return _event("ping")

    def _stop(self) -> tuple[Any, str | None]:
        """The stop reason, and the stop sequence that was found."""
        if self.finish_reason == "length":
            return "max_tokens", None
        if isinstance(self.stop_reason, str):
            return "stop_sequence", self.stop_reason
        return "tool_use" if self.has_tool_calls else "end_turn", None


def _event(kind: str, **fields: Any) -> bytes:
    return to_named_event(kind, {"type": kind, **fields})


def _empty(job: Job) -> wire.MessageReply:
    """The message before its first block."""
    spec = job.spec
    return wire.MessageReply(id=spec.id, model=spec.model, content=[], usage=_usage(job))


def _usage(job: Job) -> wire.MessagesUsage:
    used = job.usage()
    cached = used.prompt_tokens_details.cached_tokens
    return wire.MessagesUsage(
        input_tokens=used.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=used.completion_tokens,
    )


def _arguments(text: str) -> dict[str, Any]:
    """{} if the output was cut inside the call."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
