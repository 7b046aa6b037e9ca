"""POST /v1/completions: text or token ids in, text out. Also `echo`, which repeats the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET

from paceline.errors import InvalidRequest
from paceline.server.generate import CheckedRequest, GenerationEndpoint
from paceline.server.job import ChoiceDelta, Job
from paceline.server.logprobs import TextTokens
from paceline.server.openai_format import ChunkUsage, OpenAIFormat
from paceline.server.params import check_table_sizes, completion_params
from paceline.server.replies import TextChoice, TextLogprobs, TextReply
from paceline.server.requests import CompletionRequest
from paceline.server.service import Client, Service, TokenizedPrompt

MAX_PROMPTS = 4096


class CompletionEndpoint(GenerationEndpoint[CompletionRequest]):
    body_type = CompletionRequest
    id_prefix = "cmpl-"

    async def check(
        self, client: Client, body: CompletionRequest, size: int, owner: bytes
    ) -> CheckedRequest:
        service = self._service
        params = completion_params(body, client.default_sampling)
        if body.logprobs is not None or body.return_token_sources:
            client.tokenizer  # noqa: B018  # they show tokens as text: raises without one
        given = await service.off_loop(size, lambda: split_prompts(body.prompt))
        service.check_room(len(given) * params.n)
        check_table_sizes(params, len(given) * params.n)
        prompts = await service.off_loop(size, lambda: _tokenize(client, body, given))
        body.prompt = ""  # a stream may last for hours
        reply_format = CompletionFormat(service, body, prompts)
        prompt_only = bool(body.echo) and body.max_tokens == 0
        return CheckedRequest(prompts, params, reply_format, body.priority or 0, prompt_only)


def _tokenize(
    client: Client, body: CompletionRequest, given: Sequence[str | list[int]]
) -> list[TokenizedPrompt]:
    special = body.add_special_tokens is not False
    limit = client.info.max_model_len
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            ids = client.tokenizer.encode_within(prompt, limit, special)
            prompts.append(TokenizedPrompt(ids, prompt))
        else:
            text = None
            if body.echo and len(prompt) < limit:  # a longer prompt is refused later
                text = client.tokenizer.decode(prompt, skip_special_tokens=False)
            prompts.append(TokenizedPrompt(prompt, text))
    return prompts


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


class CompletionFormat(OpenAIFormat[CompletionRequest]):
    chunk_type = TextReply

    def __init__(
        self, service: Service, body: CompletionRequest, prompts: Sequence[TokenizedPrompt]
    ) -> None:
        super().__init__(service, body, shows_logprobs=body.logprobs is not None)
        self._prompts = prompts
        self._tokens: dict[int, TextTokens] = {}  # by choice, if the request asks for logprobs

    def reply(self, job: Job, deltas: list[ChoiceDelta]) -> TextReply:
        choices = []
        for delta in deltas:
            choice = self._prompt_part(job, delta.index)
            choice.text += delta.text
            choice.logprobs = self._logprobs(delta, choice.logprobs)
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason
            self._show_tokens(choice, delta)
            choices.append(choice)
        metrics = self._metrics(job)
        return TextReply(**self._head(job), choices=choices, usage=job.usage(), metrics=metrics)

    def chunks(self, job: Job, delta: ChoiceDelta, usage: ChunkUsage) -> Iterator[TextReply]:
        """The echoed prompt, then text, then the finish reason: each in its own chunk."""
        index = delta.index
        if index not in self._begun:
            self._begun.add(index)
            first = self._prompt_part(job, index)
            extras = (first.prompt_logprobs, first.prompt_token_ids)
            if first.text or first.logprobs or any(extra is not UNSET for extra in extras):
                yield self._chunk(job, usage, first)
        if delta.text or (self._shows_tokens and delta.token_ids):  # tokens may have no text yet
            choice = TextChoice(text=delta.text, index=index, logprobs=self._logprobs(delta))
            self._show_tokens(choice, delta)
            yield self._chunk(job, usage, choice)
        if delta.finish_reason is not None:
            last = TextChoice(text="", index=index, finish_reason=delta.finish_reason)
            if delta.stop_reason is not None:
                last.stop_reason = delta.stop_reason
            yield self._chunk(job, usage, last)

    def _prompt_part(self, job: Job, index: int) -> TextChoice:
        """What a choice shows of its prompt."""
        body, prompt_idx = self._body, index // job.spec.n
        echo = (self._prompts[prompt_idx].text or "") if body.echo else ""
        shown = TextChoice(
            text=echo,
            index=index,
            prompt_token_ids=self._prompt_token_ids(job, prompt_idx),
            prompt_logprobs=self._prompt_logprobs(job, prompt_idx),
        )
        if body.logprobs is not None:
            skips = body.skip_special_tokens is not False
            tokens = TextTokens(self._service.tokenizer, body.logprobs, skip_special_tokens=skips)
            self._tokens[index] = tokens
            tables = job.prompt_logprobs[prompt_idx]
            if body.echo and tables is not None:
                ids = job.generations[prompt_idx].prompt_token_ids
                shown.logprobs = tokens.prompt(echo, ids, tables)
        return shown

    def _logprobs(
        self, delta: ChoiceDelta, prompt: TextLogprobs | None = None
    ) -> TextLogprobs | None:
        tokens = self._tokens.get(delta.index)
        if tokens is None:
            return None
        return tokens.output(delta.token_ids, delta.logprobs, prompt)
