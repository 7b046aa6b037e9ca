"""Which markers a model writes around its reasoning and its tool calls.

The tokenizer's own response template says it, else `response_formats.json` has a format with a name
that vLLM users know. Its patterns repeat a bounded number of times, so that a marker that never
ends is not searched again from its beginning with each token. Data only: `response_parser.py` reads
output, `call_tags.py` constrains it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from paceline.errors import ConfigError, nearest

AUTO, NONE = "auto", "none"
# Names that response templates give to the region of reasoning.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
CALLS_FIELD = "tool_calls"
# The answer that a prompt has begun is looked for in its last characters.
_TAIL_CHARS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class CallSyntax:
    """How a model writes a call, for the grammar. `{name}`, `{name_json}`, `{key}` are replaced."""

    trigger: str  # text that begins calls
    begin: str
    end: str
    separator: str
    before: str = ""  # before the first call
    after: str = ""  # after the last call
    # Formats that write each argument alone; others write one JSON object.
    parameter_begin: str | None = None
    parameter_end: str = ""

    def begin_of(self, name: str) -> str:
        return self.begin.replace("{name_json}", json.dumps(name)).replace("{name}", name)


@dataclass(frozen=True, kw_only=True)
class ResponseFormat:
    """The format of one model's output. An empty template means that all output is text."""

    template: Mapping[str, Any] = field(default_factory=dict)  # as transformers reads it
    reasoning_field: str | None = None
    syntax: CallSyntax | None = None  # None: calls can be read, but not forced
    call_id_chars: int | None = None  # some chat templates refuse ids of another length

    @property
    def reads_calls(self) -> bool:
        return CALLS_FIELD in self.template.get("fields", ())

    @property
    def reasoning_markers(self) -> tuple[str, str] | None:
        """(open, close), if both are plain text."""
        if self.reasoning_field is None:
            return None
        region = self.template["fields"][self.reasoning_field]
        both = (_first(region.get("open")), _first(region.get("close")))
        return (both[0], both[1]) if both[0] and both[1] else None

    def begun_message(self, prompt: str) -> str:
        """The end of the prompt that belongs to the answer, for example `<think>`."""
        tail = prompt[-_TAIL_CHARS:]
        ends = [match.end() for match in self._anchor.finditer(tail)]
        if ends:
            return tail[ends[-1] :]
        # A chat template with other headers: at least the last words may open or close reasoning.
        for marker in self.reasoning_markers or ():
            if tail.rstrip().endswith(marker):
                return tail[tail.rindex(marker) :]
        return ""

    def thinking_after(self, prompt: str) -> bool | None:
        """Whether the prompt has opened (True) or closed (False) the reasoning; None: neither."""
        if self.reasoning_markers is None:
            return None
        opened, closed = map(self.begun_message(prompt).rfind, self.reasoning_markers)
        return None if opened == closed else opened > closed

    @property
    def _anchor(self) -> re.Pattern[str]:
        literals = self.template.get("start_anchor")
        if literals is None:
            return re.compile(self.template["start_anchor_pattern"], re.DOTALL)
        each = [literals] if isinstance(literals, str) else literals
        return re.compile("|".join(map(re.escape, each)))


def parser_names(kind: str) -> list[str]:
    """The names of `tool_calls` or of `reasoning` that can be chosen, besides auto and none."""
    return sorted({name for entry in _data()[kind].values() for name in entry["names"]})


def check_parser_name(flag: str, name: str, kind: str) -> None:
    known = [AUTO, NONE, *parser_names(kind)]
    if name not in known:
        raise ConfigError(
            f"--{flag} {name!r} is not known; use one of {', '.join(known)}.{nearest(name, known)}"
        )


def syntax_in(chat_template: str) -> CallSyntax:
    """The form of the calls that a chat template writes; Hermes' if it is not known."""
    entry = _entry("tool_calls", AUTO, chat_template) or _data()["tool_calls"]["hermes"]
    return CallSyntax(**entry["call"])


def pick_format(
    tool_parser: str,
    reasoning_parser: str,
    own_template: Mapping[str, Any] | None,
    chat_template: str,
    *,
    writes_tools: bool = True,
) -> ResponseFormat:
    """The format by the two names. `auto` takes the tokenizer's template, else the chat template's.

    `writes_tools` is False for a chat template that knows no tools; Hermes' format is used then.
    """
    data = _data()
    own: dict[str, Any] = dict(own_template["fields"]) if own_template is not None else {}
    calls = _entry("tool_calls", tool_parser, chat_template)
    if tool_parser == AUTO and not writes_tools:
        calls = data["tool_calls"]["hermes"]
    thinks = _entry("reasoning", reasoning_parser, chat_template)
    fields = {k: v for k, v in own.items() if k not in (CALLS_FIELD, *REASONING_FIELDS)}
    if own and reasoning_parser == AUTO:
        fields |= {k: v for k, v in own.items() if k in REASONING_FIELDS}
    elif thinks is not None:
        fields[REASONING_FIELDS[0]] = thinks["field"]
    if CALLS_FIELD in own and tool_parser == AUTO:
        fields[CALLS_FIELD] = own[CALLS_FIELD]
    elif calls is not None:
        fields |= calls["fields"]
        fields.setdefault("content", calls.get("content", {}))
    if not fields:
        return ResponseFormat()
    source = data if own_template is None else own_template
    anchors = ("start_anchor", "start_anchor_pattern")
    return ResponseFormat(
        template={
            **{name: source[name] for name in anchors if name in source},
            "fields": {"content": {}, **fields},
        },
        reasoning_field=next((name for name in REASONING_FIELDS if name in fields), None),
        syntax=None if calls is None else CallSyntax(**calls["call"]),
        call_id_chars=None if calls is None else calls.get("call_id_chars"),
    )


def _entry(kind: str, name: str, chat_template: str) -> dict[str, Any] | None:
    """The format of this name. Of several, the one whose marks are in the chat template."""
    entries: Iterable[dict[str, Any]] = _data()[kind].values()
    named = [e for e in entries if name == AUTO or name in e["names"]]
    marked = [e for e in named if all(mark in chat_template for mark in e["marks"])]
    if name == AUTO:
        return marked[0] if marked else None
    chosen = marked or named
    return chosen[0] if chosen else None


def _first(value: str | Sequence[str] | None) -> str:
    return value if isinstance(value, str) else (value[0] if value else "")


@cache
def _data() -> dict[str, Any]:
    text = resources.files("paceline.text").joinpath("response_formats.json").read_text("utf-8")
    data: dict[str, Any] = json.loads(text)
    return data
