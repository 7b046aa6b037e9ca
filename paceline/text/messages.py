"""Checks the messages of a conversation, and brings them into the form that chat templates read.

An error gives the path of what is wrong. No part is dropped: a text model cannot read an image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import InvalidRequest, shown

TemplateMessage = dict[str, Any]
# Type of a content part -> the key that holds its text.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[TemplateMessage]:
    """The content of each message is text, a list of text parts, or None beside tool calls."""
    if not messages:
        raise InvalidRequest("messages is empty; give at least one.", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def message_text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _message(message: Mapping[str, Any], where: str) -> TemplateMessage:
    role, calls = message.get("role"), message.get("tool_calls")
    if not isinstance(role, str):
        raise InvalidRequest(f"{where} has no role.", param=f"{where}.role")
    read = {key: value for key, value in message.items() if key not in ("refusal", "tool_calls")}
    read["content"] = _content(message, where)
    if calls and role != "assistant":
        raise InvalidRequest(
            f"A message of role {role!r} makes no tool calls.", param=f"{where}.tool_calls"
        )
    if calls:
        read["tool_calls"] = [_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return read


def _content(message: Mapping[str, Any], where: str) -> str | list[dict[str, str]] | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        return [{"type": "text", "text": text} for text in texts]
    if content is not None:
        raise InvalidRequest(
            f"{where}.content must be text or a list of parts, got {type(content).__name__}.",
            param=f"{where}.content",
        )
    if isinstance(message.get("refusal"), str):  # an answer of OpenAI's API that has no content
        return str(message["refusal"])
    if message.get("tool_calls"):
        return None  # some templates look for a message without content
    if message["role"] == "assistant" and (
        message.get("reasoning") or message.get("reasoning_content")
    ):
        return ""
    raise InvalidRequest("A message needs content.", param=f"{where}.content")


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise InvalidRequest(
            f"A content part of type {shown(kind)} is not supported; this model reads text only.",
            param=f"{where}.type",
        )
    if not isinstance(text := part.get(key), str):
        raise InvalidRequest(
            f"A part of type {kind!r} needs {key!r}: a string.", param=f"{where}.{key}"
        )
    return text


def _call(call: Any, where: str) -> dict[str, Any]:
    """An earlier call. ChatTemplate converts its arguments to what the template reads."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
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
