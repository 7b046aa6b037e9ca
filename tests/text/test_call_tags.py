"""Structural tags of forced calls: a text that follows the tag is read as the calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.text.call_tags import json_or_calls, required_calls, strict_calls
from paceline.text.response_formats import CallSyntax
from tests.text.model_answers import ANSWERS, TOOLS, Answer, meaning, parsed, parser_of

VALUES = {"city": "Paris", "days": 2}
# Of each format one.
FAMILIES = [name for name in ANSWERS if name not in ("qwen3", "qwen3 without thinking", "glm 4.7")]


def syntax_of(answer: Answer) -> CallSyntax:
    assert answer.layout.syntax is not None
    return answer.layout.syntax


def example(form: dict[str, Any], key: str = "") -> str:
    """A text that follows the format; of a choice the first."""
    kind = form["type"]
    if kind == "tag":
        inner = example(form["content"], next((k for k in VALUES if k in form["begin"]), ""))
        return str(form["begin"] + inner + form["end"])
    if kind == "tags_with_separator":
        return str(form["separator"].join(map(example, form["tags"])))
    if kind == "sequence":
        return "".join(map(example, form["elements"]))
    if kind == "or":
        return example(form["elements"][0], key)
    if kind == "const_string":
        return str(form["value"])
    if kind == "any_text":
        return str(VALUES[key])
    assert kind == "json_schema"
    properties = form["json_schema"].get("properties")
    if form["json_schema"]["type"] != "object":
        return json.dumps(VALUES[key])
    return json.dumps({name: VALUES[name] for name in properties or ()})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_follows_the_tag_is_read_as_calls(family: str) -> None:
    answer = ANSWERS[family]
    tag = required_calls(syntax_of(answer), TOOLS, parallel=True)
    assert tag["type"] == "structural_tag"
    text = example(tag["format"])
    begun = "</think>" if answer.prompt.rstrip().endswith("<think>") else ""
    _, content, calls = meaning(parsed(parser_of(answer, streams=False), [begun + text]))
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("get_weather", VALUES),
        ("now", {}),
    ]
    json.dumps(tag)  # plain data


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trigger_begins_every_tag(family: str) -> None:
    syntax = syntax_of(ANSWERS[family])
    form = strict_calls(syntax, TOOLS, parallel=False)["format"]
    assert form["stop_after_first"]
    assert not form["at_least_one"]
    for tag in form["tags"]:
        assert tag["begin"].startswith(form["triggers"][0])


def test_without_strict_any_object_is_allowed_and_with_it_the_schema() -> None:
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    form = strict_calls(syntax_of(ANSWERS["hermes"]), [TOOLS[0], strict], parallel=True)["format"]
    schemas = [tag["content"]["json_schema"] for tag in form["tags"]]
    assert schemas == [{"type": "object"}, TOOLS[0]["function"]["parameters"]]


def test_arguments_in_tags_may_be_left_out_unless_they_are_required() -> None:
    choices = {"type": "string", "enum": ["C", "F"]}
    schema = {
        "type": "object",
        "properties": {"unit": choices, "days": {"$ref": "#/$defs/n"}},
        "required": ["unit"],
        "$defs": {"n": {"type": "integer"}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = required_calls(syntax_of(ANSWERS["qwen3.5"]), [tool], parallel=True)["format"]
    unit, days = form["tags"][0]["content"]["elements"]
    assert unit["begin"] == "<parameter=unit>\n"
    assert [e["value"] for e in unit["content"]["elements"]] == ["C", "F"]
    assert days["elements"][1] == {"type": "const_string", "value": ""}
    # A property keeps the definitions that it refers to.
    assert days["elements"][0]["content"]["json_schema"]["$defs"] == schema["$defs"]


def test_json_of_a_schema_or_calls() -> None:
    syntax = syntax_of(ANSWERS["hermes"])
    form = json_or_calls({"type": "object"}, syntax, TOOLS, parallel=True)["format"]
    assert form["type"] == "or"
    assert form["elements"][0] == {"type": "json_schema", "json_schema": {"type": "object"}}
    assert form["elements"][1]["type"] == "tags_with_separator"
