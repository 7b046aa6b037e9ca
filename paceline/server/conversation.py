"""Messages of a chat request to the messages that a chat template renders.

No part is dropped: a part that a text model cannot read is refused, and the error gives its path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import InvalidRequest, shown
from paceline.server.fields import check_echoed
from paceline.server.requests import InputMessage, TemplatedRequest
from paceline.server.service import Service
from paceline.text.template_child import render_in_child
from paceline.text.tool_messages import message_text

# Type of a content part -> the key that holds its text.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Fields of messages that are not supported -> what to do.
_REFUSED = {"function_call": "send tool_calls", "audio": "leave it out"}
# Variables that the request sets, so chat_template_kwargs may not.
_RESERVED = ("self", "messages", "tools", "add_generation_prompt", "continue_final_message")


async def render(
    service: Service, request: TemplatedRequest, size: int, variables: Mapping[str, Any]
) -> str:
    """The prompt of a body of `size` bytes, by the server's template or the request's.

    `variables` reach the template too, unless chat_template_kwargs has them.
    """
    arguments = {**variables, **template_arguments(request)}
    template = service.chat_template
    own = request.chat_template
    if own is None:
        return await service.off_loop(
            size, lambda: template.render(template_messages(request.messages), **arguments)
        )
    if not service.options.trust_request_chat_template:
        raise InvalidRequest(
            "chat_template in a request is not trusted by this server; start it with "
            "--trust-request-chat-template or --chat-template FILE.",
            param="chat_template",
        )
    if "{" not in own:
        raise InvalidRequest("chat_template is not a Jinja template.", param="chat_template")
    messages = await service.off_loop(size, lambda: template_messages(request.messages))
    return await service.in_template_thread(
        lambda: render_in_child(own, template.named_tokens, messages, arguments)
    )


def template_messages(messages: Sequence[InputMessage]) -> list[dict[str, Any]]:
    """As `ChatTemplate.render` takes them: content is text or a list of text parts."""
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def template_arguments(request: TemplatedRequest) -> dict[str, Any]:
    """Keyword arguments of `ChatTemplate.render`."""
    continues = bool(request.continue_final_message)
    extra = dict(request.chat_template_kwargs or {})
    for name in _RESERVED:
        if name in extra:
            raise InvalidRequest(
                f"chat_template_kwargs may not contain {name!r}; Paceline sets it.",
                param=f"chat_template_kwargs.{name}",
            )
    asked = request.add_generation_prompt
    return {
        **extra,
        "add_generation_prompt": (not continues) if asked is None else asked,
        "continue_final_message": continues,
    }


def final_text(request: TemplatedRequest) -> str:
    """The text of the last message, which `echo` repeats if it is continued."""
    return message_text(template_messages(request.messages[-1:])[0])


def _template_message(message: InputMessage, where: str) -> dict[str, Any]:
    for name, advice in _REFUSED.items():
        if getattr(message, name):
            raise InvalidRequest(
                f"{name!r} in a message is not supported; {advice}.", param=f"{where}.{name}"
            )
    rendered: dict[str, Any] = {"role": message.role, "content": _content(message, where)}
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            rendered[name] = getattr(message, name)
    if message.tool_calls:
        if message.role != "assistant":
            raise InvalidRequest(
                f"A message of role {message.role!r} makes no tool calls.",
                param=f"{where}.tool_calls",
            )
        calls = enumerate(message.tool_calls)
        rendered["tool_calls"] = [_call(c, f"{where}.tool_calls[{i}]") for i, c in calls]
    reasoning = (
        message.reasoning if message.reasoning_content is None else message.reasoning_content
    )
    if reasoning is not None:
        rendered["reasoning_content"] = reasoning
    return rendered


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """An earlier call. ChatTemplate converts its arguments to what the template reads."""
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequest("A tool call needs 'function': an object.", param=f"{where}.function")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        raise InvalidRequest("A tool call needs a name.", param=f"{where}.function.name")
    if not isinstance(arguments, str | dict | None):
        raise InvalidRequest(
            "The arguments of a tool call are a string of JSON.",
            param=f"{where}.function.arguments",
        )
    kept = {key: call[key] for key in ("id", "index") if isinstance(call.get(key), str | int)}
    return {**kept, "type": "function", "function": {"name": name, "arguments": arguments}}


def _content(message: InputMessage, where: str) -> str | list[dict[str, str]] | None:
    content = message.content
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [_part(p, f"{where}.content[{i}]") for i, p in enumerate(content)]
        return [{"type": "text", "text": text} for text in texts]
    if message.refusal is not None:  # an assistant message of OpenAI's API that has no content
        return message.refusal
    if message.tool_calls:
        return None  # some templates look for a message without content
    if message.role == "assistant" and (message.reasoning or message.reasoning_content):
        return ""
    raise InvalidRequest("A message needs content.", param=f"{where}.content")


def _part(part: str | Mapping[str, Any], where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise InvalidRequest(
            f"A content part of type {shown(kind)} is not supported; this model reads text only.",
            param=f"{where}.type",
        )
    check_echoed(part, ("type", key), where)
    text = part.get(key)
    if not isinstance(text, str):
        raise InvalidRequest(
            f"A part of type {kind!r} needs {key!r}: a string.", param=f"{where}.{key}"
        )
    return text
