"""Messages with tool calls in the form that a chat template reads.

Some templates show calls but no tools; a message describes the tools then. A template that knows
neither gets all of it as text in Hermes' format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.text.messages import message_text
from paceline.text.response_formats import CallSyntax

_INTRODUCTION = """\
You can call functions. Each line between <tools> and </tools> describes one of them in JSON.
<tools>
{tools}
</tools>
To call a function, write its name and its arguments in this form, and nothing after it:
{example}"""
_RESULTS = "\nYou will get the result between <tool_response> and </tool_response>."


def with_arguments(message: Mapping[str, Any], *, as_objects: bool) -> dict[str, Any]:
    """The message with the arguments of its calls as objects, or as JSON text."""
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        function["arguments"] = _converted(function.get("arguments"), as_objects)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def as_plain_messages(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    hermes: CallSyntax,
) -> list[dict[str, Any]]:
    """The conversation with tools, calls and results as text of the three common roles."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        role, text = message["role"], message_text(message)
        if role in ("tool", "function"):
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        elif message.get("tool_calls"):
            calls = with_arguments(message, as_objects=True)["tool_calls"]
            text = "\n".join([*([text] if text else []), *map(_written, calls)])
        else:
            plain.append(dict(message))
            continue
        if plain and plain[-1]["role"] == role:  # results of parallel calls
            plain[-1]["content"] = f"{message_text(plain[-1])}\n{text}"
        else:
            plain.append({"role": role, "content": text})
    return with_described_tools(plain, tools, hermes, _RESULTS)


def with_described_tools(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    syntax: CallSyntax,
    more: str = "",
) -> list[dict[str, Any]]:
    """The messages with a system message that describes the tools and the form of a call."""
    described = [dict(message) for message in messages]
    if not tools:
        return described
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(tools=lines, example=_example(syntax)) + more
    if described and described[0]["role"] in ("system", "developer"):
        described[0]["content"] = f"{message_text(described[0])}\n\n{text}"
    else:
        described.insert(0, {"role": "system", "content": text})
    return described


def has_tool_messages(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(m["role"] in ("tool", "function") or m.get("tool_calls") for m in messages)


def _converted(arguments: Any, as_objects: bool) -> Any:
    if not as_objects:
        is_text = isinstance(arguments, str)
        return arguments if is_text else json.dumps(arguments or {}, ensure_ascii=False)
    if isinstance(arguments, str):
        try:
            return json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments  # an earlier call that was malformed: the template shows it as it is
    return {} if arguments is None else arguments


def _example(syntax: CallSyntax) -> str:
    name, key, value = "the name", "a parameter", "its value"
    if syntax.parameter_begin is None:
        arguments = json.dumps({key: value})
    else:
        arguments = syntax.parameter_begin.replace("{key}", key) + value + syntax.parameter_end
    return f"{syntax.before}{syntax.begin_of(name)}{arguments}{syntax.end}{syntax.after}"


def _written(call: Mapping[str, Any]) -> str:
    function = {key: call["function"].get(key) for key in ("name", "arguments")}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
