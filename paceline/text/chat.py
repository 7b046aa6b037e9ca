"""Renders messages to a prompt with the model's Jinja chat template, in a sandbox.

A template comes with a checkpoint and is not trusted. Its errors become InvalidRequest.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from paceline.errors import ConfigError, InvalidRequest, cut
from paceline.text.messages import TemplateMessage, message_text, template_messages
from paceline.text.response_formats import REASONING_FIELDS, syntax_in
from paceline.text.tool_messages import (
    as_plain_messages,
    has_tool_messages,
    with_arguments,
    with_described_tools,
)

if TYPE_CHECKING:
    from paceline.checkpoint.source import ModelFiles

# Renders messages with one template; an empty string if the template refuses them.
_Render = Callable[..., str]
_PROBE = "paceline-probe"
_PROBE_TOOL = {"name": _PROBE, "description": "", "parameters": {"type": "object"}}
_ARGUMENTS: tuple[Any, ...] = ({"key": _PROBE}, json.dumps({"key": _PROBE}))
_PROBE_CALL = {"id": "call12345", "type": "function"}
# The space after the mark shows whether a template strips its messages.
_MARK = "paceline-continues-here "


def load_chat_template(files: ModelFiles, override: str | None = None) -> ChatTemplate:
    """The model's template, or `override`: the path of a file or the text of a template."""
    # Imported here: the child process of template_child starts faster without it.
    from paceline.checkpoint.tokenizer_config import NAMED_TOKENS, read_tokenizer_config

    config = read_tokenizer_config(files)
    named = {name: config.named[name] for name in NAMED_TOKENS if name in config.named}
    templates = dict(config.templates)
    if override is not None:
        templates = {"default": _read_override(override)}
    return ChatTemplate(files.name, templates, named, config.response_template)


class ChatTemplate:
    """Renders conversations. `render` raises InvalidRequest if the model has no template."""

    def __init__(
        self,
        model: str,
        templates: dict[str, str],
        named_tokens: dict[str, str],
        response_template: dict[str, Any] | None = None,
    ) -> None:
        self._model = model
        self.texts = templates  # by name; `default` or `tool_use` if there is more than one
        self.response_template = response_template  # how to read answers, if the tokenizer says it
        self.named_tokens = named_tokens
        self._environment = _environment()
        self._compiled = {name: self._compile(text) for name, text in templates.items()}
        self._traits: dict[tuple[str, str], bool] = {}

    @property
    def exists(self) -> bool:
        return bool(self._compiled)

    @property
    def text_with_tools(self) -> str:
        """The text of the template that renders requests with tools; empty if there is none."""
        return self.texts[self._pick(has_tools=True)] if self.exists else ""

    @property
    def knows_tools(self) -> bool:
        """Whether the model's template shows tools or calls, in the format of its training."""
        if not self.exists:
            return False
        name = self._pick(has_tools=True)
        return self._has(name, _shows_tools) or self._has(name, _shows_calls)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt. `kwargs` reach the template as variables (chat_template_kwargs)."""
        talk = template_messages(messages)
        _check_continued(talk, add_generation_prompt, continue_final_message)
        name = self._pick(bool(tools))
        if (tools or has_tool_messages(talk)) and not self._has(name, _shows_tools):
            knows_calls = self._has(name, _shows_calls)
            rewrite = with_described_tools if knows_calls else as_plain_messages
            syntax = syntax_in(self.texts[name] if knows_calls else "")
            talk, tools = rewrite(talk, tools, syntax), None
        ordered = self._with_early_system(name, talk)
        prepared = [self._prepare(name, message) for message in ordered]
        if continue_final_message:
            _mark_end(prepared[-1])
        variables = {
            **self.named_tokens,
            "tools": tools,
            "documents": None,
            **kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        text = _render(self._compiled[name], prepared, variables)
        return _cut_at_mark(text) if continue_final_message else text

    def _compile(self, text: str) -> jinja2.Template:
        try:
            return self._environment.from_string(text)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            where = f" in line {line}" if line else ""
            raise ConfigError(
                f"the chat template of {self._model} is not valid Jinja{where}: {cut(str(error))}. "
                "Give another with --chat-template."
            ) from None

    def _pick(self, has_tools: bool) -> str:
        """The name of the template to use."""
        if not self._compiled:
            raise InvalidRequest(
                f"{self._model} has no chat template. Start Paceline with --chat-template FILE, or "
                "send a prompt to completions.",
                param="messages",
            )
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in self._compiled:
                return name
        if len(self._compiled) == 1:
            return next(iter(self._compiled))
        raise InvalidRequest(
            f"{self._model} has several chat templates ({', '.join(sorted(self._compiled))}) and "
            "no default; give one with --chat-template.",
            param="messages",
        )

    def _prepare(self, name: str, message: TemplateMessage) -> TemplateMessage:
        """A copy of the message in a form that the template supports."""
        prepared = dict(message)
        content = prepared.get("content")
        if isinstance(content, list) and not self._has(name, _takes_parts):
            prepared["content"] = message_text(message)
        elif isinstance(content, str) and not self._has(name, _takes_text):
            prepared["content"] = [{"type": "text", "text": content}]
        if prepared["role"] == "developer" and not self._has(name, _knows_developer):
            prepared["role"] = "system"
        reasoning = next((v for key in REASONING_FIELDS if (v := prepared.get(key))), None)
        if reasoning is not None:  # under the names that templates read, as in transformers
            prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
        if prepared.get("tool_calls"):
            if content is None and not self._has(name, _takes_no_content):
                prepared["content"] = ""
            as_objects = self._has(name, _takes_argument_objects)
            prepared = with_arguments(prepared, as_objects=as_objects)
        return prepared

    def _with_early_system(
        self, name: str, messages: Sequence[TemplateMessage]
    ) -> Sequence[TemplateMessage]:
        """For a template that takes one system message, at the beginning: the first ones become
        one, and later ones become the user's. Agents send several, also in mid-conversation."""
        roles = {"system"} if self._has(name, _knows_developer) else {"system", "developer"}
        if not any(message["role"] in roles for message in messages[1:]):
            return messages
        if self._has(name, _takes_late_system):
            return messages
        first = list(takewhile(lambda message: message["role"] in roles, messages))
        rest = [
            {**message, "role": "user"} if message["role"] in roles else message
            for message in messages[len(first) :]
        ]
        whole = "\n\n".join(map(message_text, first))
        return [{"role": "system", "content": whole}, *rest] if first else rest

    def _has(self, name: str, trait: Callable[[_Render], bool]) -> bool:
        """Whether the template has a trait, found by a test rendering. The result is cached."""
        key = (name, trait.__name__)
        if key not in self._traits:
            self._traits[key] = trait(self._renderer(name))
        return self._traits[key]

    def _renderer(self, name: str) -> _Render:
        def render(*messages: TemplateMessage, **variables: Any) -> str:
            try:
                return _render(self._compiled[name], messages, {**self.named_tokens, **variables})
            except InvalidRequest:
                return ""

        return render


def _check_continued(
    messages: Sequence[TemplateMessage], add_generation_prompt: bool, continue_final_message: bool
) -> None:
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message continues the last message, add_generation_prompt begins a new "
            "one; set one of them to false.",
            param="continue_final_message",
        )
    if continue_final_message and not message_text(messages[-1]):
        raise InvalidRequest(
            "continue_final_message needs text in the last message, and there is none.",
            param="continue_final_message",
        )


def _mark_end(message: TemplateMessage) -> None:
    """Append a mark to the text to continue, because the same text may occur elsewhere."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _MARK
    else:
        parts = [dict(part) for part in content]
        parts[-1]["text"] += _MARK
        message["content"] = parts


def _cut_at_mark(text: str) -> str:
    """The text before the mark. The text after it closes the message."""
    at = text.rfind(_MARK.rstrip())
    if at < 0:
        raise InvalidRequest(
            "this model's chat template does not show the last message, so it cannot be continued.",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


def _render(
    template: jinja2.Template, messages: Sequence[TemplateMessage], variables: dict[str, Any]
) -> str:
    variables.setdefault("add_generation_prompt", False)
    try:
        return template.render(messages=list(messages), **variables)
    except (InvalidRequest, MemoryError):
        raise
    except Exception as error:  # a template may raise anything for unexpected messages
        reason = cut(str(error) or type(error).__name__)
        raise InvalidRequest(
            f"the chat template cannot render these messages: {reason}", param="messages"
        ) from None


def _takes_parts(render: _Render) -> bool:
    """Whether the template iterates over content parts."""
    text = render({"role": "user", "content": [{"type": "text", "text": _PROBE}]})
    # A template that prints the list as Python or JSON does not support parts.
    return _PROBE in text and "'type'" not in text and '"type"' not in text


def _takes_text(render: _Render) -> bool:
    """Whether the template shows text content; some show only content parts."""
    shown = _PROBE in render({"role": "user", "content": _PROBE})
    return shown or not _takes_parts(render)


def _takes_late_system(render: _Render) -> bool:
    """Whether the template shows a second system message, and one after the user's."""
    system, user = {"role": "system", "content": "be"}, {"role": "user", "content": "hi"}
    late = {"role": "system", "content": _PROBE}
    return _PROBE in render(system, late, user) and _PROBE in render(system, user, late)


def _knows_developer(render: _Render) -> bool:
    """Whether the template treats the role `developer` differently from an unknown role."""
    user = {"role": "user", "content": "hi"}
    developer = render({"role": "developer", "content": _PROBE}, user)
    unknown = render({"role": "no-such-role", "content": _PROBE}, user)
    # A template that prints the name of any role does not know this one.
    return _PROBE in developer and developer != unknown.replace("no-such-role", "developer")


def _shows_tools(render: _Render) -> bool:
    user = {"role": "user", "content": "hi"}
    return _PROBE in render(user, tools=[{"type": "function", "function": _PROBE_TOOL}])


def _takes_argument_objects(render: _Render) -> bool:
    """Whether the arguments of calls may be objects; some templates join them to text."""
    return _shows_call(render, {"key": _PROBE})


def _shows_calls(render: _Render) -> bool:
    return any(_shows_call(render, given) for given in _ARGUMENTS)


def _takes_no_content(render: _Render) -> bool:
    """Whether a message with calls may have no content; some templates print `None` then."""
    each = (_with_call(render, given, None) for given in _ARGUMENTS)
    return any(_PROBE in text and "None" not in text for text in each)


def _shows_call(render: _Render, arguments: Any) -> bool:
    return any(_PROBE in _with_call(render, arguments, content) for content in (None, ""))


def _with_call(render: _Render, arguments: Any, content: str | None) -> str:
    calls = [{**_PROBE_CALL, "function": {"name": "f", "arguments": arguments}}]
    return render(
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "content": "x", "tool_call_id": _PROBE_CALL["id"]},
    )


def _read_override(override: str) -> str:
    """Text with braces or newlines is a template; other text is a path."""
    if "{" in override or "\n" in override:
        return override
    try:
        return Path(override).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {override!r} is neither a file that can be read ({error}) nor a "
            "Jinja template."
        ) from None


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationTag],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's filter escapes HTML characters; models were not trained on that.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    reason = cut(str(message))
    raise InvalidRequest(f"the chat template refuses these messages: {reason}", param="messages")


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training. Only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012  # the name that jinja2 looks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
