"""Structural tags: which texts each format allows."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paceline.engine.grammar_constraint import GrammarFailed
from paceline.engine.grammars import Grammars
from paceline.errors import InvalidGrammar
from paceline.text.tokenizer import Tokenizer
from tests.engine.grammar_driving import EOS, allowed, grammars_of, params, tiny_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
TEXT = {"type": "any_text"}
YES = {"type": "const_string", "value": "yes"}
TAG = {"type": "tag", "begin": "<t>", "content": JSON, "end": "</t>"}
SECOND = {"begin": "<t2>", "content": JSON, "end": ["</t>", "</t2>"]}
THINK = {"type": "tag", "begin": "<th>", "content": TEXT, "end": "</th>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<t"], "tags": [TAG, SECOND]}
SEPARATED = {"type": "tags_with_separator", "tags": [TAG], "separator": ", "}
SPECIAL = "<|endoftext|>"
CALL = '<t>{"a":1}</t>'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return grammars_of(tokenizer)


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


@pytest.mark.parametrize(
    ("form", "text", "verdict"),  # whole: it may end here; part: it must go on; no: forbidden
    [
        (YES, "yes", "whole"),
        (YES, "no", "no"),
        (TAG, CALL, "whole"),
        (TAG, '<t>{"b', "no"),
        (THINK, "<th>a <b> c</th>", "whole"),
        (THINK, "<th>a <b> c", "part"),
        (THINK, "<th>a</th>b", "no"),
        (sequence(THINK, JSON), '<th>x</th>{"a":12}', "whole"),
        (sequence(TEXT, TAG), f"some text {CALL}", "whole"),
        (sequence(TEXT, TAG), "some text <t>x", "no"),
        (sequence(TEXT, YES, JSON), 'well, yes{"a":1}', "whole"),
        (sequence(YES, TEXT), "yes and more", "whole"),
        (sequence({"type": "or", "elements": [YES, TEXT]}, TAG), f"text {CALL}", "whole"),
        ({"type": "or", "elements": [YES, JSON]}, "yes", "whole"),
        ({"type": "or", "elements": [YES, JSON]}, '{"a":1}', "whole"),
        (TRIGGERED, "no call at all", "whole"),
        (TRIGGERED, f'one {CALL} two <t2>{{"a":2}}</t2> end', "whole"),
        (TRIGGERED, "a <t", "part"),
        (TRIGGERED, "a <table", "no"),
        ({**TRIGGERED, "at_least_one": True}, "text", "no"),
        ({**TRIGGERED, "at_least_one": True}, f"{CALL} text", "whole"),
        ({**TRIGGERED, "stop_after_first": True}, f"text {CALL}", "whole"),
        ({**TRIGGERED, "stop_after_first": True}, f"text {CALL} more", "no"),
        ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, f"{CALL}.", "no"),
        (SEPARATED, f"{CALL}, {CALL}", "whole"),
        (SEPARATED, f"{CALL},", "part"),
        ({**SEPARATED, "stop_after_first": True}, f"{CALL},", "no"),
        ({**TAG, "content": {"type": "regex", "pattern": "[a-z<]+"}}, "<t>a<b</t>", "whole"),
        ({**THINK, "begin": SPECIAL}, f"{SPECIAL}a</th>", "whole"),
        ({**THINK, "end": SPECIAL}, f"<th>a{SPECIAL}", "whole"),
        (
            {**TRIGGERED, "triggers": [SPECIAL], "tags": [{**SECOND, "begin": SPECIAL}]},
            f'text {SPECIAL}{{"a":1}}</t> more',
            "whole",
        ),
    ],
)
def test_texts_of_each_format(
    grammars: Grammars, tokenizer: Tokenizer, form: dict[str, Any], text: str, verdict: str
) -> None:
    asked = params(structural_tag={"type": "structural_tag", "format": form})
    constraint = grammars.constraint(asked)
    try:
        constraint.accept(tokenizer.encode(text, add_special_tokens=False))
    except GrammarFailed:
        assert verdict == "no"
    else:
        assert verdict == ("whole" if EOS in allowed(constraint.masks([])[0]) else "part")


def test_the_older_form_is_read(grammars: Grammars, tokenizer: Tokenizer) -> None:
    tag = {
        "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
        "triggers": ["<f="],
    }
    grammars.constraint(params(structural_tag=tag)).accept(
        tokenizer.encode('x <f=a>{"a":3}</f> y', add_special_tokens=False)
    )
    with pytest.raises(GrammarFailed):
        grammars.constraint(params(structural_tag=tag)).accept(tokenizer.encode("x <f=b"))


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "qwen_xml_parameter"}, "'qwen_xml_parameter' is not supported"),
        ({"type": "tag", "begin": "<t>", "content": TEXT}, "tag needs 'end'"),
        ({"type": "any_text", "excludes": ["x"]}, "any_text does not support 'excludes'"),
        ({"type": "sequence", "elements": []}, "must be a list with entries"),
        (sequence(TEXT, JSON), "any_text in a sequence must be last"),
        (sequence({"type": "or", "elements": [YES, TEXT]}, JSON), "or in a sequence must be last"),
        (sequence(TRIGGERED, YES), "nothing may follow triggered_tags"),
        ({**TAG, "content": TRIGGERED}, "nothing may follow triggered_tags"),
        ({**TRIGGERED, "triggers": ["<x"]}, "begin with one of the triggers"),
        ({**THINK, "end": "<|im_end|>"}, "ends the output"),
        ({**TAG, "begin": 5}, "must be a string"),
        ({**TAG, "content": {"type": "json_schema", "json_schema": {"not": {}}}}, "'not'"),
    ],
)
def test_what_cannot_be_written_is_refused(
    grammars: Grammars, form: dict[str, Any], words: str
) -> None:
    asked = params(structural_tag={"type": "structural_tag", "format": form})
    with pytest.raises(InvalidGrammar, match=re.escape(words)):
        grammars.constraint(asked)
