"""The work of parsing grows with the text, not with its square, whatever a model writes."""

from __future__ import annotations

import dataclasses
import json
import re
from importlib import resources
from typing import Any

import pytest

from paceline.text import response_parser
from paceline.text.response_formats import pick_format
from paceline.text.response_parser import ResponseTemplateParser
from tests.text.model_answers import TOOLS

DATA = json.loads(resources.files("paceline.text").joinpath("response_formats.json").read_text())
FORMATS = DATA["tool_calls"]
GARBAGE = [" ", "\n", "x", "<", "{", '"', "\\", "[", '{"name": "', "<arg_key>", "<parameter=a>"]
PIECES = 400
# Characters per new character that the patterns may look at: held back markers are bounded.
MOST_LOOKED_AT = 1200


class Counted:
    """A compiled pattern that adds up the characters that it is given, and its calls."""

    def __init__(self, pattern: Any) -> None:
        self.pattern, self.num_chars, self.num_calls = pattern, 0, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.pattern, name)

        def called(text: str, at: int = 0, **options: Any) -> Any:
            self.num_chars += len(text) - at
            self.num_calls += 1
            return method(text, at, **options)

        return called if name in ("search", "match") else method


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    made: list[Counted] = []
    regions = response_parser._regions

    def count(pattern: Any) -> Any:
        if pattern is None:
            return None
        made.append(Counted(pattern))
        return made[-1]

    def with_counts(template: str, reads_calls: bool) -> Any:
        found = regions(template, reads_calls)
        fields = {
            name: dataclasses.replace(
                field, open_re=count(field.open_re), close_re=count(field.close_re)
            )
            for name, field in found.fields.items()
        }
        return dataclasses.replace(found, fields=fields)

    monkeypatch.setattr(response_parser, "_regions", with_counts)
    for name in ("_CALL_HEAD", "_ARGUMENTS_HEAD"):
        monkeypatch.setattr(response_parser, name, count(getattr(response_parser, name)))
    return made


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", FORMATS)
def test_garbage_in_a_call_is_looked_at_a_bounded_number_of_times(
    name: str, garbage: str, counted: list[Counted]
) -> None:
    form = FORMATS[name]
    layout = pick_format(form["names"][0], "none", None, "")
    syntax = layout.syntax
    assert syntax is not None
    for begin in (syntax.trigger, syntax.before + syntax.begin_of("get_weather")):
        parser = ResponseTemplateParser(layout, "", TOOLS)
        parser.feed(begin, [])
        before = sum(pattern.num_chars for pattern in counted)
        text = ""
        for _ in range(PIECES):
            parser.feed(garbage * 8, [])
            text += garbage * 8
        looked_at = sum(pattern.num_chars for pattern in counted) - before
        assert looked_at <= MOST_LOOKED_AT * PIECES + 8 * len(text)


def test_no_pattern_of_a_marker_repeats_without_bound() -> None:
    fields = [
        f for form in FORMATS.values() for f in (*form["fields"].values(), form.get("content", {}))
    ]
    patterns = [f[key] for f in fields for key in f if key.endswith("_pattern")]
    assert len(patterns) > len(FORMATS)
    assert [p for p in patterns if re.search(r"(?<!\\)[*+]|,\}", p)] == []


def test_arguments_that_are_never_closed_are_tried_once() -> None:
    tag = Counted(re.compile(r"(?:<a>.*?</a>)\s*", re.DOTALL))
    assert not response_parser._is_all(tag, "<a>" * 1000)
    assert tag.num_calls == 1
    assert response_parser._is_all(tag, "<a>1</a>\n<a></a>")
