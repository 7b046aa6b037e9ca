"""A body of /v1/responses to the chat request that it means."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import uuid4

from msgspec import UNSET, UnsetType

from paceline.errors import InvalidRequest
from paceline.server import as_chat
from paceline.server import responses_types as wire

_ID_PREFIXES = {
    wire.MessageItem: "msg",
    wire.FunctionCallItem: "fc",
    wire.FunctionOutputItem: "fco",
}
# What `encrypted_content` begins with. The text is only encoded: the client has it anyway.
_SEALED = "paceline:"


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"


def own_items(
    body: wire.ResponsesRequest, find: Callable[[str], wire.Item | None]
) -> list[wire.Item]:
    """The items of this request, each with an id and a status, as the store lists them."""
    given: Sequence[wire.InputItem]
    if isinstance(body.input, str):
        given = [wire.MessageItem(role="user", content=body.input)]
    else:
        given = body.input or []
    items = []
    for i, item in enumerate(given):
        if isinstance(item, wire.ItemReference):
            found = find(item.id)
            if found is None:
                raise InvalidRequest(
                    f"input[{i}].id: there is no stored item {item.id!r}; send the item itself.",
                    param=f"input[{i}].id",
                )
            items.append(found)
            continue
        if item.id is UNSET or item.id is None:
            item.id = new_id(_ID_PREFIXES.get(type(item), "rs"))
        item.status = item.status or "completed"
        if isinstance(item, wire.MessageItem) and isinstance(item.content, str):
            kind = wire.OutputText if item.role == "assistant" else wire.InputText
            item.content = [kind(text=item.content)]
        items.append(item)
    return items


def translate(
    body: wire.ResponsesRequest, history: Sequence[wire.Item], own: Sequence[wire.Item]
) -> as_chat.Translated:
    conversation = as_chat.Conversation()
    if body.instructions is not None:
        conversation.add("instructions", role="system", content=body.instructions)
    for item in history:
        _add_item(conversation, item, "previous_response_id")
    for i, item in enumerate(own):
        _add_item(conversation, item, f"input[{i}]")
    if not history and not own:
        raise InvalidRequest("'input' is missing or empty; send text or items.", param="input")
    raw = {"messages": conversation.messages, **as_chat.shared_fields(body)}
    names = conversation.names()
    names |= {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"}
    if body.max_output_tokens is not None:
        raw["max_tokens"] = body.max_output_tokens
    functions = list(_functions(body.tools or ()))
    if functions:
        raw["tools"] = [tool for _, tool, _ in functions]
        names |= {f"tools[{i}].function": place for i, (place, _, _) in enumerate(functions)}
        names |= {f"tools[{i}]": place for i, (place, _, _) in enumerate(functions)}
    _add_choices(body, raw)
    names |= as_chat.names_of_options(raw, form="text.format", effort="reasoning.effort")
    namespaced = {tool["function"]["name"]: space for _, tool, space in functions if space}
    return as_chat.Translated(raw, names, namespaced)


def _add_choices(body: wire.ResponsesRequest, raw: dict[str, Any]) -> None:
    choice = body.tool_choice
    if isinstance(choice, str):
        raw["tool_choice"] = choice
    elif choice is not None:
        raw["tool_choice"] = as_chat.chat_tool(choice.name)
    form = None if body.text is None else body.text.format
    if isinstance(form, wire.JsonObjectFormat):
        raw["response_format"] = {"type": "json_object"}
    elif isinstance(form, wire.JsonSchemaFormat):
        raw["response_format"] = as_chat.json_format(form.name, form.schema, form.strict)
    if body.reasoning is not None and body.reasoning.effort is not None:
        raw["reasoning_effort"] = body.reasoning.effort


def _functions(
    tools: Iterable[wire.Tool],
) -> Iterable[tuple[str, dict[str, Any], tuple[str, str] | None]]:
    """(place, tool of a chat request, namespace and name) of each function."""
    for i, tool in enumerate(tools):
        if isinstance(tool, wire.FunctionTool):
            yield f"tools[{i}]", _function(tool, tool.name), None
        elif isinstance(tool, wire.NamespaceTool):
            for j, inner in enumerate(tool.tools):
                name = full_name(inner.name, tool.name)
                yield f"tools[{i}].tools[{j}]", _function(inner, name), (tool.name, inner.name)


def _function(tool: wire.FunctionTool, name: str) -> dict[str, Any]:
    given = {key: getattr(tool, key) for key in ("description", "parameters", "strict")}
    return as_chat.chat_tool(name, **given)


def full_name(name: str, namespace: str | UnsetType | None) -> str:
    return f"{namespace}__{name}" if namespace else name


def _add_item(conversation: as_chat.Conversation, item: wire.Item, place: str) -> None:
    """Reasoning, text and calls of one turn are one message of the assistant."""
    if isinstance(item, wire.FunctionOutputItem):
        output = item.output
        text = output if isinstance(output, str) else "".join(part.text for part in output)
        conversation.add(place, role="tool", tool_call_id=item.call_id, content=text)
    elif isinstance(item, wire.FunctionCallItem):
        message = _assistant(conversation, place, without=())
        name = full_name(item.name, item.namespace)
        call = {"name": name, "arguments": item.arguments}
        calls = message.setdefault("tool_calls", [])
        calls.append({"id": item.call_id, "type": "function", "function": call})
    elif isinstance(item, wire.MessageItem):
        assert not isinstance(item.content, str)  # see own_items
        texts = [p.refusal if isinstance(p, wire.RefusalPart) else p.text for p in item.content]
        if item.role == "assistant":
            message = _assistant(conversation, place, without=("content", "tool_calls"))
            message["content"] = "".join(texts)
        else:
            parts = [{"type": "text", "text": text} for text in texts]
            conversation.add(place, role=item.role, content=parts)
    else:
        message = _assistant(conversation, place, without=("content", "tool_calls"))
        text = "".join(p.text for p in item.content or ()) or unseal(item.encrypted_content, place)
        text = text or "".join(part.text for part in item.summary)
        message["reasoning_content"] = message.get("reasoning_content", "") + text


def _assistant(
    conversation: as_chat.Conversation, place: str, without: Sequence[str]
) -> dict[str, Any]:
    """The assistant's message that the item belongs to: the last one, or a new one."""
    last = conversation.messages[-1] if conversation.messages else None
    if last is None or last["role"] != "assistant" or any(last.get(name) for name in without):
        return conversation.add(place, role="assistant", content=None)
    return last


def seal(text: str) -> str:
    """The value of `encrypted_content`, which clients that store nothing send back."""
    return _SEALED + base64.b64encode(text.encode()).decode()


def unseal(sealed: str | UnsetType | None, place: str) -> str:
    if not sealed:
        return ""
    try:
        if sealed.startswith(_SEALED):
            return base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        pass
    raise InvalidRequest(
        f"{place}.encrypted_content was not written by this server; leave the item out.",
        param=f"{place}.encrypted_content",
    )
