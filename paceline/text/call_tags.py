"""Structural tags that make tool calls follow the format of the model and the tools' schemas.

The tags have the form of xgrammar and vLLM. The engine turns them into masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.text.response_formats import CallSyntax

Tag = dict[str, Any]
_ANY_OBJECT = {"type": "object"}


def required_calls(
    syntax: CallSyntax, tools: Sequence[Mapping[str, Any]], *, parallel: bool
) -> Tag:
    """The output is one call, or with `parallel` several, of these tools and nothing else."""
    return _structural(_calls(syntax, tools, parallel=parallel, strict_only=False))


def strict_calls(syntax: CallSyntax, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> Tag:
    """Free text; once a call begins, its arguments follow the schema if its tool is strict."""
    if syntax.before:
        tags = [_calls(syntax, tools, parallel=parallel, strict_only=True)]
    else:
        tags = [_call(syntax, tool, strict_only=True) for tool in tools]
    return _structural(
        {
            "type": "triggered_tags",
            "triggers": [syntax.trigger],
            "tags": tags,
            "at_least_one": False,
            "stop_after_first": not parallel,
        }
    )


def json_or_calls(
    schema: Any, syntax: CallSyntax, tools: Sequence[Mapping[str, Any]], *, parallel: bool
) -> Tag:
    """JSON of a schema, or calls."""
    calls = _calls(syntax, tools, parallel=parallel, strict_only=True)
    return _structural({"type": "or", "elements": [_json(schema), calls]})


def _structural(form: Tag) -> Tag:
    return {"type": "structural_tag", "format": form}


def _calls(
    syntax: CallSyntax, tools: Sequence[Mapping[str, Any]], *, parallel: bool, strict_only: bool
) -> Tag:
    calls = {
        "type": "tags_with_separator",
        "tags": [_call(syntax, tool, strict_only=strict_only) for tool in tools],
        "separator": syntax.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    if not syntax.before:
        return calls
    return {"type": "tag", "begin": syntax.before, "content": calls, "end": syntax.after}


def _call(syntax: CallSyntax, tool: Mapping[str, Any], *, strict_only: bool) -> Tag:
    function = tool["function"]
    name, schema = function["name"], function.get("parameters") or _ANY_OBJECT
    is_free = strict_only and not function.get("strict")
    if syntax.parameter_begin is None:
        content = _json(_ANY_OBJECT if is_free else schema)
    elif is_free:
        content = {"type": "any_text"}
    else:
        content = _parameters(syntax, syntax.parameter_begin, schema)
    begin = syntax.begin_of(name)
    return {"type": "tag", "begin": begin, "content": content, "end": syntax.end}


def _parameters(syntax: CallSyntax, begin: str, schema: Mapping[str, Any]) -> Tag:
    """Each property in its own tags, in the schema's order. Strings have no quotes there."""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required") or ()
    elements: list[Tag] = []
    for key, value in (schema.get("properties") or {}).items():
        is_text = isinstance(value, Mapping) and value.get("type") == "string"
        own = {**value, **definitions} if isinstance(value, Mapping) else value
        choices = value.get("enum") if is_text else None
        content: Tag = {"type": "any_text"} if is_text else _json(own)
        if choices:
            content = {"type": "or", "elements": [_text(str(choice)) for choice in choices]}
        element: Tag = {
            "type": "tag",
            "begin": begin.replace("{key}", key),
            "content": content,
            "end": syntax.parameter_end,
        }
        if key not in required:
            element = {"type": "or", "elements": [element, _text("")]}
        elements.append(element)
    return {"type": "sequence", "elements": elements} if elements else _text("")


def _json(schema: Any) -> Tag:
    return {"type": "json_schema", "json_schema": schema}


def _text(value: str) -> Tag:
    return {"type": "const_string", "value": value}
