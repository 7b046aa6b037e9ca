"""Messages of a chat request to what a template renders. Owns roles and content parts.

Never tokenises, and never drops a part: what a text model cannot read is refused by its path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import InvalidRequest, shown
from paceline.server.fields import check_echoed
from paceline.server.requests import Message, Templated
from paceline.server.service import Service
from paceline.text.template_child import render_apart

# Kinds of content parts -> the key that holds their text.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# What a template gets from the request itself, and so not through chat_template_kwargs.
_OWN_NAMES = ("self", "messages", "tools", "add_generation_prompt", "continue_final_message")


async def render(service: Service, request: Templated, size: int) -> str:
    """The prompt of a conversation of `size` bytes, by the server's template or the request's."""
    arguments = template_arguments(request)
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
    return await service.apart(
        lambda: render_apart(own, template.named_tokens, messages, arguments)
    )


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As `ChatTemplate.render` takes them: content is text or a list of text parts."""
    if not messages:
        raise InvalidRequest("messages is empty; send at least one.", param="messages")
    return [_one(message, f"messages[{i}]") for i, message in enumerate(messages)]


def template_arguments(request: Templated) -> dict[str, Any]:
    """Keyword arguments of `ChatTemplate.render`, checked against each other."""
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other; send one.",
            param="continue_final_message",
        )
    extra = dict(request.chat_template_kwargs or {})
    for name in _OWN_NAMES:
        if name in extra:
            raise InvalidRequest(
                f"chat_template_kwargs may not hold {name!r}; it is set by the request itself.",
                param=f"chat_template_kwargs.{name}",
            )
    asked = request.add_generation_prompt
    return {
        **extra,
        "add_generation_prompt": (not continues) if asked is None else asked,
        "continue_final_message": continues,
    }


def final_text(request: Templated) -> str:
    """The text of the last message, which `echo` shows again when it is continued."""
    content = template_messages(request.messages[-1:])[0]["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _one(message: Message, where: str) -> dict[str, Any]:
    if message.role in ("tool", "function"):
        raise InvalidRequest(
            f"Messages of role {message.role!r} need tools, which are not supported.",
            param=f"{where}.role",
        )
    for name in ("tool_calls", "function_call", "audio", "tool_call_id"):
        if getattr(message, name):
            raise InvalidRequest(
                f"{name!r} in a message is not supported; leave it out.",
                param=f"{where}.{name}",
            )
    rendered: dict[str, Any] = {"role": message.role, "content": _content(message, where)}
    if message.name is not None:
        rendered["name"] = message.name
    reasoning = (
        message.reasoning if message.reasoning_content is None else message.reasoning_content
    )
    if reasoning is not None:
        rendered["reasoning_content"] = reasoning
    return rendered


def _content(message: Message, where: str) -> str | list[dict[str, str]]:
    content = message.content
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [_part(p, f"{where}.content[{i}]") for i, p in enumerate(content)]
        return [{"type": "text", "text": text} for text in texts]
    if message.refusal is not None:  # an assistant turn that OpenAI's model declined
        return message.refusal
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
