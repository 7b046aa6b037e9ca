"""Reasoning, content and calls of each family of models, in whatever pieces the text arrives."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.text.response_formats import pick_format
from paceline.text.response_parser import ResponseTemplateParser
from tests.text.model_answers import (
    ANSWERS,
    CHATML,
    MALFORMED,
    TOOLS,
    cut,
    meaning,
    parsed,
    parser_of,
)

families = pytest.mark.parametrize("family", ANSWERS)


@families
@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_is_sorted(family: str, streams: bool) -> None:
    answer = ANSWERS[family]
    parser = parser_of(answer, streams=streams)
    reasoning, content, calls = meaning(parsed(parser, [answer.text]))
    assert (reasoning, content) == (answer.reasoning, answer.content)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        (name, json.loads(arguments)) for name, arguments in answer.calls
    ]
    assert parser.has_tool_calls == bool(answer.calls)


@pytest.mark.trap("F1", "F3", "F6")
@families
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("streams", [True, False])
def test_windows_of_any_size_give_the_same(family: str, size: int, streams: bool) -> None:
    answer = ANSWERS[family]
    whole = meaning(parsed(parser_of(answer, streams=streams), [answer.text]))
    pieces = cut(answer.text, lambda _: size)
    assert meaning(parsed(parser_of(answer, streams=streams), pieces)) == whole


TEXTS = [(name, answer.text) for name, answer in ANSWERS.items()] + MALFORMED


@pytest.mark.trap("F6")
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_cut_of_any_text_gives_the_same(data: st.DataObject) -> None:
    family, text = data.draw(st.sampled_from(TEXTS))
    # Cut off at any place, as by max_tokens, and with other text inside.
    text = text[: data.draw(st.integers(1, len(text)))]
    at = data.draw(st.integers(0, len(text)))
    text = (
        text[:at]
        + data.draw(st.sampled_from(["", "\n", " é", "}", '"', "<tool_call>"]))
        + text[at:]
    )
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(text), max_size=len(text)))
    streams = data.draw(st.booleans())
    answer = ANSWERS[family]
    whole = meaning(parsed(parser_of(answer, streams=streams), [text]))
    pieces = cut(text, lambda position: sizes[position])
    assert meaning(parsed(parser_of(answer, streams=streams), pieces)) == whole
    assert meaning(parsed(parser_of(answer, streams=streams), list(text))) == whole


@pytest.mark.parametrize(("family", "text"), MALFORMED)
def test_a_malformed_call_is_text(family: str, text: str) -> None:
    parser = parser_of(ANSWERS[family], streams=False)
    _, content, calls = meaning(parsed(parser, [text]))
    assert calls == []
    assert content == text.removeprefix("</think>\n\n")
    assert not parser.has_tool_calls


def test_arguments_stream_as_they_come() -> None:
    parser = parser_of(ANSWERS["hermes"])
    deltas = [d for c in ANSWERS["hermes"].text for d in parser.feed(c, []).tool_calls]
    first = [d for d in deltas if d.index == 0]
    assert [d.name for d in first] == ["get_weather"] + [None] * (len(first) - 1)
    assert len({d.id for d in first}) == 1
    assert [d.arguments for d in first] == list('{"city": "Paris", "days": 2}')


def test_a_call_that_is_cut_off_streams_its_beginning_and_is_no_whole_call() -> None:
    parser = parser_of(ANSWERS["hermes"])
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par'
    assert meaning(parsed(parser, [text])) == ("", "", [("get_weather", '{"city": "Par')])
    assert not parser.has_tool_calls


def test_without_tools_a_call_is_text() -> None:
    answer = ANSWERS["qwen3"]
    parser = ResponseTemplateParser(answer.layout, answer.prompt)
    reasoning, content, calls = meaning(parsed(parser, list(answer.text)))
    assert (reasoning, calls) == (answer.reasoning, [])
    assert content == answer.text.partition("</think>\n\n")[2]


def test_text_without_markers_is_handed_out_unchanged() -> None:
    parser = parser_of(ANSWERS["hermes"])
    text = "  One < two,\n\n a <b>line</b> \n"
    assert meaning(parsed(parser, list(text))) == ("", text, [])


def test_one_call_at_most_without_parallel_calls() -> None:
    for streams in (True, False):
        parser = parser_of(ANSWERS["hermes"], parallel=False, streams=streams)
        _, _, calls = meaning(parsed(parser, [ANSWERS["hermes"].text]))
        assert [name for name, _ in calls] == ["get_weather"]


def test_arguments_in_another_order_or_as_text_are_understood() -> None:
    for body in (
        '{"arguments": {"city": "Oslo"}, "name": "get_weather"}',
        '{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}',
    ):
        parts = parsed(parser_of(ANSWERS["hermes"]), [f"<tool_call>{body}</tool_call>"])
        assert meaning(parts)[2] == [("get_weather", '{"city": "Oslo"}')]


def test_ids_have_the_length_that_mistrals_template_accepts() -> None:
    parts = parsed(parser_of(ANSWERS["mistral"]), [ANSWERS["mistral"].text])
    assert [len(call.id) for call in parts.whole_calls()] == [9, 9]


def test_a_tokenizers_own_template_is_used() -> None:
    own = {
        "start_anchor": "<|turn>model\n",
        "fields": {
            "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
            },
            "content": {"close": ["<turn|>", "<eos>"]},
        },
    }
    layout = pick_format("auto", "auto", own, "")
    call = '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>'
    text = f"<|channel>thought\nHm.<channel|>{call}"
    for pieces in ([text], list(text)):
        parser = ResponseTemplateParser(layout, "<|turn>model\n", TOOLS)
        expected = ("Hm.", "", [("get_weather", '{"city": "Rome"}')])
        assert meaning(parsed(parser, pieces)) == expected


def tokens(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.trap("F1")
@pytest.mark.parametrize("size", [1, 3, 4, 50])
def test_reasoning_tokens_are_counted_in_any_window(size: int) -> None:
    layout = pick_format("none", "qwen3", None, "")
    for prompt, text in (
        (CHATML, "<think>four</think>Yes"),
        (CHATML + "<think>", "four</think>Yes"),
    ):
        parser = ResponseTemplateParser(layout, prompt, encode=tokens)
        for piece in cut(text, lambda _: size):
            parser.feed(piece, tokens(piece))
        parser.finish()
        assert parser.num_reasoning_tokens == 4


def test_a_continued_answer_goes_on_where_the_prompt_ends() -> None:
    layout = pick_format("hermes", "qwen3", None, "")
    prompt = f"<tool_call>{CHATML}<think>\nHm.\n</think>\n\nThe answer"
    parser = ResponseTemplateParser(layout, prompt, TOOLS)
    assert meaning(parsed(parser, [" is 5."])) == ("", " is 5.", [])


def test_a_prompt_without_a_known_header_can_still_open_the_reasoning() -> None:
    layout = pick_format("hermes", "qwen3", None, "")
    parser = ResponseTemplateParser(layout, "Use <tool_call>. ASSISTANT: <think>\n", TOOLS)
    assert meaning(parsed(parser, ["Hm.</think>Yes"])) == ("Hm.", "Yes", [])
