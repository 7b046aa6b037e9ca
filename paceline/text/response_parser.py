"""Sorts a model's text into reasoning, content and tool calls as it arrives.

transformers' ResponseParser finds the regions. It hands out a call only when it is whole, so this
module reads the text of a call's region itself and passes its arguments on. Text that begins like
a call and is none becomes content.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple
from uuid import uuid4

from paceline.errors import ConfigError, MissingExtra
from paceline.text.output_parts import OutputParts, ToolCallDelta
from paceline.text.response_formats import CALLS_FIELD, ResponseFormat

# What precedes the arguments in the JSON of a call, and in a region that is the arguments.
_CALL_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
# A longer beginning is read when the call is whole.
_MOST_HEAD_CHARS = 1024
_ARGUMENTS_HEAD = re.compile(r"\s*(?=\{)")
_ALPHANUMERIC = string.ascii_letters + string.digits
_JSON_MARKS = re.compile(r'["\\{}\[\]]')


class _Library(NamedTuple):
    """Modules without types."""

    chat_parsing: Any
    response_templates: Any
    regex: Any


def load_library() -> _Library:
    """transformers' parser of response templates. The first import takes about a second."""
    parsing = "transformers.utils.chat_parsing"
    names = (parsing, f"{parsing}.response_templates", "regex")
    try:
        return _Library(*map(import_module, names))
    except ImportError as error:
        raise MissingExtra(
            "tool calls and reasoning need transformers 5.22 or newer "
            f"({error}): pip install 'paceline[tools]'"
        ) from None


def check_template(layout: ResponseFormat) -> None:
    """Raise ConfigError if the tokenizer's response template cannot be used."""
    library = load_library()
    try:
        _regions(json.dumps(layout.template), True)
        library.response_templates.load_response_template(layout.template)
    except (ValueError, TypeError, KeyError, AttributeError, library.regex.error) as error:
        raise ConfigError(f"the tokenizer's response_template cannot be used: {error}") from None


class ResponseTemplateParser:
    """An OutputParser for one choice.

    `tools` are those that may be called; with none, calls are text. A parser that `streams` hands
    out a call's arguments as they come; another one waits until the call is known to be whole.
    """

    def __init__(
        self,
        layout: ResponseFormat,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        streams: bool = True,
        parallel: bool = True,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        self._layout = layout
        self._tools = list(tools)
        self._streams = streams
        self._most_calls = None if parallel else 1
        self._library = load_library()
        reads_calls = bool(tools) and layout.reads_calls
        self._regions = _regions(json.dumps(layout.template), reads_calls)
        self._raw = layout.begun_message(prompt)  # all text that the library has seen
        self._region_end = 0  # of the last region with markers, in `_raw`
        self._call: _Call | None = None
        self._num_chars = 0  # of the region that is open, without its markers
        self._marker = (0, 0)  # where the marker that opened it begins and ends
        self._content, self._reasoning = _Trimmed(at_start=False), _Trimmed(at_start=True)
        self._parts = OutputParts()
        self.num_calls = 0
        self.has_tool_calls = False
        inside = layout.thinking_after(prompt) is True
        self._counter = _ReasoningCounter(layout.reasoning_markers, encode, inside)
        self._splitter = self._library.chat_parsing.ResponseParser(self._regions, prefix=self._raw)
        self._take(self._splitter.initial_events)  # the prompt is no output
        self._content.held = self._reasoning.held = ""

    @property
    def num_reasoning_tokens(self) -> int:
        return self._counter.count

    def feed(self, text: str, token_ids: Sequence[int]) -> OutputParts:
        self._counter.feed(token_ids)
        self._raw += text
        return self._take(self._splitter.feed(text))

    def finish(self) -> OutputParts:
        _, events = self._splitter.finalize()
        parts = self._take(events)
        parts.content += self._content.held
        return parts

    def _take(self, events: Sequence[Mapping[str, Any]]) -> OutputParts:
        for event in events:
            name = event["field"]
            if event["type"] == "region_chunk":
                self._add(name, event["text"])
            elif self._regions.fields[name].open_re is None:
                continue  # text outside of all markers
            elif event["type"] == "region_open":
                self._open(name)
            else:
                self._close(name)
        parts, self._parts = self._parts, OutputParts()
        return parts

    # ---- regions

    def _open(self, name: str) -> None:
        # The library does not say what it matched: the first match behind the last region.
        opened = self._regions.fields[name].open_re.search(self._raw, self._region_end)
        self._marker = opened.span() if opened else (self._region_end, self._region_end)
        self._num_chars = 0
        if name == CALLS_FIELD:
            field = self._layout.template["fields"][name]
            self._call = _Call(field, opened.groupdict() if opened else {}, self._new_id())
        elif name == self._layout.reasoning_field:
            self._content.drop_space()

    def _add(self, name: str, text: str) -> None:
        self._num_chars += len(text)
        if name == self._layout.reasoning_field:
            self._parts.reasoning += self._reasoning.add(text)
        elif name == CALLS_FIELD:
            assert self._call is not None
            arguments = self._call.feed(text)
            if self._streams and self._call.name is not None and self._has_room:
                self._hand_out(self._call, arguments)
        else:
            self._parts.content += self._content.add(text)

    def _close(self, name: str) -> None:
        start, begin = self._marker
        end = begin + self._num_chars
        close_re = self._regions.fields[name].close_re
        closed = None if close_re is None else close_re.match(self._raw, end)
        self._region_end = end if closed is None else closed.end()
        if name == CALLS_FIELD:
            self._close_call(start, begin, end)
        elif name == self._layout.reasoning_field:
            self._reasoning.drop_space()
            self._content.drop_space()
            self._counter.inside = False

    # ---- calls

    @property
    def _has_room(self) -> bool:
        return self._most_calls is None or self.num_calls < self._most_calls

    def _new_id(self) -> str:
        length = self._layout.call_id_chars
        if length is None:
            return f"call_{uuid4().hex[:24]}"
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(length))

    def _hand_out(self, call: _Call, arguments: str) -> None:
        """Add to the output what is new of a call that streams."""
        name = None if call.is_handed_out else call.name
        if name is not None or arguments:
            self._parts.tool_calls.append(ToolCallDelta(self.num_calls, call.id, name, arguments))
        call.is_handed_out = True
        self._content.drop_space()

    def _close_call(self, start: int, begin: int, end: int) -> None:
        """The text of a call is between `begin` and `end`; its opening marker is at `start`."""
        call, self._call = self._call, None
        assert call is not None
        if call.is_handed_out:
            self.num_calls += 1
            self.has_tool_calls |= call.is_whole
            return
        calls = self._whole_calls(start, begin, end)
        if not calls:
            self._parts.content += self._content.add(self._raw[start : self._region_end])
            return
        self._content.drop_space()
        for i, (name, arguments) in enumerate(calls):
            if not self._has_room:
                break
            if i == 0 and call.is_whole and name == call.name:
                arguments = call.arguments  # as the model wrote them
            call_id = call.id if i == 0 else self._new_id()
            self._parts.tool_calls.append(ToolCallDelta(self.num_calls, call_id, name, arguments))
            self.num_calls += 1
            self.has_tool_calls = True

    def _whole_calls(self, start: int, begin: int, end: int) -> list[tuple[str, str]]:
        """(name, arguments) of each call in a region; [] if it is malformed."""
        template, stop = self._layout.template, self._region_end
        args = template["fields"][CALLS_FIELD].get("content_args") or {}
        regex, parse = self._library.regex, self._library.chat_parsing.parse_response
        if "tag_pattern" in args:
            # The library skips what is no argument, so a call that was cut would seem whole.
            tag = regex.compile(rf"(?:{args['tag_pattern']})\s*", regex.DOTALL)
            if stop == end or not _is_all(tag, self._raw[begin:end].strip()):
                return []
        # An opening marker may look ahead at the closing one, and that one at the next call.
        for text in dict.fromkeys((self._raw[start:stop], self._raw[start:end])):
            try:
                found = parse(text, template, prefix="", tools=self._tools)
                return [_name_and_arguments(call) for call in _flat(found.get(CALLS_FIELD))]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue
        return []


class _Trimmed:
    """Text without the white space next to markers. White space waits until text follows it."""

    def __init__(self, *, at_start: bool) -> None:
        self.held = ""
        self._trims = at_start

    def add(self, text: str) -> str:
        text = self.held + text
        if self._trims:
            text = text.lstrip()
        shown = text.rstrip()
        self.held = text[len(shown) :]
        self._trims &= not shown
        return shown

    def drop_space(self) -> None:
        """A marker is here: drop the white space before it and after it."""
        self.held, self._trims = "", True


class _Call:
    """The text of one call's region, read as JSON while it arrives."""

    def __init__(self, field: Mapping[str, Any], groups: Mapping[str, str], call_id: str) -> None:
        self.id = call_id
        self.name: str | None = None  # known when the arguments begin
        self.arguments = ""
        self.is_handed_out = False
        self._head, self._captured = _head_of(field, groups)
        self._text = ""
        self._depth, self._in_string, self._escaped = 0, False, False

    @property
    def is_whole(self) -> bool:
        """The arguments have ended."""
        return bool(self.arguments) and self._depth == 0

    def feed(self, text: str) -> str:
        """The new text of the arguments."""
        if self._head is None:
            return ""
        if self.name is None:
            self._text += text
            match = self._head.match(self._text)
            if match is None:
                if len(self._text) > _MOST_HEAD_CHARS:
                    self._head = None
                return ""
            self.name = self._captured or _text_of(match["name"])
            if self.name is None:
                self._head = None
                return ""
            text = self._text[match.end() :]
        more = text[: self._end(text)]
        self.arguments += more
        return more

    def _end(self, text: str) -> int:
        """How much of the text belongs to the arguments, which are one JSON object."""
        if self.is_whole:
            return 0
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            mark = _JSON_MARKS.search(text, at)
            if mark is None:
                break
            at = mark.end()
            char = mark[0]
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                self._escaped = self._in_string
            elif not self._in_string:
                self._depth += 1 if char in "{[" else -1
                if self._depth == 0:
                    return at
        return len(text)


class _ReasoningCounter:
    """Counts the tokens between the reasoning's markers, whatever the steps they came in."""

    def __init__(
        self,
        markers: tuple[str, str] | None,
        encode: Callable[[str], list[int]] | None,
        inside: bool,
    ) -> None:
        self.count = 0
        self.inside = inside
        known = markers is not None and encode is not None
        self._open, self._close = map(encode, markers) if known else ([], [])  # type: ignore[arg-type]
        self._tail: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> None:
        if not self._close:
            return
        longest = max(len(self._open), len(self._close))
        for token_id in token_ids:
            self._tail = [*self._tail, token_id][-longest:]
            self.count += self.inside
            marker = self._close if self.inside else self._open
            if self._tail[-len(marker) :] == marker:
                if self.inside:
                    self.count -= len(marker)
                self.inside = not self.inside
                self._tail = []


def _head_of(
    field: Mapping[str, Any], groups: Mapping[str, str]
) -> tuple[re.Pattern[str] | None, str | None]:
    """What precedes the arguments in a region, and the name if the opening marker has it.

    (None, None) if the region does not hold the arguments as they are sent on.
    """
    if field.get("content") != "json" or field.get("content_args") or field.get("transform_each"):
        return None, None
    function = (field.get("transform") or {}).get("function")
    if function == "{content}":
        return _CALL_HEAD, None
    name, arguments = (function or {}).get("name", ""), (function or {}).get("arguments", "")
    if name == "{content.name}" and arguments in ("{content.arguments}", "{content.parameters}"):
        return _CALL_HEAD, None
    captured = groups.get(name.strip("{}"))
    if arguments == "{content}" and captured:
        return _ARGUMENTS_HEAD, captured
    return None, None


def _is_all(tag: Any, text: str) -> bool:
    """Whether the text is one match after another."""
    at = 0
    while at < len(text) and (found := tag.match(text, at)) is not None and found.end() > at:
        at = found.end()
    return at == len(text)


def _text_of(quoted: str) -> str | None:
    try:
        text = json.loads(quoted)
    except ValueError:
        return None
    return text if isinstance(text, str) else None


def _flat(calls: Any) -> list[Any]:
    """The calls of one region; a region may hold a list of them."""
    if not isinstance(calls, list):
        return [] if calls is None else [calls]
    return [one for call in calls for one in (call if isinstance(call, list) else [call])]


def _name_and_arguments(call: Mapping[str, Any]) -> tuple[str, str]:
    function = call["function"]
    name, arguments = function["name"], function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not name:
        raise ValueError("a call needs a name")
    if isinstance(arguments, str):  # JSON in JSON
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict | None):
        raise ValueError("arguments are an object")
    return name, json.dumps(arguments or {}, ensure_ascii=False)


@lru_cache(maxsize=16)
def _regions(template: str, reads_calls: bool) -> Any:
    """The library's template with every region as text, so that it never raises."""
    given = json.loads(template)
    fields = {}
    for name, field in given["fields"].items():
        if name == CALLS_FIELD and not reads_calls:
            continue
        markers = ("open", "open_pattern", "close", "close_pattern")
        fields[name] = {
            **{key: field[key] for key in markers if key in field},
            "content": "text",
            "content_args": {"strip": False},
            "repeats": True,
            "transform": "{content}",  # patterns with groups must have one
        }
    anchors = ("start_anchor", "start_anchor_pattern")
    kept = {name: given[name] for name in anchors if name in given}
    return load_library().response_templates.load_response_template({**kept, "fields": fields})
