"""POST /v1/chat/completions. Owns the shape of chat replies and chunks, not how they travel."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import InvalidRequest
from paceline.server.body import read_request
from paceline.server.conversation import final_text, render
from paceline.server.generate import EventStream, answer
from paceline.server.job import Job, JobSpec, Piece
from paceline.server.logprobs import chat_logprobs, prompt_logprobs
from paceline.server.params import as_asked, chat_params, check_tables
from paceline.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    PromptLogprobs,
    Usage,
)
from paceline.server.requests import ChatRequest
from paceline.server.service import Client, Prompt, Service


class ChatEndpoint:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def post(self, request: Request) -> Response | EventStream:
        service = self._service
        client = service.client  # before the body is read: a server that cannot answer says so
        async with read_request(request, service, ChatRequest, num_sequences=1) as (asked, size):
            arrival_s = time.monotonic()
            model = service.resolve_model(asked.model)
            params = chat_params(asked, client.default_sampling)
            service.check_room(params.n)
            check_tables(params, params.n)
            text = await render(service, asked, size)
            spec = JobSpec(
                id=f"chatcmpl-{uuid4().hex}",
                model=model,
                created=int(time.time()),
                arrival_s=arrival_s,
                num_prompts=1,
                n=params.n,
                stream=bool(asked.stream),
                needs_prompt_logprobs=asked.prompt_logprobs is not None,
            )
            try:
                ids = await self._encode(client, text, bool(asked.add_special_tokens))
                job = service.submit(spec, [Prompt(ids, text)], params, asked.priority or 0)
            except InvalidRequest as error:
                raise as_asked(error, asked) from None
        shape = ChatShape(service, asked, final_text(asked) if asked.echo else "")
        asked.messages = []  # the prompt holds them; a stream may last for hours
        if spec.stream:
            return EventStream(service, job, shape, asked)
        return await answer(request, service, job, shape)

    async def _encode(self, client: Client, text: str, special: bool) -> list[int]:
        limit = client.info.max_model_len
        return await self._service.off_loop(
            len(text), lambda: client.tokenizer.encode_within(text, limit, special)
        )


@dataclass
class ChatShape:
    service: Service
    asked: ChatRequest
    echo: str  # the text of a message that is continued, when the reply repeats it
    begun: set[int] = field(default_factory=set)  # choices whose role was sent

    def reply(self, job: Job, pieces: list[Piece]) -> ChatReply:
        choices = [
            ChatChoice(
                index=piece.index,
                message=ChatMessage(content=self.echo + piece.text),
                logprobs=self._logprobs(piece),
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                token_ids=self._token_ids(piece),
            )
            for piece in pieces
        ]
        return ChatReply(
            **self._head(job),
            choices=choices,
            usage=job.usage(),
            prompt_logprobs=self._prompt_logprobs(job),
            prompt_token_ids=self._prompt_token_ids(job),
        )

    def chunks(self, job: Job, piece: Piece, usage: Usage | None) -> Iterator[ChatChunk]:
        """Role, then text, then the end: each in a chunk of its own."""
        choice = piece.index
        if choice not in self.begun:
            first = self._chunk(job, usage, index=choice, delta=ChatDelta("assistant", ""))
            if not self.begun:
                first.prompt_logprobs = self._prompt_logprobs(job)
                first.prompt_token_ids = self._prompt_token_ids(job)
            self.begun.add(choice)
            yield first
            if self.echo:
                yield self._chunk(job, usage, index=choice, delta=ChatDelta(content=self.echo))
        text = piece.text
        if text or (piece.token_ids and (self.asked.logprobs or self.asked.return_token_ids)):
            yield self._chunk(
                job,
                usage,
                index=choice,
                delta=ChatDelta(content=text),
                logprobs=self._logprobs(piece),
                token_ids=self._token_ids(piece),
            )
        if piece.finish_reason is not None:
            yield self._chunk(
                job,
                usage,
                index=choice,
                delta=ChatDelta(),
                finish_reason=piece.finish_reason,
                stop_reason=UNSET if piece.stop_reason is None else piece.stop_reason,
            )

    def usage_chunk(self, job: Job, usage: Usage) -> ChatChunk:
        return ChatChunk(**self._head(job), choices=[], usage=usage)

    def _chunk(self, job: Job, usage: Usage | None, **choice: Any) -> ChatChunk:
        options = self.asked.stream_options
        shows_usage = options is not None and options.include_usage
        return ChatChunk(
            **self._head(job),
            choices=[ChatChunkChoice(**choice)],
            usage=usage if shows_usage else UNSET,
        )

    def _head(self, job: Job) -> dict[str, Any]:
        spec = job.spec
        return {
            "id": spec.id,
            "created": spec.created,
            "model": spec.model,
            "system_fingerprint": self.service.fingerprint,
        }

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self.asked.logprobs:
            return None
        tokenizer, top = self.service.tokenizer, self.asked.top_logprobs or 0
        return chat_logprobs(tokenizer, piece.token_ids, piece.logprobs, top)

    def _token_ids(self, piece: Piece) -> list[int] | UnsetType:
        return piece.token_ids if self.asked.return_token_ids else UNSET

    def _prompt_token_ids(self, job: Job) -> list[int] | UnsetType:
        return job.generations[0].prompt_token_ids if self.asked.return_token_ids else UNSET

    def _prompt_logprobs(self, job: Job) -> PromptLogprobs | UnsetType | None:
        top, tables = self.asked.prompt_logprobs, job.prompt_logprobs[0]
        if top is None or tables is None:
            return UNSET
        return prompt_logprobs(tables, top)
