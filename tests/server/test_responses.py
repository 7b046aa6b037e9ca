"""/v1/responses with the official client: items, events, the store, tools and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from paceline.server.responses_input import seal
from tests.patience import wait_for
from tests.server.fake_client import Asked, FakeClient, Steps, words
from tests.server.serving import Served, serving
from tests.server.test_tools import CALL, SECOND, THINKING, saying

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
NOW: Any = {"type": "function", "name": "now", "parameters": {}, "strict": None}
IMAGE = {"type": "input_image"}
THINKS: dict[str, Any] = {"chat_template": THINKING}
# The fields that codex 0.169 sends, with one tool of each of its types.
CODEX: dict[str, Any] = {
    "model": "tiny",
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be brief."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    ],
    "tools": [
        WEATHER,
        {
            "type": "namespace",
            "name": "agents",
            "description": "Helpers.",
            "tools": [{**NOW, "name": "close"}],
        },
        {"type": "web_search", "external_web_access": True},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"session_id": "s"},
}


@pytest.fixture
def api(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as api:
        yield api


def events_of(server: Served, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked against the official types."""
    fields.setdefault("input", "Hi")
    reply = server.post("/v1/responses", {"stream": True, **fields})
    assert reply.status == 200, reply.body
    events = []
    for frame in reply.body.decode().split("\n\n"):
        if frame:
            name, data = frame.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            EVENT.validate_python(event)
            events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def prompt_of(client: FakeClient) -> str:
    return client.tokenizer.decode(client.last.prompt_token_ids)


def test_a_response_has_the_official_shape(api: openai.OpenAI, client: FakeClient) -> None:
    response = api.responses.create(
        model="tiny", input="Hi", instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=9
    )
    Response.model_validate(response.to_dict())
    assert response.output_text == "Hello"
    assert (response.status, response.instructions) == ("completed", "Be brief.")
    assert (response.metadata, response.max_output_tokens) == ({"a": "b"}, 9)
    assert response.usage is not None
    assert response.usage.input_tokens == len(client.last.prompt_token_ids)
    assert response.usage.output_tokens == 5
    assert client.last.params.max_tokens == 9
    assert prompt_of(client) == "<system>Be brief.<user>Hi<assistant>"


# What the Open Responses specification requires of a response object.
REQUIRED = re.findall(
    r"\w+",
    """id object created_at completed_at status incomplete_details model previous_response_id
    instructions output error tools tool_choice truncation parallel_tool_calls text top_p
    presence_penalty frequency_penalty top_logprobs temperature reasoning user usage
    max_output_tokens max_tool_calls store background service_tier metadata safety_identifier
    prompt_cache_key""",
)


def test_a_response_has_every_field_that_open_responses_requires(server: Served) -> None:
    marks = {"prompt_cache_key": "k", "safety_identifier": "s", "user": "u", "service_tier": "flex"}
    created, *_, last = events_of(server, presence_penalty=0.5, **marks)
    for response in (created["response"], last["response"]):
        assert set(REQUIRED) <= response.keys()
        assert [response[name] for name in marks] == ["k", "s", "u", "default"]
        assert (response["presence_penalty"], response["frequency_penalty"]) == (0.5, 0)


def test_the_events_of_text_come_in_the_official_order(server: Served) -> None:
    events = events_of(server)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    whole = events[-1]["response"]
    assert whole["id"] == events[0]["response"]["id"]
    assert whole["output"] == [events[-2]["item"]]
    assert whole["usage"]["output_tokens"] == 5


@pytest.mark.trap("F3")
@pytest.mark.parametrize("size", [1, 4, 500])
def test_reasoning_text_and_calls_are_items_in_windows_of_any_size(size: int) -> None:
    text = f"<think>Paris.</think>\n\nI look.\n{CALL}\n{SECOND}"
    with serving(FakeClient(saying(text, size=size)), **THINKS) as server:
        tools = [WEATHER, NOW]
        events = events_of(server, tools=tools, include=["reasoning.encrypted_content"])
        whole = server.post("/v1/responses", {"input": "Hi", "tools": tools}).json()
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Paris."}]
    assert output[0]["encrypted_content"] == seal("Paris.")
    assert output[1]["content"][0]["text"] == "I look."
    assert (output[2]["name"], output[2]["arguments"]) == ("get_weather", '{"city": "Paris"}')
    added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert [item["id"] for item in added] == [item["id"] for item in output]
    assert done == output
    deltas = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
    first = "".join(e["delta"] for e in deltas if e["item_id"] == output[2]["id"])
    assert first == output[2]["arguments"]
    assert [i["type"] for i in whole["output"]] == [i["type"] for i in output]
    assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_a_tool_loop_with_the_official_client() -> None:
    def script(asked: Asked) -> Steps:
        prompt = FakeClient().tokenizer.decode(asked.prompt_token_ids)
        return saying("Sunny." if "<|im_start|>tool\n21 C" in prompt else CALL)(asked)

    client = FakeClient(script)
    with serving(client, **THINKS) as server:
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
        first = api.responses.create(model="tiny", input="Hi", tools=[WEATHER])
        (call,) = first.output
        assert call.type == "function_call"
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21 C"}
        second = api.responses.create(
            model="tiny",
            input=[output],
            previous_response_id=first.id,
            tools=[WEATHER],
        )
        assert second.output_text == "Sunny."
        assert '"city": "Paris"' in prompt_of(client)
        turn: list[Any] = [{"role": "user", "content": "Hi"}, call.to_dict(), output]
        third = api.responses.create(  # the same without the store
            model="tiny",
            input=turn,
            tools=[WEATHER],
            store=False,
        )
        assert third.output_text == "Sunny."


def test_codex_is_understood(caplog: pytest.LogCaptureFixture) -> None:
    close = '<tool_call>\n{"name": "agents__close", "arguments": {}}\n</tool_call>'
    client = FakeClient(saying(f"<think>So.</think>{close}"))
    with serving(client, **THINKS) as server:
        response = events_of(server, **CODEX)[-1]["response"]
        output = response["output"]
        assert [tool["type"] for tool in response["tools"]] == ["function", "namespace"]
        assert "agents__close" in prompt_of(client)
        assert "web_search" not in prompt_of(client)
        assert (output[1]["namespace"], output[1]["name"]) == ("agents", "close")
        # codex sends reasoning back without its text
        reasoning = {**output[0], "content": None}
        result = {"type": "function_call_output", "call_id": output[1]["call_id"], "output": "ok"}
        events_of(server, **{**CODEX, "input": [*CODEX["input"], reasoning, output[1], result]})
        assert "<think>So.</think>" in prompt_of(client)
        foreign = {**reasoning, "encrypted_content": "gAAAA"}
        reply = server.post("/v1/responses", {**CODEX, "input": [foreign]})
        assert reply.error["param"] == "input[0].encrypted_content"
    warned = [r for r in caplog.records if "web_search" in r.getMessage()]
    assert [r.levelname for r in warned] == ["WARNING"], "once, not for each request"


def test_output_that_is_cut_is_incomplete() -> None:
    with serving(FakeClient(lambda _: words("Hel", "lo", finish="length"))) as server:
        created, *_, done, last = events_of(server)
        assert created["response"]["usage"] is None
        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        assert last["response"]["output"] == [done["item"]]
        assert done["item"]["status"] == "incomplete"
        assert server.post("/v1/responses", {"input": "Hi"}).json()["status"] == "incomplete"


def test_a_stream_that_fails_says_so_in_an_event() -> None:
    broken = FakeClient(lambda _: [*words("Hel", finish=None), *words("", finish="error")])
    with serving(broken) as server:
        error, failed = events_of(server)[-2:]
        assert (error["type"], failed["type"]) == ("error", "response.failed")
        assert "cannot go on" in error["message"]
        assert failed["response"]["error"]["code"] == "server_error"
        stored = server.get(f"/v1/responses/{failed['response']['id']}").json()
        assert stored["status"] == "failed"


# ---- the store


def test_a_stored_response_can_be_read_continued_and_deleted(
    api: openai.OpenAI, client: FakeClient
) -> None:
    first = api.responses.create(model="tiny", input="Hi", instructions="Be brief.")
    second = api.responses.create(model="tiny", input="More", previous_response_id=first.id)
    # Instructions are not carried over.
    assert prompt_of(client) == "<user>Hi<assistant>Hello<user>More<assistant>"
    assert api.responses.retrieve(second.id).to_dict() == second.to_dict()
    listed = api.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.type for item in listed.data] == ["message", "message"]
    assert [item.id for item in listed][-1] not in [item.id for item in listed.data]
    assert api.responses.cancel(second.id).status == "completed"
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    api.responses.create(model="tiny", input=[{"role": "user", "content": "Hi"}, reference])
    assert prompt_of(client) == "<user>Hi<assistant>Hello<assistant>"
    api.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as missing:
        api.responses.create(model="tiny", input="x", previous_response_id=first.id)
    assert missing.value.param == "previous_response_id"
    # The later response holds the whole conversation.
    api.responses.create(model="tiny", input="x", previous_response_id=second.id)


def test_nothing_is_stored_if_the_request_or_the_server_says_so(server: Served) -> None:
    def is_found(on: Served, **fields: Any) -> bool:
        made = on.post("/v1/responses", {"input": "Hi", **fields}).json()
        status = on.get(f"/v1/responses/{made['id']}").status
        assert made["store"] == (status == 200)
        return status == 200

    assert is_found(server)
    assert not is_found(server, store=False)
    with serving(FakeClient(), max_stored_responses=0) as without:
        assert not is_found(without)
        reply = without.post("/v1/responses", {"input": "Hi", "store": True})
        assert (reply.status, reply.error["param"]) == (400, "store")
    with serving(FakeClient(), max_stored_responses=1) as small:
        first, second = (small.post("/v1/responses", {"input": "Hi"}).json() for _ in range(2))
        assert small.get(f"/v1/responses/{first['id']}").status == 404
        assert small.get(f"/v1/responses/{second['id']}").status == 200


def test_a_stream_can_be_read_and_cancelled_from_elsewhere() -> None:
    client = FakeClient(lambda _: words("a", "b", "c"), by_hand=True)
    with serving(client) as server:
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
        client.allow(1)
        stream = api.responses.create(model="tiny", input="Hi", stream=True)
        first = next(stream)
        assert first.type == "response.created"
        path = f"/v1/responses/{first.response.id}"
        assert server.get(path).json()["status"] == "in_progress"
        cancelled = server.post(f"{path}/cancel", {}).json()
        assert cancelled["status"] == "cancelled"
        last = list(stream)[-1]
        assert last.type == "response.incomplete"
        assert last.response.status == "cancelled"
        assert client.aborted == [first.response.id]
        assert server.get(path).json()["status"] == "cancelled"


def test_a_stream_that_is_deleted_goes_on_and_is_not_stored() -> None:
    client = FakeClient(lambda _: words("a", "b", "c"), by_hand=True)
    with serving(client) as server:
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
        client.allow(1)
        stream = api.responses.create(model="tiny", input="Hi", stream=True)
        first = next(stream)
        assert first.type == "response.created"
        path = f"/v1/responses/{first.response.id}"
        deleted = server.request("DELETE", path)
        assert deleted.json() == {"id": first.response.id, "object": "response", "deleted": True}
        assert server.get(path).status == 404
        client.allow(2)
        last = list(stream)[-1]
        assert last.type == "response.completed"
        assert last.response.output_text == "abc"
        assert server.get(path).status == 404
        assert server.request("DELETE", path).status == 404


def test_a_stream_that_has_ended_is_found_as_stored() -> None:
    """Also while its connection is still open."""
    client = FakeClient(lambda _: words("a", "b"))
    with serving(client) as server:
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
        stream = api.responses.create(model="tiny", input="Hi", stream=True)
        *_, last = iter(stream)
        assert last.type == "response.completed"
        found = server.get(f"/v1/responses/{last.response.id}").json()
        assert found["status"] == "completed"


def test_a_key_cannot_use_the_responses_of_another_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n", encoding="utf-8")
    client = FakeClient(lambda _: words("a", "b", "c"), by_hand=True)
    with serving(client, api_key_file=str(keys)) as server:
        url = f"{server.url}/v1"
        owner, other = (
            openai.OpenAI(base_url=url, api_key=f"{name}-key", max_retries=0)
            for name in ("first", "second")
        )
        client.allow(4)
        made = owner.responses.create(model="tiny", input="Hi")
        stream = owner.responses.create(model="tiny", input="Hi", stream=True)
        live = next(stream)
        assert live.type == "response.created"
        item: Any = {"type": "item_reference", "id": made.output[0].id}
        for response_id in (made.id, live.response.id):
            for use in (
                lambda name: other.responses.retrieve(name),
                lambda name: other.responses.delete(name),
                lambda name: other.responses.cancel(name),
                lambda name: other.responses.input_items.list(name),
                lambda name: other.responses.create(
                    model="tiny", input="x", previous_response_id=name
                ),
            ):
                with pytest.raises(openai.NotFoundError):
                    use(response_id)
        with pytest.raises(openai.BadRequestError, match="no stored item"):
            other.responses.create(model="tiny", input=[item])
        client.allow(6)
        assert list(stream)[-1].type == "response.completed"
        for response_id in (made.id, live.response.id):
            assert owner.responses.retrieve(response_id).status == "completed"
        owner.responses.create(model="tiny", input="x", previous_response_id=made.id)


def test_a_client_that_goes_away_ends_its_response() -> None:
    client = FakeClient(lambda _: words("a", "b", "c"), by_hand=True)
    with serving(client) as server:
        asked = {"input": "Hi", "stream": True}
        first = server.post_and_leave("/v1/responses", asked, lambda: client.allow(1))
        response_id = json.loads(first.partition(b"data: ")[2])["response"]["id"]
        wait_for(lambda: client.aborted == [response_id])
        wait_for(lambda: server.get(f"/v1/responses/{response_id}").status == 404)


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"tools": [{"type": "file_search"}, {"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search_preview"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}, {**NOW, "name": ""}]}, "tools[1].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools"),
        ({"tools": [{"type": "custom", "name": "patch"}]}, "tools[0].type"),
        ({"tools": [{**NOW, "name": ""}]}, "tools[0].name"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tools"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": "a", "tone": "b"}]}, "input[0].tone"),
        ({"input": [{"role": "boss", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"text": {"format": {"type": "text", "regex": "x"}}}, "text.format.regex"),
        (
            {"input": [{"type": "message", "role": "user", "content": [{}]}]},
            "input[0].content[0].type",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    server: Served, fields: dict[str, Any], param: str
) -> None:
    reply = server.post("/v1/responses", {"input": "Hi", **fields})
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param


def test_input_tokens_are_counted(api: openai.OpenAI, client: FakeClient) -> None:
    counted = api.responses.input_tokens.count(model="tiny", input="Hi", instructions="Be brief.")
    api.responses.create(model="tiny", input="Hi", instructions="Be brief.")
    assert counted.input_tokens == len(client.last.prompt_token_ids)
