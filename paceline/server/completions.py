"""POST /v1/completions: text or token ids in, text out. Owns the legacy shapes and `echo`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import InvalidRequest
from paceline.server.body import read_request
from paceline.server.generate import EventStream, answer
from paceline.server.job import Job, JobSpec, Piece
from paceline.server.logprobs import TextTokens, prompt_logprobs
from paceline.server.params import check_tables, completion_params, scores_prompt_only
from paceline.server.replies import PromptLogprobs, TextChoice, TextLogprobs, TextReply, Usage
from paceline.server.requests import CompletionRequest
from paceline.server.service import Client, Prompt, Service

MAX_PROMPTS = 4096


class CompletionEndpoint:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def post(self, request: Request) -> Response | EventStream:
        service = self._service
        client = service.client  # before the body is read: a server that cannot answer says so
        async with read_request(request, service, CompletionRequest, num_sequences=1) as (
            asked,
            size,
        ):
            arrival_s = time.monotonic()
            model = service.resolve_model(asked.model)
            params = completion_params(asked, client.default_sampling)
            if asked.logprobs is not None:
                client.tokenizer  # noqa: B018  # they show tokens as text: raises without one
            given = await service.off_loop(size, lambda: split_prompts(asked.prompt))
            service.check_room(len(given) * params.n)
            check_tables(params, len(given) * params.n)
            prompts = await self._prompts(client, asked, given, size)
            asked.prompt = ""  # a stream may last for hours
            spec = JobSpec(
                id=f"cmpl-{uuid4().hex}",
                model=model,
                created=int(time.time()),
                arrival_s=arrival_s,
                num_prompts=len(prompts),
                n=params.n,
                stream=bool(asked.stream),
                needs_prompt_logprobs=params.prompt_logprobs is not None,
                prompt_only=scores_prompt_only(asked),
            )
            job = service.submit(spec, prompts, params, asked.priority or 0)
        shape = TextShape(service, asked, prompts)
        if spec.stream:
            return EventStream(service, job, shape, asked)
        return await answer(request, service, job, shape)

    async def _prompts(
        self,
        client: Client,
        asked: CompletionRequest,
        given: Sequence[str | list[int]],
        size: int,
    ) -> list[Prompt]:
        special = True if asked.add_special_tokens is None else asked.add_special_tokens
        limit = client.info.max_model_len

        def work() -> list[Prompt]:
            prompts = []
            for prompt in given:
                if isinstance(prompt, str):
                    ids = client.tokenizer.encode_within(prompt, limit, special)
                    prompts.append(Prompt(ids, prompt))
                else:
                    text = None
                    if asked.echo and len(prompt) < limit:  # else it is refused
                        text = client.tokenizer.decode(prompt, skip_special_tokens=False)
                    prompts.append(Prompt(prompt, text))
            return prompts

        return await self._service.off_loop(size, work)


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """OpenAI's four forms: a string, token ids, strings, lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is empty; send text or token ids.", param="prompt")
    kinds = {type(p) for p in prompt}
    if kinds == {int}:
        return [[p for p in prompt if isinstance(p, int)]]
    if len(kinds) > 1:
        raise InvalidRequest(
            "prompt mixes strings, token ids and lists; send one kind of them.", param="prompt"
        )
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt has {len(prompt)} entries; at most {MAX_PROMPTS} fit one request.",
            param="prompt",
        )
    return [p for p in prompt if not isinstance(p, int)]


class TextShape:
    def __init__(
        self, service: Service, asked: CompletionRequest, prompts: Sequence[Prompt]
    ) -> None:
        self._service = service
        self._asked = asked
        self._prompts = prompts
        self._begun: set[int] = set()  # choices that have had their first piece
        self._tokens: dict[int, TextTokens] = {}  # by choice, when logprobs are asked for

    def reply(self, job: Job, pieces: list[Piece]) -> TextReply:
        choices = []
        for piece in pieces:
            first = self._first(job, piece.index)
            logprobs = _joined(first.logprobs, self._logprobs(piece))
            first.text += piece.text
            first.logprobs = logprobs
            first.finish_reason = piece.finish_reason
            first.stop_reason = piece.stop_reason
            if self._asked.return_token_ids:
                first.token_ids = piece.token_ids
            choices.append(first)
        return TextReply(**self._head(job), choices=choices, usage=job.usage())

    def chunks(self, job: Job, piece: Piece, usage: Usage | None) -> Iterator[TextReply]:
        """The echoed prompt, then text, then the end: each in a chunk of its own."""
        asked = self._asked
        choice, text = piece.index, piece.text
        if choice not in self._begun:
            self._begun.add(choice)
            first = self._first(job, choice)
            extras = (first.prompt_logprobs, first.prompt_token_ids)
            if first.text or first.logprobs or any(extra is not UNSET for extra in extras):
                yield self._chunk(job, usage, first)
        if text or (piece.token_ids and (asked.logprobs is not None or asked.return_token_ids)):
            chunk = TextChoice(text=text, index=choice, logprobs=self._logprobs(piece))
            if asked.return_token_ids:
                chunk.token_ids = piece.token_ids
            yield self._chunk(job, usage, chunk)
        if piece.finish_reason is not None:
            last = TextChoice(text="", index=choice, finish_reason=piece.finish_reason)
            if piece.stop_reason is not None:
                last.stop_reason = piece.stop_reason
            yield self._chunk(job, usage, last)

    def usage_chunk(self, job: Job, usage: Usage) -> TextReply:
        return TextReply(**self._head(job), choices=[], usage=usage)

    def _first(self, job: Job, choice: int) -> TextChoice:
        """What a choice shows of its prompt."""
        asked, at = self._asked, choice // job.spec.n
        generation = job.generations[at]
        echo = (self._prompts[at].text or "") if asked.echo else ""
        shown = TextChoice(text=echo, index=choice)
        if asked.logprobs is not None:
            skips = asked.skip_special_tokens is not False
            tokens = TextTokens(self._service.tokenizer, asked.logprobs, skip_special_tokens=skips)
            self._tokens[choice] = tokens
            tables = job.prompt_logprobs[at]
            if asked.echo and tables is not None:
                shown.logprobs = tokens.prompt(echo, generation.prompt_token_ids, tables)
        shown.prompt_logprobs = self._prompt_logprobs(job, at)
        if asked.return_token_ids:
            shown.prompt_token_ids = generation.prompt_token_ids
        return shown

    def _chunk(self, job: Job, usage: Usage | None, choice: TextChoice) -> TextReply:
        options = self._asked.stream_options
        shows_usage = options is not None and options.include_usage
        return TextReply(**self._head(job), choices=[choice], usage=usage if shows_usage else UNSET)

    def _head(self, job: Job) -> dict[str, Any]:
        spec = job.spec
        return {
            "id": spec.id,
            "created": spec.created,
            "model": spec.model,
            "system_fingerprint": self._service.fingerprint,
        }

    def _logprobs(self, piece: Piece) -> TextLogprobs | None:
        tokens = self._tokens.get(piece.index)
        return tokens.output(piece.token_ids, piece.logprobs) if tokens is not None else None

    def _prompt_logprobs(self, job: Job, at: int) -> PromptLogprobs | UnsetType | None:
        top, tables = self._asked.prompt_logprobs, job.prompt_logprobs[at]
        if top is None or tables is None:
            return UNSET
        return prompt_logprobs(tables, top)


def _joined(first: TextLogprobs | None, second: TextLogprobs | None) -> TextLogprobs | None:
    if first is None or second is None:
        return first or second
    return TextLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )
