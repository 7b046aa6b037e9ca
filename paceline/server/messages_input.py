"""A body of /v1/messages to the chat request that it means."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from paceline.errors import InvalidRequest
from paceline.server import as_chat
from paceline.server import messages_types as wire


def translate(body: wire.CountTokensRequest) -> as_chat.Translated:
    conversation = as_chat.Conversation()
    if body.system:
        conversation.add("system", role="system", content=_text_of(body.system))
    for i, message in enumerate(body.messages):
        _add_message(conversation, message, f"messages[{i}]")
    raw = {"messages": conversation.messages, **as_chat.shared_fields(body)}
    if isinstance(body.thinking, wire.ThinkingEnabled | wire.ThinkingDisabled):
        switch = {"enable_thinking": isinstance(body.thinking, wire.ThinkingEnabled)}
        raw["chat_template_kwargs"] = switch | (body.chat_template_kwargs or {})
    if body.messages and body.messages[-1].role == "assistant":
        raw["continue_final_message"] = True
    shown = _shown_tools(body)
    _add_tools(body, shown.values(), raw)
    _add_output(body, raw)
    if isinstance(body, wire.MessagesRequest) and body.stop_sequences:
        raw["stop"] = body.stop_sequences
    names = conversation.names() | {
        "prompt": "messages",
        "stop": "stop_sequences",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    }
    names |= as_chat.names_of_options(
        raw, form="output_config.format", effort="output_config.effort"
    )
    for ours, i in enumerate(shown):
        names |= {
            f"tools[{ours}].function.parameters": f"tools[{i}].input_schema",
            f"tools[{ours}].function": f"tools[{i}]",
        }
    return as_chat.Translated(raw, names)


def _shown_tools(body: wire.CountTokensRequest) -> dict[int, wire.MessageTool]:
    """By their place in the request: those that are not deferred, or that a result names."""
    named = {
        part.tool_name
        for message in body.messages
        for block in message.content
        if isinstance(block, wire.ToolResultBlock) and isinstance(block.content, list)
        for part in block.content
        if isinstance(part, wire.ToolReferenceBlock)
    }
    every = enumerate(body.tools or ())
    return {i: tool for i, tool in every if not tool.defer_loading or tool.name in named}


def _add_tools(
    body: wire.CountTokensRequest, tools: Collection[wire.MessageTool], raw: dict[str, Any]
) -> None:
    if tools:
        raw["tools"] = [
            as_chat.chat_tool(
                t.name, parameters=t.input_schema, description=t.description, strict=t.strict
            )
            for t in tools
        ]
    choice = body.tool_choice
    if isinstance(choice, wire.NoneChoice):
        raw["tool_choice"] = "none"
    elif isinstance(choice, wire.AnyChoice):
        raw["tool_choice"] = "required"
    elif isinstance(choice, wire.ToolChoice):
        raw["tool_choice"] = as_chat.chat_tool(choice.name)
    if getattr(choice, "disable_parallel_tool_use", None):
        raw["parallel_tool_calls"] = False


def _add_output(body: wire.CountTokensRequest, raw: dict[str, Any]) -> None:
    config = body.output_config
    if config is not None and config.effort is not None:
        raw["reasoning_effort"] = config.effort
    form = body.output_format if config is None or config.format is None else config.format
    if form is not None:
        raw["response_format"] = as_chat.json_format("output", form.schema, True)


def _add_message(conversation: as_chat.Conversation, message: wire.Message, place: str) -> None:
    content = message.content
    blocks = [wire.TextBlock(text=content)] if isinstance(content, str) else content
    if message.role == "assistant":
        _add_assistant(conversation, blocks, place)
        return
    texts: list[wire.TextBlock] = []
    for i, block in enumerate(blocks):
        if isinstance(block, wire.TextBlock):
            texts.append(block)
        elif isinstance(block, wire.ToolResultBlock) and message.role == "user":
            _add_texts(conversation, message.role, texts, place)
            texts = []
            result = _text_of(block.content or "")
            if block.is_error:
                result = f"Error: {result}"
            where = f"{place}.content[{i}]"
            conversation.add(where, role="tool", tool_call_id=block.tool_use_id, content=result)
        else:
            raise _misplaced(block, message.role, f"{place}.content[{i}]")
    _add_texts(conversation, message.role, texts, place)


def _add_texts(
    conversation: as_chat.Conversation, role: str, texts: Sequence[wire.TextBlock], place: str
) -> None:
    if texts:
        parts = [{"type": "text", "text": block.text} for block in texts]
        conversation.add(place, role=role, content=parts)


def _add_assistant(
    conversation: as_chat.Conversation, blocks: Sequence[wire.Block], place: str
) -> None:
    message = conversation.add(place, role="assistant", content=None)
    thoughts, texts, calls = [], [], []
    for i, block in enumerate(blocks):
        if isinstance(block, wire.ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, wire.TextBlock):
            texts.append(block.text)
        elif isinstance(block, wire.ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            raise _misplaced(block, "assistant", f"{place}.content[{i}]")
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if texts or not calls:
        message["content"] = "".join(texts)


def _text_of(content: str | Sequence[wire.ResultBlock]) -> str:
    if isinstance(content, str):
        return content
    texts = (
        block.text
        if isinstance(block, wire.TextBlock)
        else f"The tool {block.tool_name} can be called."
        for block in content
    )
    return "\n\n".join(texts)


def _misplaced(block: wire.Block, role: str, place: str) -> InvalidRequest:
    kind = block.__struct_config__.tag
    return InvalidRequest(
        f"{place}: a block of type {kind!r} cannot be in a message of role {role!r}.", param=place
    )
