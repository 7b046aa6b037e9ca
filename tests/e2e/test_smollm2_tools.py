"""Forced calls of the default model: arguments follow the schema, with and without drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from paceline.checkpoint.default_model import NAME, fetch_default_model
from paceline.errors import CheckpointError
from tests.e2e.serving import started

pytestmark = pytest.mark.more
FLAGS = ["--cpu-threads", "1", "--port", "0", "--kv-cache-memory-bytes", "256M"]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "book_table",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "enum": ["Luigi", "Chez Anne"]},
                    "guests": {"type": "integer"},
                    "outside": {"type": "boolean"},
                },
                "required": ["place", "guests", "outside"],
                "additionalProperties": False,
            },
        },
    }
]
NAMED: Any = {"type": "function", "function": {"name": "book_table"}}
QUESTION: Any = [{"role": "user", "content": "Book a table for three at Luigi, please."}]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    try:
        fetch_default_model()
    except CheckpointError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")
    with started(["serve", *FLAGS], tmp_path_factory.mktemp("tools") / "log") as process:
        process.await_ready()
        url = f"http://127.0.0.1:{process.port}/v1"
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        assert "Traceback" not in process.said()


def booked(call: Any) -> dict[str, Any]:
    assert call.function.name == "book_table"
    arguments: dict[str, Any] = json.loads(call.function.arguments)
    assert list(arguments) == ["place", "guests", "outside"]
    assert arguments["place"] in ("Luigi", "Chez Anne")
    assert type(arguments["guests"]) is int
    assert type(arguments["outside"]) is bool
    return arguments


@pytest.mark.trap("F3")
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_follows_its_schema_with_drafts_and_without(
    api: openai.OpenAI, choice: Any
) -> None:
    found = []
    for drafts in (0, 3):
        reply = api.chat.completions.create(
            model=NAME,
            messages=QUESTION,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=200,
            extra_body={"num_speculative_tokens": drafts},
        )
        choice_made = reply.choices[0]
        assert choice_made.finish_reason == "tool_calls"
        assert choice_made.message.content is None
        (call,) = choice_made.message.tool_calls or []
        found.append(booked(call))
    assert found[0] == found[1]


def test_a_forced_call_streams(api: openai.OpenAI) -> None:
    with api.chat.completions.stream(
        model=NAME,
        messages=QUESTION,
        tools=TOOLS,
        tool_choice=NAMED,
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=200,
    ) as events:
        message = events.get_final_completion().choices[0].message
    (call,) = message.tool_calls or []
    booked(call)


def test_the_format_of_the_answer_or_a_call(api: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "integer"}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    reply = api.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "What is 2 + 3?"}],
        tools=TOOLS,
        parallel_tool_calls=False,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        temperature=0,
        max_tokens=200,
    )
    message = reply.choices[0].message
    for call in message.tool_calls or []:
        booked(call)
    if message.content:
        assert type(json.loads(message.content)["answer"]) is int
    assert message.tool_calls or message.content


def test_a_schema_that_cannot_be_served_names_the_tools(api: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(
            model=NAME, messages=QUESTION, tools=[tool], tool_choice="required"
        )
    assert refused.value.param == "tools"
