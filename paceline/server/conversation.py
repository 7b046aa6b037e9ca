"""The prompt of a request with messages, by the server's chat template or the request's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import InvalidRequest
from paceline.server.fields import check_inner_names
from paceline.server.requests import InputMessage, TemplatedRequest
from paceline.server.service import Service
from paceline.text.messages import TEXT_PARTS, message_text, template_messages
from paceline.text.template_child import render_in_child

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
            size, lambda: template.render(checked_messages(request.messages), **arguments)
        )
    if not service.options.trust_request_chat_template:
        raise InvalidRequest(
            "chat_template in a request is not trusted by this server; start it with "
            "--trust-request-chat-template or --chat-template FILE.",
            param="chat_template",
        )
    if "{" not in own:
        raise InvalidRequest("chat_template is not a Jinja template.", param="chat_template")
    messages = await service.off_loop(size, lambda: checked_messages(request.messages))
    return await service.in_template_thread(
        lambda: render_in_child(own, template.named_tokens, messages, arguments)
    )


def checked_messages(messages: Sequence[InputMessage]) -> list[dict[str, Any]]:
    """The messages as `ChatTemplate.render` takes them. Refuses fields that a template would not
    show; `render` checks the rest."""
    return [_checked(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked(message: InputMessage, where: str) -> dict[str, Any]:
    for name, advice in _REFUSED.items():
        if getattr(message, name):
            raise InvalidRequest(
                f"{name!r} in a message is not supported; {advice}.", param=f"{where}.{name}"
            )
    for i, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if isinstance(part, dict) and (key := TEXT_PARTS.get(str(part.get("type")))):
            check_inner_names(part, ("type", key), f"{where}.content[{i}]")
    names = (name for name in message.__struct_fields__ if name not in _REFUSED)
    return {name: value for name in names if (value := getattr(message, name)) is not None}


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
    return message_text(template_messages(checked_messages(request.messages[-1:]))[0])
