"""POST /v1/chat/completions: checks chat requests, and writes their replies and chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import UNSET

from paceline.server import replies as wire
from paceline.server.conversation import final_text, render
from paceline.server.generate import CheckedRequest, GenerationEndpoint
from paceline.server.job import ChoiceDelta, Job
from paceline.server.logprobs import chat_logprobs
from paceline.server.openai_format import ChunkUsage, OpenAIFormat
from paceline.server.params import chat_params, check_table_sizes
from paceline.server.requests import ChatRequest
from paceline.server.service import Client, Service, TokenizedPrompt
from paceline.server.tools import (
    ToolUse,
    check_callable,
    constrained,
    grammar_start,
    parser_factory,
    read_tool_use,
)
from paceline.text.output_parts import OutputParser, OutputParts

# Names that chat templates give to the switch of thinking.
_THINKING_SWITCHES = ("enable_thinking", "thinking")


class ChatEndpoint(GenerationEndpoint[ChatRequest]):
    body_type = ChatRequest
    id_prefix = "chatcmpl-"

    async def check(
        self, client: Client, body: ChatRequest, size: int, owner: bytes
    ) -> CheckedRequest:
        service = self._service
        params = chat_params(body, client.default_sampling)
        service.check_room(params.n)
        check_table_sizes(params, params.n)
        use = read_tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
        layout = await service.response_format(with_tools=use.choice != "none")
        check_callable(use, layout, service.why_no_calls, service.options)
        text = await render(service, body, size, self._variables(body, use))
        limit, special = client.info.max_model_len, bool(body.add_special_tokens)
        ids = await service.off_loop(
            len(text), lambda: client.tokenizer.encode_within(text, limit, special)
        )
        begins = grammar_start(layout, client.tokenizer, text, is_off=_thinking_is_off(body))
        params = constrained(params, use, layout, client.tokenizer, begins)
        make_parser = parser_factory(layout, use, text, client.tokenizer, streams=bool(body.stream))
        echo = final_text(body) if body.echo else ""
        reply_format = ChatFormat(service, body, echo, make_parser)
        # The prompt holds them, and a stream may last for hours.
        body.messages, body.tools = [], None if body.tools is None else []
        return CheckedRequest(
            prompts=[TokenizedPrompt(ids, text)],
            params=params,
            reply_format=reply_format,
            priority=body.priority or 0,
            make_parser=make_parser,
        )

    def _variables(self, body: ChatRequest, use: ToolUse) -> dict[str, Any]:
        """What the chat template gets besides messages."""
        hides = self._service.options.exclude_tools_when_tool_choice_none
        variables: dict[str, Any] = {"tools": use.shown(hide_if_none=hides)}
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == "none":
            variables |= dict.fromkeys(_THINKING_SWITCHES, False)
        return variables

    def field_names(self, body: ChatRequest) -> Mapping[str, str]:
        names = {**super().field_names(body), "logprobs": "top_logprobs", "prompt": "messages"}
        asks_itself = body.response_format is not None or body.structured_outputs is not None
        forces_calls = body.tool_choice not in (None, "auto", "none")
        if body.tools is not None and (forces_calls or not asks_itself):
            names["structured_outputs"] = "tools"  # whose schemas become the grammar
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names


def _thinking_is_off(body: ChatRequest) -> bool:
    """Whether the request switches thinking off; the prompt may not show it."""
    kwargs = body.chat_template_kwargs or {}
    given = [kwargs[name] for name in _THINKING_SWITCHES if name in kwargs]
    return not any(given) if given else body.reasoning_effort == "none"


class ChatFormat(OpenAIFormat[ChatRequest]):
    chunk_type = wire.ChatChunk

    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        echo: str,
        make_parser: Callable[[], OutputParser],
    ) -> None:
        super().__init__(service, body, shows_logprobs=bool(body.logprobs))
        self._echo = echo  # the text of a continued message, if the reply repeats it
        self._parsers: defaultdict[int, OutputParser] = defaultdict(make_parser)  # by choice
        self._shows_reasoning = body.include_reasoning is not False

    def reply(self, job: Job, deltas: list[ChoiceDelta]) -> wire.ChatReply:
        choices = []
        for delta in deltas:
            choice = wire.ChatChoice(
                index=delta.index,
                message=self._message(self._parts(delta)),
                logprobs=self._logprobs(delta),
                finish_reason=self._finish_reason(delta),
                stop_reason=delta.stop_reason,
            )
            self._show_tokens(choice, delta)
            choices.append(choice)
        return wire.ChatReply(
            **self._head(job),
            choices=choices,
            usage=self._usage(job),
            metrics=self._metrics(job),
            prompt_logprobs=self._prompt_logprobs(job),
            prompt_token_ids=self._prompt_token_ids(job),
        )

    def _message(self, parts: OutputParts) -> wire.ChatMessage:
        calls = [
            wire.ToolCall(id=call.id, function=wire.CalledFunction(call.name or "", call.arguments))
            for call in parts.whole_calls()
        ]
        content = self._echo + parts.content
        is_empty = not content and bool(calls or parts.reasoning)
        reasoning = parts.reasoning if parts.reasoning and self._shows_reasoning else UNSET
        return wire.ChatMessage(
            content=None if is_empty else content,
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=calls or UNSET,
        )

    def _parts(self, delta: ChoiceDelta) -> OutputParts:
        """The new output of a choice, sorted. Call it once for each delta."""
        parser = self._parsers[delta.index]
        parts = parser.feed(delta.text, delta.token_ids)
        if delta.finish_reason is not None:
            parts.add(parser.finish())
        return parts

    def _finish_reason(self, delta: ChoiceDelta) -> str | None:
        """`tool_calls` in place of `stop` if the choice has made a call."""
        has_calls = delta.finish_reason == "stop" and self._parsers[delta.index].has_tool_calls
        return "tool_calls" if has_calls else delta.finish_reason

    def _usage(self, job: Job) -> wire.Usage:
        used = job.usage()
        reasoning = sum(parser.num_reasoning_tokens for parser in self._parsers.values())
        used.completion_tokens_details.reasoning_tokens = reasoning
        return used

    def chunks(self, job: Job, delta: ChoiceDelta, usage: ChunkUsage) -> Iterator[wire.ChatChunk]:
        """The role, then the parts of the output, then the finish reason: each in its own chunk."""
        contents = list(self._contents(delta))

        def chunk(content: wire.ChatDelta, **fields: Any) -> wire.ChatChunk:
            choice = wire.ChatChunkChoice(index=delta.index, delta=content, **fields)
            made: wire.ChatChunk = self._chunk(job, usage, choice)
            return made

        if delta.index not in self._begun:
            first = chunk(wire.ChatDelta("assistant", ""))
            if not self._begun:
                first.prompt_logprobs = self._prompt_logprobs(job)
                first.prompt_token_ids = self._prompt_token_ids(job)
            self._begun.add(delta.index)
            yield first
            if self._echo:
                yield chunk(wire.ChatDelta(content=self._echo))
        for i, content in enumerate(contents):
            made = chunk(content)
            if i == 0:  # the tokens of all of them
                made.choices[0].logprobs = self._logprobs(delta)
                self._show_tokens(made.choices[0], delta)
            yield made
        if delta.finish_reason is not None:
            stop_reason = UNSET if delta.stop_reason is None else delta.stop_reason
            reason = self._finish_reason(delta)
            yield chunk(wire.ChatDelta(), finish_reason=reason, stop_reason=stop_reason)

    def _contents(self, delta: ChoiceDelta) -> Iterator[wire.ChatDelta]:
        """What the chunks of new output hold. Tokens without text yet may need an empty one."""
        parts = self._parts(delta)
        shows_tokens = self._shows_tokens and delta.token_ids
        has_reasoning = bool(parts.reasoning) and self._shows_reasoning
        if has_reasoning:
            yield wire.ChatDelta(reasoning=parts.reasoning, reasoning_content=parts.reasoning)
        is_due = shows_tokens and not (has_reasoning or parts.tool_calls)
        if parts.content or is_due:
            yield wire.ChatDelta(content=parts.content)
        for call in parts.tool_calls:
            if call.name is not None:
                function = wire.CalledFunction(call.name, "")
                begun = wire.ToolCallChunk(
                    index=call.index, id=call.id, type="function", function=function
                )
                yield wire.ChatDelta(tool_calls=[begun])
            if call.arguments:
                more = wire.CalledFunction(arguments=call.arguments)
                yield wire.ChatDelta(
                    tool_calls=[wire.ToolCallChunk(index=call.index, function=more)]
                )

    def _logprobs(self, delta: ChoiceDelta) -> wire.ChatLogprobs | None:
        if not self._shows_logprobs:
            return None
        tokenizer, top = self._service.tokenizer, self._body.top_logprobs or 0
        return chat_logprobs(tokenizer, delta.token_ids, delta.logprobs, top)
