"""The official Python clients over the scripted model: text, streams, tool loops, typed answers.

The script's answers come in windows of partly wrong drafts, so markers and calls are cut anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.clients.script import RESULT, call, script
from tests.clients.scripted import MODEL, scripted_server
from tests.e2e.serving import ServerProcess

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
FUNCTIONS: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}]
MESSAGE_TOOLS: Any = [{"name": "get_weather", "input_schema": SCHEMA}]
CALL = call("get_weather", city="Paris")
LOOP = script(f"<think>Rain?</think>I ask.{CALL}", f"It says {RESULT}.")
USER: Any = {"role": "user", "content": LOOP}
OSLO = '{"name": "Oslo", "people": 700000}'
# Answers that no client could use. A mask must turn them into what was asked for.
WRONG = ["Sure, it is Oslo.", '{"name": 7, "people": "many"}', '[{"name": "Oslo"}]', ""]
THOUGHT = "<think>Which {one}?</think>"


class City(BaseModel):
    name: str
    people: int


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ["--per-request-spec-decode-metrics", "detailed"]
    with scripted_server(tmp_path_factory.mktemp("sdks"), *flags) as process:
        yield process


@pytest.fixture(scope="module")
def api(server: ServerProcess) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    url = f"http://127.0.0.1:{server.port}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("drafts", range(6))
def test_windows_of_any_width_give_the_same_parts(api: openai.OpenAI, drafts: int) -> None:
    """Reasoning, text and two calls, streamed and whole."""
    said = f"<think>Two <b>cities</b>.</think>I ask <twice>.{CALL}\n{call('get_weather', city='Ö')}"
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": script(said)}],
        "tools": TOOLS,
        "extra_body": {"num_speculative_tokens": drafts},
    }
    reply = api.chat.completions.create(**asked)
    whole: Any = reply.choices[0].message
    with api.chat.completions.stream(**asked) as events:
        streamed: Any = events.get_final_completion().choices[0].message
    for message in (whole, streamed):
        assert message.content == "I ask <twice>."
        arguments = [json.loads(made.function.arguments) for made in message.tool_calls]
        assert arguments == [{"city": "Paris"}, {"city": "Ö"}]
    assert whole.reasoning == "Two <b>cities</b>."
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.model_extra is not None
    if drafts:
        counts = reply.model_extra["metrics"]["speculative_decoding"]["per_step_accepted"]
        assert {0, drafts} <= set(counts)


@pytest.mark.more
def test_a_tool_loop_over_chat(api: openai.OpenAI) -> None:
    messages = [USER]
    with api.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as events:
        message = events.get_final_completion().choices[0].message
    (made,) = message.tool_calls or []
    messages += [message, {"role": "tool", "tool_call_id": made.id, "content": "rain"}]
    reply = api.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    assert reply.choices[0].message.content == "It says rain."


@pytest.mark.more
def test_a_forced_call_has_its_schema(api: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": script(CALL)}]
    reply = api.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="required", max_tokens=200
    )
    (made,) = reply.choices[0].message.tool_calls or []
    assert made.type == "function"
    assert json.loads(made.function.arguments) == {"city": "Paris"}


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("wrong", WRONG, ids=["text", "types", "list", "nothing"])
def test_a_wrong_answer_is_corrected_by_the_mask(
    api: openai.OpenAI, claude: anthropic.Anthropic, wrong: str, thinks: bool
) -> None:
    """With a thought or without one, in each API: the answer follows the schema."""
    said = script(THOUGHT * thinks + wrong)
    messages: Any = [{"role": "user", "content": said}]
    chat = api.chat.completions.parse(model=MODEL, messages=messages, response_format=City)
    message: Any = chat.choices[0].message
    assert (message.parsed is not None, chat.choices[0].finish_reason) == (True, "stop")
    assert message.content != wrong
    assert getattr(message, "reasoning", None) == ("Which {one}?" if thinks else None)
    response = api.responses.parse(model=MODEL, input=said, text_format=City)
    assert response.output_parsed == message.parsed
    reply = claude.messages.parse(
        model=MODEL, max_tokens=400, messages=messages, output_format=City
    )
    assert reply.parsed_output == message.parsed


@pytest.mark.parametrize("thinks", [False, True])
def test_a_wrong_call_is_corrected_by_the_mask(
    api: openai.OpenAI, claude: anthropic.Anthropic, thinks: bool
) -> None:
    """A strict function that the model calls with other arguments, and a call that it omits."""
    said = script(THOUGHT * thinks + call("get_weather", town=3))
    strict = api.responses.create(model=MODEL, input=said, tools=FUNCTIONS)
    made: Any = strict.output[-1]
    assert [*json.loads(made.arguments)] == ["city"]
    messages: Any = [{"role": "user", "content": script(THOUGHT * thinks + "No.")}]
    required = api.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="required"
    )
    (forced,) = required.choices[0].message.tool_calls or []
    assert forced.type == "function"
    assert [*json.loads(forced.function.arguments)] == ["city"]
    choice: Any = {"type": "any"}
    reply = claude.messages.create(
        model=MODEL, max_tokens=400, messages=messages, tools=MESSAGE_TOOLS, tool_choice=choice
    )
    block: Any = reply.content[-1]
    assert [*block.input] == ["city"]


@pytest.mark.more
@pytest.mark.parametrize("thinks", [False, True])
def test_answers_are_parsed_as_a_model(api: openai.OpenAI, thinks: bool) -> None:
    said = script(THOUGHT * thinks + OSLO)
    messages: Any = [{"role": "user", "content": said}]
    oslo = City(name="Oslo", people=700000)
    chat = api.chat.completions.parse(model=MODEL, messages=messages, response_format=City)
    assert chat.choices[0].message.parsed == oslo
    response = api.responses.parse(model=MODEL, input=said, text_format=City)
    assert response.output_parsed == oslo


@pytest.mark.more
def test_a_tool_loop_over_responses(api: openai.OpenAI) -> None:
    with api.responses.stream(model=MODEL, input=LOOP, tools=FUNCTIONS) as events:
        first = events.get_final_response()
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    made: Any = first.output[-1]
    assert json.loads(made.arguments) == {"city": "Paris"}
    result: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "rain"}
    second = api.responses.create(
        model=MODEL, previous_response_id=first.id, input=[result], tools=FUNCTIONS
    )
    assert second.output_text == "It says rain."


@pytest.mark.more
def test_a_tool_loop_over_messages(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 500, "tools": MESSAGE_TOOLS}
    with claude.messages.stream(**asked, messages=[USER]) as events:
        first = events.get_final_message()
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.stop_reason == "tool_use"
    made: Any = first.content[-1]
    assert made.input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": made.id, "content": "rain"}
    turns: Any = [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = claude.messages.create(**asked, messages=[USER, *turns])
    assert [getattr(block, "text", "") for block in second.content] == ["It says rain."]


@pytest.mark.more
def test_messages_are_parsed_as_a_model(claude: anthropic.Anthropic) -> None:
    said: Any = {"role": "user", "content": script(OSLO)}
    reply = claude.messages.parse(model=MODEL, max_tokens=100, messages=[said], output_format=City)
    assert reply.parsed_output == City(name="Oslo", people=700000)
