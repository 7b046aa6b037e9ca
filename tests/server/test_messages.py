"""/v1/messages with the official client: blocks, events, tools, and Anthropic's errors."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from paceline.server import generate
from tests.patience import wait_for
from tests.server.fake_client import Asked, FakeClient, Steps, ids_of, words
from tests.server.serving import JSON, Served, serving
from tests.server.test_tools import CALL, SECOND, THINKING, saying

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USER: Any = {"role": "user", "content": "Hi"}
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 64, "messages": [USER]}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
NOW: Any = {"name": "now", "input_schema": {"type": "object"}}
EDITS = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
THOUGHT = {"type": "thinking", "thinking": ""}
THINKS: dict[str, Any] = {"chat_template": THINKING}
# The fields that Claude Code 2.1 sends.
CLAUDE_CODE: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"},
                {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "Available agent types: none."},
    ],
    "system": [
        {"type": "text", "text": "You are an agent."},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [WEATHER, NOW],
    "metadata": {"user_id": "{}"},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive", "display": "updates"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}


def events_of(server: Served, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked against the official types."""
    reply = server.post("/v1/messages?beta=true", {**ASKED, "stream": True, **fields})
    assert reply.status == 200, reply.body
    events = []
    for frame in reply.body.decode().split("\n\n"):
        if frame:
            name, data = frame.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            if event["type"] not in ("ping", "error"):
                EVENT.validate_python(event)
            events.append(event)
    return events


def prompt_of(client: FakeClient) -> str:
    return client.tokenizer.decode(client.last.prompt_token_ids)


def test_a_message_has_the_official_shape(server: Served, client: FakeClient) -> None:
    fields = {"system": "Be brief.", "stop_sequences": ["x"], "top_k": 3, "temperature": 0.5}
    body = server.post("/v1/messages", {**ASKED, **fields}).json()
    Message.model_validate(body)
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(client.last.prompt_token_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 5,
        },
    }
    assert prompt_of(client) == "<system>Be brief.<user>Hi<assistant>"
    params = client.last.params
    assert (params.stop_strings, params.top_k, params.max_tokens) == (("x",), 3, 64)


def test_the_events_of_text_come_in_the_official_order(server: Served) -> None:
    events = events_of(server)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == []
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 5


def test_cached_tokens_are_not_counted_twice() -> None:
    def script(asked: Asked) -> Steps:
        asked.generation.metrics.num_cached_tokens = 10
        return words("Hi")

    client = FakeClient(script)
    with serving(client) as server:
        usage = server.post("/v1/messages", ASKED).json()["usage"]
    assert usage["cache_read_input_tokens"] == 10
    assert usage["input_tokens"] == len(client.last.prompt_token_ids) - 10


@pytest.mark.parametrize(
    ("finish", "stop", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("stop", 7, ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
    ],
)
def test_the_stop_reason_says_why(finish: str, stop: Any, expected: tuple[str, str]) -> None:
    with serving(FakeClient(lambda _: words("a", finish=finish, stop_reason=stop))) as server:
        body = server.post("/v1/messages", ASKED).json()
    assert (body["stop_reason"], body["stop_sequence"]) == expected


@pytest.mark.parametrize("size", [1, 4, 500])
def test_thinking_text_and_calls_are_blocks_in_windows_of_any_size(size: int) -> None:
    text = f"<think>Paris.</think>\n\nI look.\n{CALL}\n{SECOND}"
    with serving(FakeClient(saying(text, size=size)), **THINKS) as server:
        api = anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0)
        with api.messages.stream(**ASKED, tools=[WEATHER, NOW]) as stream:
            message = stream.get_final_message()
        whole = server.post("/v1/messages", {**ASKED, "tools": [WEATHER, NOW]}).json()
        events_of(server, tools=[WEATHER, NOW])
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.stop_reason == "tool_use"
    for thinking, words_said, call, _ in (message.content, Message.model_validate(whole).content):
        assert thinking.type == "thinking"
        assert (thinking.thinking, thinking.signature) == ("Paris.", "unsigned")
        assert words_said.type == "text"
        assert words_said.text == "I look."
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("get_weather", {"city": "Paris"})


def test_a_tool_loop_with_the_official_client() -> None:
    def script(asked: Asked) -> Steps:
        prompt = FakeClient().tokenizer.decode(asked.prompt_token_ids)
        return saying("Sunny." if "<|im_start|>tool\n21 C" in prompt else CALL)(asked)

    client = FakeClient(script)
    with serving(client, **THINKS) as server:
        api = anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0)
        first = api.messages.create(**ASKED, tools=[WEATHER])
        (call,) = first.content
        assert call.type == "tool_use"
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "21 C"}
        turn: list[Any] = [
            USER,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        second = api.messages.create(**{**ASKED, "messages": turn}, tools=[WEATHER])
        assert second.content[0].type == "text"
        assert second.content[0].text == "Sunny."
        assert '"city": "Paris"' in prompt_of(client)
        result["is_error"] = True
        server.post("/v1/messages", {**ASKED, "messages": [USER, {**USER, "content": [result]}]})
        assert "<|im_start|>tool\nError: 21 C" in prompt_of(client)


def test_claude_code_is_understood() -> None:
    client = FakeClient(saying(CALL))
    with serving(client, **THINKS) as server:
        events = events_of(server, **CLAUDE_CODE)
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        prompt = prompt_of(client)
        assert "You are an agent.\n\nBe brief." in prompt
        assert "Available agent types: none." in prompt
        assert "[high]" in prompt
        assert server.request("HEAD", "/").status == 200


def test_thinking_can_be_switched(server: Served) -> None:
    client = FakeClient()
    with serving(client, **THINKS) as server:
        for thinking, is_off in (
            ({"type": "disabled"}, True),
            ({"type": "enabled", "budget_tokens": 1024}, False),
            ({"type": "adaptive"}, False),
        ):
            assert server.post("/v1/messages", {**ASKED, "thinking": thinking}).status == 200
            assert prompt_of(client).endswith("<think>\n\n</think>\n\n") == is_off


@pytest.mark.parametrize(("display", "is_shown"), [("updates", True), ("omitted", False)])
def test_thinking_can_be_left_out_of_the_reply(display: str, is_shown: bool) -> None:
    thinking = {"type": "adaptive", "display": display}
    with serving(FakeClient(saying("<think>Hm.</think>Yes.")), **THINKS) as server:
        reply = server.post("/v1/messages", {**ASKED, "thinking": thinking}).json()
        thought, text = reply["content"]
        assert (thought["thinking"], text["text"]) == ("Hm." if is_shown else "", "Yes.")
        assert ("thinking_delta" in str(events_of(server, thinking=thinking))) == is_shown


def test_a_last_message_of_the_assistant_is_continued(server: Served, client: FakeClient) -> None:
    begun = {"role": "assistant", "content": "Well, "}
    body = server.post("/v1/messages", {**ASKED, "messages": [USER, begun]}).json()
    assert prompt_of(client) == "<user>Hi<assistant>Well, "
    assert body["content"][0]["text"] == "Hello"


def test_tokens_are_counted(server: Served, client: FakeClient) -> None:
    api = anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0)
    counted = api.messages.count_tokens(model="tiny", messages=[USER], system="Be brief.")
    assert counted.input_tokens == len(ids_of("<system>Be brief.<user>Hi<assistant>"))


def test_a_silent_stream_sends_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "PING_INTERVAL_S", 0.05)
    client = FakeClient(by_hand=True)
    with serving(client) as server:
        api = anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0)
        stream = api.messages.create(**ASKED, stream=True)
        assert next(stream).type == "message_start"
        client.allow(2)
        assert [event.type for event in stream][-1] == "message_stop"


def test_a_client_that_goes_away_ends_its_message() -> None:
    client = FakeClient(lambda _: words("a", "b", "c"), by_hand=True)
    with serving(client) as server:
        asked = {**ASKED, "stream": True}
        first = server.post_and_leave("/v1/messages", asked, lambda: client.allow(1))
        assert first.startswith(b"event: message_start")
        wait_for(lambda: len(client.aborted) == 1)


# ---- errors


def error_of(server: Served, path: str = "/v1/messages", **fields: Any) -> tuple[int, str, str]:
    body = {name: v for name, v in {**ASKED, **fields}.items() if v != "absent"}
    reply = server.post(path, body)
    error = reply.json()
    assert list(error) == ["type", "error"]
    assert error["type"] == "error"
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    return reply.status, error["error"]["type"], error["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"max_tokens": "absent"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["x"]}, "stop"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"thinking": {"type": "endless"}}, "thinking.type"),
        ({"tool_choice": {"type": "many"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{**NOW, "name": ""}]}, "tools[0].name"),
        (EDITS, "context_management.edits[0]"),
        ({"messages": [{**USER, "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{**USER, "content": [THOUGHT]}]}, "messages[0].content[0]"),
        ({"messages": [{**USER, "mood": "x"}]}, "messages[0].mood"),
        ({"messages": []}, "messages"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    server: Served, fields: dict[str, Any], path: str
) -> None:
    status, kind, message = error_of(server, **fields)
    assert (status, kind) == (400, "invalid_request_error")
    assert path in message


def test_every_error_has_anthropics_shape(server: Served) -> None:
    assert error_of(server, model="other")[:2] == (404, "not_found_error")
    assert error_of(server, path="/v1/messages/other")[:2] == (404, "not_found_error")
    assert error_of(server, path="/v1/messages/batches")[2].endswith("See /docs.")
    assert server.request("GET", "/v1/messages").json()["type"] == "error"
    with serving(FakeClient(), max_request_bytes=64) as small:
        assert error_of(small, system="x" * 100)[:2] == (413, "request_too_large")
    with serving(FakeClient(), api_key="k") as locked:
        assert error_of(locked)[:2] == (401, "authentication_error")
        for headers in ({"x-api-key": "k"}, {"Authorization": "Bearer k"}):
            body = json.dumps(ASKED)
            assert locked.request("POST", "/v1/messages", body, {**JSON, **headers}).status == 200
        wrong = locked.request("POST", "/v1/messages", "{}", {**JSON, "x-api-key": "l"})
        assert wrong.status == 401
    with serving(FakeClient()) as full:
        full.service._num_open = full.service.options.max_waiting
        assert error_of(full)[:2] == (429, "rate_limit_error")
    with serving(None) as loading:
        assert error_of(loading)[:2] == (503, "overloaded_error")


def test_a_stream_that_fails_says_so_in_an_event() -> None:
    broken = FakeClient(lambda _: [*words("Hel", finish=None), *words("", finish="error")])
    with serving(broken) as server:
        last = events_of(server)[-1]
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        api = anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0)
        with pytest.raises(anthropic.APIError, match="cannot go on"):
            list(api.messages.create(**ASKED, stream=True))
