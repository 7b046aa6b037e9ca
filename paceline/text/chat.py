"""Messages to the prompt text that a model was trained on, by its Jinja template, sandboxed.

Knows no HTTP and no tokens. A template comes with a checkpoint: it may fail, never do harm.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from paceline.errors import ConfigError, InvalidRequest, cut, shown

if TYPE_CHECKING:
    from paceline.checkpoint.source import ModelFiles

Message = dict[str, Any]
# Renders messages with one template; empty when it refuses them.
_Draw = Callable[..., str]
_PROBE = "paceline-probe"
# The space behind the mark tells whether a template strips its messages.
_MARK = "paceline-continues-here "


def load_chat_template(files: ModelFiles, override: str | None = None) -> ChatTemplate:
    """The model's template, or `override`: a file's path or the template itself."""
    # Not above: the child of template_child renders without the readers of checkpoints.
    from paceline.checkpoint.tokenizer_config import NAMED_TOKENS, read_tokenizer_config

    config = read_tokenizer_config(files)
    named = {name: config.named[name] for name in NAMED_TOKENS if name in config.named}
    templates = dict(config.templates)
    if override is not None:
        templates = {"default": _read_override(override)}
    return ChatTemplate(files.name, templates, named)


class ChatTemplate:
    """Renders conversations. A model without a template is refused when one is rendered."""

    def __init__(self, model: str, templates: dict[str, str], named_tokens: dict[str, str]) -> None:
        self._model = model
        self.named_tokens = named_tokens
        self._environment = _environment()
        self._compiled = {name: self._compile(text) for name, text in templates.items()}
        self._traits: dict[tuple[str, str], bool] = {}

    @property
    def exists(self) -> bool:
        return bool(self._compiled)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt. `kwargs` reach the template as variables (chat_template_kwargs)."""
        _check(messages, add_generation_prompt, continue_final_message)
        name = self._pick(bool(tools))
        prepared = [self._prepare(name, message) for message in messages]
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
                "use completions with a prompt of your own.",
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

    def _prepare(self, name: str, message: Message) -> Message:
        """The message as the template can take it; the caller's is left as it is."""
        prepared = dict(message)
        content = prepared.get("content")
        if isinstance(content, list) and not self._has(name, _takes_parts):
            prepared["content"] = _joined(content)
        elif isinstance(content, str) and not self._has(name, _takes_text):
            prepared["content"] = [{"type": "text", "text": content}]
        if prepared["role"] == "developer" and not self._has(name, _knows_developer):
            prepared["role"] = "system"
        return prepared

    def _has(self, name: str, trait: Callable[[_Draw], bool]) -> bool:
        """Whether the template has a trait: found out once, by rendering what shows it."""
        key = (name, trait.__name__)
        if key not in self._traits:
            self._traits[key] = trait(self._draw(name))
        return self._traits[key]

    def _draw(self, name: str) -> _Draw:
        def draw(*messages: Message) -> str:
            try:
                return _render(self._compiled[name], messages, dict(self.named_tokens))
            except InvalidRequest:
                return ""

        return draw


def _check(
    messages: Sequence[Message], add_generation_prompt: bool, continue_final_message: bool
) -> None:
    if not messages:
        raise InvalidRequest("messages is empty; give at least one.", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"messages[{index}] has no role.", param="messages")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise InvalidRequest(
                f"messages[{index}].content must be text or a list of parts, got "
                f"{type(content).__name__}.",
                param="messages",
            )
        for part in content if isinstance(content, list) else ():
            _check_part(index, part)
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message continues the last message, add_generation_prompt begins a new "
            "one; set one of them to false.",
            param="continue_final_message",
        )
    if continue_final_message and not _final_text(messages):
        raise InvalidRequest(
            "continue_final_message needs text in the last message, and there is none.",
            param="continue_final_message",
        )


def _check_part(index: int, part: Any) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        found = shown(kind) if kind is not None else type(part).__name__
        raise InvalidRequest(
            f"messages[{index}] has a content part of type {found}; only text parts "
            '({"type": "text", "text": ...}) are supported.',
            param="messages",
        )


def _final_text(messages: Sequence[Message]) -> str:
    content = messages[-1].get("content")
    return _joined(content) if isinstance(content, list) else str(content or "")


def _joined(parts: Sequence[dict[str, Any]]) -> str:
    return "".join(str(part["text"]) for part in parts)


def _mark_end(message: Message) -> None:
    """Put a mark behind the text that is to be continued: text itself may occur anywhere."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _MARK
    else:
        parts = [dict(part) for part in content]
        parts[-1]["text"] += _MARK
        message["content"] = parts


def _cut_at_mark(text: str) -> str:
    """Everything before the mark; what closes the message is behind it."""
    at = text.rfind(_MARK.rstrip())
    if at < 0:
        raise InvalidRequest(
            "this model's chat template does not show the last message, so it cannot be continued.",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


def _render(
    template: jinja2.Template, messages: Sequence[Message], variables: dict[str, Any]
) -> str:
    variables.setdefault("add_generation_prompt", False)
    try:
        return template.render(messages=list(messages), **variables)
    except (InvalidRequest, MemoryError):
        raise
    except Exception as error:  # whatever a template does with odd messages is the request's fault
        reason = cut(str(error) or type(error).__name__)
        raise InvalidRequest(
            f"the chat template cannot render these messages: {reason}", param="messages"
        ) from None


def _takes_parts(draw: _Draw) -> bool:
    """Whether the template walks over content parts itself."""
    text = draw({"role": "user", "content": [{"type": "text", "text": _PROBE}]})
    # A template that prints the list as Python or JSON does not understand it.
    return _PROBE in text and "'type'" not in text and '"type"' not in text


def _takes_text(draw: _Draw) -> bool:
    """Whether the template shows content that is text; some know nothing but parts."""
    shown = _PROBE in draw({"role": "user", "content": _PROBE})
    return shown or not _takes_parts(draw)


def _knows_developer(draw: _Draw) -> bool:
    """Whether the template gives the role `developer` a meaning of its own."""
    user = {"role": "user", "content": "hi"}
    developer = draw({"role": "developer", "content": _PROBE}, user)
    stranger = draw({"role": "no-such-role", "content": _PROBE}, user)
    # A template that prints any role's name knows none of them.
    return _PROBE in developer and developer != stranger.replace("no-such-role", "developer")


def _read_override(override: str) -> str:
    """A template is told from a path by its braces."""
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
    # Jinja's own filter escapes for HTML, which no model was trained on.
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
    """`{% generation %}` marks the assistant's text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  # the name that jinja2 looks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
