"""Writes the replies and the events of /v1/responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from paceline.request import SamplingParams
from paceline.server import responses_types as wire
from paceline.server.blocks import Block, BlockFormat, BlockKind
from paceline.server.failures import Failure, GenerationFailed
from paceline.server.job import Job
from paceline.server.replies import PING_EVENT, to_named_event
from paceline.server.responses_input import new_id, seal
from paceline.server.service import Service
from paceline.text.output_parts import OutputParser

# By kind: how ids begin, what events of their text are called, the type of a content part.
_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
_TEXTS = {
    BlockKind.REASONING: "reasoning_text",
    BlockKind.TEXT: "output_text",
    BlockKind.CALL: "function_call_arguments",
}
_PARTS = {BlockKind.REASONING: wire.ReasoningText, BlockKind.TEXT: wire.OutputText}


@dataclass(frozen=True)
class RequestEcho:
    """What a reply repeats of its request, and whose it is in the store."""

    body: wire.ResponsesRequest
    tools: Sequence[wire.OfferedTool]  # those that the model was told of
    items: Sequence[wire.Item]  # the whole input
    namespaced: dict[str, tuple[str, str]]  # full name of a function -> its namespace and name
    is_stored: bool
    owner: bytes  # see response_store
    params: SamplingParams


class ResponsesFormat(BlockFormat):
    def __init__(
        self, service: Service, echo: RequestEcho, make_parser: Callable[[], OutputParser]
    ) -> None:
        super().__init__(make_parser)
        self._service = service
        self._store = service.responses
        self._echo = echo
        self._ids: list[str] = []  # of the output items
        self._number = 0  # of the next event
        self._job: Job | None = None
        self._is_cancelled = False
        self._is_kept = echo.is_stored
        include = echo.body.include or ()
        self._seals_reasoning = "reasoning.encrypted_content" in include

    # ---- the response object

    def whole(self, job: Job) -> wire.Response:
        self._job = job
        return self._stored(self._finished())

    def current(self) -> wire.Response:
        """The response as far as it has come."""
        return self._response("cancelled" if self._is_cancelled else "in_progress")

    def cancel(self) -> wire.Response:
        """End a stream that still runs."""
        assert self._job is not None
        self._is_cancelled = True
        self._job.fail(GenerationFailed("The response was cancelled."))
        self._service.end(self._job)
        return self.current()

    def discard(self) -> None:
        """The stream goes on, but the response is not stored at its end."""
        self._is_kept = False
        self._unregister()

    def _finished(self) -> wire.Response:
        if self.finish_reason == "length":
            return self._response(
                "incomplete", incomplete_details=wire.IncompleteDetails("max_output_tokens")
            )
        return self._response("completed", completed_at=int(time.time()))

    def _response(self, status: Any, **fields: Any) -> wire.Response:
        assert self._job is not None
        body, params, spec = self._echo.body, self._echo.params, self._job.spec
        if status != "in_progress":
            fields["usage"] = self._usage(self._job)
        return wire.Response(
            id=spec.id,
            created_at=spec.created,
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=spec.model,
            output=[self._item(b, is_over=status != "in_progress") for b in self.blocks],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=body.reasoning or wire.ReasoningOptions(),
            store=self._echo.is_stored,
            temperature=params.temperature,
            text=wire.TextOptions(format=(body.text and body.text.format) or wire.TextFormat()),
            tool_choice=body.tool_choice or "auto",
            tools=list(self._echo.tools),
            top_p=params.top_p,
            metadata=body.metadata or {},
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            prompt_cache_key=body.prompt_cache_key,
            safety_identifier=body.safety_identifier,
            user=body.user,
            **fields,
        )

    def _item(self, block: Block, *, is_over: bool = False) -> wire.OutputItem:
        """The block as far as it has come. `is_over`: no more of it will come."""
        if block.index == len(self._ids):
            self._ids.append(new_id(_PREFIXES[block.kind]))
        item_id, text, status = self._ids[block.index], block.text, _status_of(block, is_over)
        if block.call is not None:
            name = block.call.name or ""
            namespace, name = self._echo.namespaced.get(name, (UNSET, name))
            return wire.FunctionCallItem(
                id=item_id,
                call_id=block.call.id,
                name=name,
                namespace=namespace,
                arguments=text,
                status=status,
            )
        is_begun = status != "in_progress" or bool(text)
        if block.kind is BlockKind.TEXT:
            parts = [wire.OutputText(text=text)] if is_begun else []
            return wire.MessageItem(
                id=item_id, role="assistant", content=list(parts), status=status
            )
        sealed = seal(text) if self._seals_reasoning and block.is_closed else UNSET
        return wire.ReasoningItem(
            id=item_id,
            content=[wire.ReasoningText(text=text)] if is_begun else [],
            encrypted_content=sealed,
            status=status,
        )

    def _usage(self, job: Job) -> wire.ResponsesUsage:
        used = job.usage()
        return wire.ResponsesUsage(
            input_tokens=used.prompt_tokens,
            input_tokens_details=wire.InputTokensDetails(used.prompt_tokens_details.cached_tokens),
            output_tokens=used.completion_tokens,
            output_tokens_details=wire.OutputTokensDetails(self.num_reasoning_tokens),
            total_tokens=used.total_tokens,
        )

    def _stored(self, response: wire.Response) -> wire.Response:
        if self._is_kept:
            self._store.put(response, self._echo.items, self._echo.owner)
        self._unregister()
        return response

    def _unregister(self) -> None:
        """Remove it from the streams that are running."""
        assert self._job is not None
        self._store.live.pop((self._echo.owner, self._job.spec.id), None)

    # ---- events

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return to_named_event(kind, {"type": kind, "sequence_number": number, **fields})

    def begin(self, job: Job) -> bytes:
        self._job = job
        if self._echo.is_stored:
            self._store.live[self._echo.owner, job.spec.id] = self
        response = self.current()
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def open_block(self, block: Block) -> bytes:
        item = self._item(block)
        event = self._event("response.output_item.added", output_index=block.index, item=item)
        return event + self._part_event("added", block)

    def extend_block(self, block: Block, text: str) -> bytes:
        return self._text_event("delta", block, delta=text)

    def close_block(self, block: Block) -> bytes:
        item, whole = self._item(block), {"text": block.text}
        if isinstance(item, wire.FunctionCallItem):
            whole = {"name": item.name, "arguments": item.arguments}
        done = self._text_event("done", block, **whole) + self._part_event("done", block)
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def last_events(self, job: Job) -> bytes:
        response = self._stored(self._finished())
        return self._event(f"response.{response.status}", response=response)

    def error_events(self, failure: Failure) -> bytes:
        if self._is_cancelled:
            return self._event("response.incomplete", response=self._stored(self.current()))
        detail = failure.detail
        code = "invalid_prompt" if failure.status == 400 else "server_error"
        response = self._response("failed", error=wire.ResponseError(code, detail.message))
        return self._event(
            "error", code=detail.code, message=detail.message, param=detail.param
        ) + self._event("response.failed", response=self._stored(response))

    def ping(self) -> bytes:
        return PING_EVENT

    def _text_event(self, what: str, block: Block, **fields: Any) -> bytes:
        if block.kind is BlockKind.TEXT:
            fields["logprobs"] = []
        return self._event(f"response.{_TEXTS[block.kind]}.{what}", **self._place(block), **fields)

    def _part_event(self, what: str, block: Block) -> bytes:
        """Calls have no parts."""
        if block.kind is BlockKind.CALL:
            return b""
        part = _PARTS[block.kind](text=block.text)
        return self._event(f"response.content_part.{what}", **self._place(block), part=part)

    def _place(self, block: Block) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._ids[block.index], "output_index": block.index}
        return place if block.kind is BlockKind.CALL else {**place, "content_index": 0}


def _status_of(block: Block, is_over: bool) -> wire.Status:
    if block.is_cut or (is_over and not block.is_closed):
        return "incomplete"
    return "completed" if block.is_closed else "in_progress"
