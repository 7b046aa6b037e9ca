"""Tools and reasoning of a chat request: which calls are allowed, what is forced, who parses.

`read_tool_use` checks `tools` and `tool_choice`. `constrained` asks the engine for the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from paceline.errors import InvalidRequest, nearest, shown
from paceline.request import SamplingParams, StructuredOutputsParams
from paceline.server.fields import check_inner_names
from paceline.server.options import ServerOptions
from paceline.text.call_tags import json_or_calls, required_calls, strict_calls
from paceline.text.output_parts import OutputParser, PlainParser
from paceline.text.response_formats import CALLS_FIELD, ResponseFormat
from paceline.text.response_parser import ResponseTemplateParser
from paceline.text.tokenizer import Tokenizer

Tool = dict[str, Any]
_NAME = re.compile(r"[\w.:/-]{1,256}")
_CHOICES = ("auto", "none", "required")
_OBJECT = {"type": "object"}
_FUNCTION_FIELDS: Mapping[str, tuple[type, str]] = {
    "description": (str, "a string"),
    "parameters": (dict, "an object (a JSON schema)"),
    "strict": (bool, "a boolean"),
}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request may do with its tools."""

    tools: Sequence[Tool] = ()  # all of them, in OpenAI's form
    choice: Literal["auto", "none", "required"] = "none"
    callable: Sequence[Tool] = ()  # those that may be called
    parallel: bool = True

    def shown(self, *, hide_if_none: bool) -> list[Tool] | None:
        """The tools as a chat template gets them; None if there are none to show."""
        if not self.tools or (hide_if_none and self.choice == "none"):
            return None
        return [_without_strict(tool) for tool in self.tools]


def read_tool_use(tools: Any, choice: Any = None, parallel: bool | None = None) -> ToolUse:
    """Check the three fields of a request. `tools` is checked first."""
    offered = read_tools(tools)
    names = [tool["function"]["name"] for tool in offered]
    if choice is None:
        choice = "auto" if offered else "none"
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise InvalidRequest(
                f"tool_choice is {shown(choice)}; use auto, none, required or "
                '{"type": "function", "function": {"name": ...}}.',
                param="tool_choice",
            )
        called = offered if choice != "none" else []
        forced = choice == "required"
    else:
        name = _named_function(choice)
        called = [tool for tool in offered if tool["function"]["name"] == name]
        forced, choice = True, "required"
        if offered and not called:
            raise InvalidRequest(
                f"tool_choice names the function {shown(name)}, which is not in tools."
                f"{nearest(name, names)}",
                param="tool_choice",
            )
    if forced and not offered:
        raise InvalidRequest(
            "tool_choice asks for a call, but tools offers no function.", param="tools"
        )
    if not offered:
        choice = "none"
    return ToolUse(offered, choice, called, parallel is not False)


def read_tools(tools: Any) -> list[Tool]:
    read: dict[str, Tool] = {}
    for i, tool in enumerate(tools or ()):
        one = _read_tool(tool, f"tools[{i}]")
        name = one["function"]["name"]
        if name in read:
            raise InvalidRequest(
                f"Two tools have the name {name!r}; names must differ.",
                param=f"tools[{i}].function.name",
            )
        read[name] = one
    return list(read.values())


def _read_tool(tool: Mapping[str, Any], where: str) -> Tool:
    kind = tool.get("type", "function")
    if kind != "function":
        raise InvalidRequest(
            f"A tool of type {shown(kind)} is not supported; use functions.", param=f"{where}.type"
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest("A tool needs 'function': an object.", param=f"{where}.function")
    check_inner_names(tool, ("type", "function"), where)
    check_inner_names(function, ("name", *_FUNCTION_FIELDS), f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            "A function needs a name of at most 256 letters, digits and any of _ . : / -",
            param=f"{where}.function.name",
        )
    for key, (kind, wanted) in _FUNCTION_FIELDS.items():
        if not isinstance(function.get(key), kind | None):
            raise InvalidRequest(
                f"{key} of the function {name!r} must be {wanted}.",
                param=f"{where}.function.{key}",
            )
    kept = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": kept}


def _named_function(choice: Mapping[str, Any]) -> str:
    kind, function = choice.get("type", "function"), choice.get("function")
    if kind != "function":
        raise InvalidRequest(
            f"tool_choice of type {shown(kind)} is not supported; use auto, none, required or the "
            "name of a function.",
            param="tool_choice.type",
        )
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(
            'tool_choice must have the form {"type": "function", "function": {"name": ...}}.',
            param="tool_choice.function.name",
        )
    return name


def _without_strict(tool: Tool) -> Tool:
    """`strict` is for the grammar; models were not trained on it."""
    function = {key: value for key, value in tool["function"].items() if key != "strict"}
    return {"type": "function", "function": function}


def check_callable(
    use: ToolUse, layout: ResponseFormat, why_not: str, options: ServerOptions
) -> None:
    """Raise if this model's calls cannot be read, or must be forced and cannot be."""
    if use.choice == "auto" and not options.enable_auto_tool_choice:
        raise InvalidRequest(
            "tool_choice auto is switched off here (--no-enable-auto-tool-choice); use none, "
            "required or the name of a function.",
            param="tool_choice",
        )
    if use.choice != "none" and not layout.reads_calls:
        raise InvalidRequest(f"tools cannot be used here: {why_not}", param="tools")
    if use.choice == "required" and layout.syntax is None:
        raise InvalidRequest(
            "tool_choice can only be auto or none for this model: Paceline can read the format of "
            "its calls, but not force it. Choose a format with --tool-call-parser.",
            param="tool_choice",
        )


def constrained(
    params: SamplingParams,
    use: ToolUse,
    layout: ResponseFormat,
    tokenizer: Tokenizer,
    begins: Mapping[str, tuple[int, ...]],
) -> SamplingParams:
    """The parameters with the grammar that the tools need. `begins`: see grammar_start."""
    wanted = params.structured_outputs
    tag = _tag(use, layout, wanted)
    if tag is not None and wanted is not None and use.choice == "auto":
        wanted = replace(wanted, json=None, json_object=None, structural_tag=tag)
    elif tag is not None:
        wanted = StructuredOutputsParams(structural_tag=tag)
    if wanted is not None and begins:
        wanted = replace(wanted, **begins)  # type: ignore[arg-type]
    if wanted is not params.structured_outputs:
        params = params.replace(structured_outputs=wanted)
    if params.skip_special_tokens and _has_special_markers(layout, use, tokenizer):
        params = params.replace(skip_special_tokens=False)
    return params


def _tag(
    use: ToolUse, layout: ResponseFormat, wanted: StructuredOutputsParams | None
) -> dict[str, Any] | None:
    syntax, tools, parallel = layout.syntax, use.callable, use.parallel
    if use.choice == "none" or syntax is None:
        return None
    if use.choice == "required":
        return required_calls(syntax, tools, parallel=parallel)
    if wanted is not None and (wanted.json is not None or wanted.json_object):
        if syntax.trigger.startswith("{"):
            raise InvalidRequest(
                "This model writes calls as JSON, so a grammar cannot tell them from the JSON that "
                "is asked for. Send tools, or tool_choice none with the format of the answer.",
                param="tools",
            )
        schema = _OBJECT if wanted.json is None else wanted.json
        return json_or_calls(_decoded(schema), syntax, tools, parallel=parallel)
    if wanted is None and any(tool["function"].get("strict") for tool in tools):
        return strict_calls(syntax, tools, parallel=parallel)
    return None


def _decoded(schema: Any) -> Any:
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"structured_outputs.json is not JSON: {error}.", param="structured_outputs"
        ) from None


def grammar_start(
    layout: ResponseFormat, tokenizer: Tokenizer, prompt: str, *, is_off: bool
) -> dict[str, tuple[int, ...]]:
    """Where a grammar begins, as fields of StructuredOutputsParams.

    A grammar holds except while the model reasons. The model reasons if the prompt has opened the
    reasoning, or if the output begins with the opening marker and the request has not switched
    thinking off. So a model that does not think is constrained from its first token.
    """
    markers, is_open = layout.reasoning_markers, layout.thinking_after(prompt)
    if markers is None or is_open is False or (is_open is None and is_off):
        return {}
    opening, after = (tuple(tokenizer.encode(m, add_special_tokens=False)) for m in markers)
    return {"after_token_ids": after, "opening_token_ids": () if is_open else opening}


def parser_factory(
    layout: ResponseFormat, use: ToolUse, prompt: str, tokenizer: Tokenizer, *, streams: bool
) -> Callable[[], OutputParser]:
    """Makes the parser of each choice."""
    tools = [_without_strict(tool) for tool in use.callable]
    if layout.reasoning_field is None and not (tools and layout.reads_calls):
        return PlainParser
    begun = prompt[-(1 << 16) :]  # the request may last for hours, and its prompt be long

    def make() -> OutputParser:
        return ResponseTemplateParser(
            layout,
            begun,
            tools,
            streams=streams,
            parallel=use.parallel,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        )

    return make


def _has_special_markers(layout: ResponseFormat, use: ToolUse, tokenizer: Tokenizer) -> bool:
    """Whether a marker that is looked for is a special token, which the text would not show."""
    fields = layout.template.get("fields", {})
    searched = {layout.reasoning_field, *([CALLS_FIELD] if use.choice != "none" else [])}
    keys = ("open", "close", "open_pattern", "close_pattern")
    found = [fields[name].get(key) for name in searched if name in fields for key in keys]
    if not found:
        return False
    markers = str(found).replace("\\", "")
    return any(tokenizer.token_text(i) in markers for i in tokenizer.special_ids)
