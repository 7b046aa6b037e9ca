"""What models of each family write when they think and call tools, and what it means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.text.output_parts import OutputParts
from paceline.text.response_formats import ResponseFormat, pick_format
from paceline.text.response_parser import ResponseTemplateParser

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]
CHATML = "<|im_start|>assistant\n"


@dataclass(frozen=True)
class Answer:
    """The text that a model of a family writes after `prompt`."""

    tool_parser: str
    reasoning_parser: str
    prompt: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    content: str = ""
    reasoning: str = ""
    marks: str = field(default="", kw_only=True)  # text of the chat template

    @property
    def layout(self) -> ResponseFormat:
        return pick_format(self.tool_parser, self.reasoning_parser, None, self.marks)


WEATHER, NOW = ("get_weather", '{"city": "Paris", "days": 2}'), ("now", "{}")
_V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
ANSWERS = {
    "hermes": Answer(
        "hermes",
        "none",
        CHATML,
        'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": '
        '2}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        (WEATHER, NOW),
        "Let me see.",
    ),
    "qwen3": Answer(
        "hermes",
        "qwen3",
        CHATML,
        "<think>\nParis, two days.\n</think>\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n'
        "</tool_call>",
        (WEATHER,),
        reasoning="Paris, two days.",
    ),
    "qwen3 without thinking": Answer(
        "hermes", "qwen3", CHATML + "<think>\n\n</think>\n\n", "It rains.", content="It rains."
    ),
    "qwen3.5": Answer(
        "qwen3_coder",
        "qwen3",
        CHATML + "<think>\n",
        "Paris, two days.\n</think>\n\nI look.\n\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        (WEATHER, NOW),
        "I look.",
        "Paris, two days.",
    ),
    "llama3": Answer(
        "llama3_json",
        "none",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}; '
        '{"name": "now", "parameters": {}}',
        (WEATHER, NOW),
    ),
    "llama3 with its tag": Answer(
        "llama3_json",
        "none",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        '<|python_tag|>{"name": "now", "parameters": {}}',
        (NOW,),
    ),
    "mistral": Answer(
        "mistral",
        "mistral",
        "[INST]Hi[/INST]",
        '[THINK]Paris.[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}'
        "[TOOL_CALLS]now[ARGS]{}",
        (WEATHER, NOW),
        reasoning="Paris.",
    ),
    "mistral 7B": Answer(
        "mistral",
        "none",
        "[INST]Hi[/INST]",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "now", "arguments": {}}]',
        (WEATHER, NOW),
        marks="[TOOL_CALLS]",
    ),
    "deepseek V3": Answer(
        "deepseek_v3",
        "none",
        "<｜Assistant｜>",
        _V3 + '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
        "<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (WEATHER, NOW),
    ),
    "deepseek V3.1": Answer(
        "deepseek_v31",
        "deepseek_r1",
        "<｜Assistant｜><think>",
        "Paris.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (WEATHER, NOW),
        "I look.",
        "Paris.",
    ),
    "glm 4.5": Answer(
        "glm45",
        "glm45",
        "<|assistant|>",
        "\n<think>Paris.</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
        "</tool_call>\n<tool_call>now\n</tool_call>",
        (WEATHER, NOW),
        "I look.",
        "Paris.",
    ),
    "glm 4.7": Answer(
        "glm47",
        "glm45",
        "<|assistant|><think>",
        "Paris.</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call><tool_call>now</tool_call>",
        (WEATHER, NOW),
        reasoning="Paris.",
    ),
}
# Texts that look like calls and are none: (family, text).
MALFORMED = [
    ("hermes", '<tool_call>\n{"name": "now", "arguments": }\n</tool_call>'),
    ("hermes", "Use <tool_call> for calls, <tool_call>\nand </tool_call> after."),
    ("hermes", '<tool_call>\n{"arguments": {}}\n</tool_call> Well.'),
    ("hermes", '<tool_call>\n["now"]\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": 5}\n</tool_call>'),
    (
        "qwen3.5",
        "</think>\n\n<tool_call>\n<function=now>\n<parameter=a>\n1\n</function>\n</tool_call>",
    ),
    ("qwen3.5", "</think>\n\n<tool_call>now()</tool_call>"),
    ("llama3", '{"name": "Bob", "age": 5}'),
    ("llama3", '{"name": "now", "parameters": '),
    ("mistral", '[TOOL_CALLS]now[ARGS]{"a": '),
    ("mistral 7B", '[TOOL_CALLS] [{"name": "now"'),
    ("deepseek V3", _V3 + '{"city"\n```<｜tool▁call▁end｜>'),
    ("glm 4.5", "<tool_call>now\n<arg_key>a</arg_key>\n</tool_call>"),
]


def parser_of(answer: Answer, **options: Any) -> ResponseTemplateParser:
    return ResponseTemplateParser(answer.layout, answer.prompt, TOOLS, **options)


def parsed(parser: ResponseTemplateParser, pieces: Sequence[str]) -> OutputParts:
    whole = OutputParts()
    for piece in pieces:
        whole.add(parser.feed(piece, []))
    whole.add(parser.finish())
    return whole


def meaning(parts: OutputParts) -> tuple[str, str, list[tuple[str | None, str]]]:
    """All but the ids of calls, which are random."""
    calls = [(call.name, call.arguments) for call in parts.whole_calls()]
    return parts.reasoning, parts.content, calls


def cut(text: str, where: Callable[[int], int]) -> list[str]:
    """The text in pieces; `where` gives the length of the next piece."""
    pieces, at = [], 0
    while at < len(text):
        size = where(at)
        pieces.append(text[at : at + size])
        at += size
    return pieces
