"""Bodies of Responses and Messages as the chat requests that they mean."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.server import messages_input, responses_input
from paceline.server.as_chat import Translated
from paceline.server.fields import convert
from paceline.server.messages_types import MessagesRequest
from paceline.server.responses_types import ResponsesRequest
from tests.server.fake_client import FakeClient
from tests.server.serving import Served, serving

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def of_responses(**fields: Any) -> Translated:
    body = convert({"input": "Hi", **fields}, ResponsesRequest)
    return responses_input.translate(body, [], responses_input.own_items(body, lambda _: None))


def of_messages(**fields: Any) -> Translated:
    messages = [{"role": "user", "content": "Hi"}]
    body = convert({"max_tokens": 5, "messages": messages, **fields}, MessagesRequest)
    return messages_input.translate(body)


def test_the_format_of_text_becomes_a_response_format() -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    translated = of_responses(text={"format": form})
    assert translated.body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
    }
    assert translated.names["response_format"] == "text.format"
    form = {"type": "json_object"}
    assert of_responses(text={"format": form}).body["response_format"] == form
    assert "response_format" not in of_responses(text={"format": {"type": "text"}}).body


def test_the_format_of_a_message_becomes_a_response_format() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        schema = of_messages(**fields).body["response_format"]["json_schema"]
        assert (schema["schema"], schema["strict"]) == (SCHEMA, True)


def test_efforts_and_choices_have_chats_names() -> None:
    tools = [{"type": "function", "name": "f", "parameters": SCHEMA}]
    body = of_responses(
        reasoning={"effort": "low"},
        tools=tools,
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
    ).body
    assert body["reasoning_effort"] == "low"
    named = {"type": "function", "function": {"name": "f"}}
    assert (body["tool_choice"], body["parallel_tool_calls"]) == (named, False)
    own = [{"name": "f", "input_schema": SCHEMA}]
    for choice, meant in (
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, named),
    ):
        assert of_messages(tools=own, tool_choice=choice).body["tool_choice"] == meant
    alone = {"type": "auto", "disable_parallel_tool_use": True}
    assert of_messages(tools=own, tool_choice=alone).body["parallel_tool_calls"] is False


def test_a_deferred_tool_is_shown_once_a_result_names_it() -> None:
    tools = [{"name": "f", "input_schema": SCHEMA, "defer_loading": True}]
    tools += [{"name": "search", "input_schema": SCHEMA}]
    before = of_messages(tools=tools)
    assert [tool["function"]["name"] for tool in before.body["tools"]] == ["search"]
    assert before.names["tools[0].function"] == "tools[1]"
    found = {"type": "tool_reference", "tool_name": "f"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [found]}
    call = {"type": "tool_use", "id": "1", "name": "search", "input": {}}
    messages = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    after = of_messages(tools=tools, messages=messages).body
    assert [tool["function"]["name"] for tool in after["tools"]] == ["f", "search"]
    assert after["messages"][-1]["content"] == "The tool f can be called."


def test_items_of_one_turn_are_one_message_of_the_assistant() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    items = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"role": "assistant", "content": "I look."},
        call("a"),
        call("b"),
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": "2"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]
    translated = of_responses(input=items)
    messages = translated.body["messages"]
    roles = [message["role"] for message in messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "assistant"]
    assert messages[1]["reasoning_content"] == "Hm."
    assert messages[1]["content"] == "I look."
    assert [c["id"] for c in messages[1]["tool_calls"]] == ["a", "b"]
    assert translated.names["messages[2]"] == "input[5]"


def test_errors_of_the_chat_request_have_the_clients_paths(server: Served) -> None:
    long = {"type": "function_call_output", "call_id": "x" * 300, "output": ""}
    reply = server.post("/v1/responses", {"input": [{"role": "user", "content": "a"}, long]})
    assert reply.error["param"] == "input[1].tool_call_id"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_both_apis_take_vllms_structured_outputs(path: str) -> None:
    client = FakeClient()
    with serving(client) as server:
        body = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
        form: dict[str, Any] = {
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}
        }
        if path == "/v1/responses":
            body = {"input": "Hi"}
            form = {"text": {"format": {"type": "json_object"}}}

        def refused(**fields: Any) -> str:
            reply = server.post(path, {**body, **fields})
            assert reply.status == 400
            return str(reply.json()["error"]["message"])

        choice = {"choice": ["a", "b"]}
        assert server.post(path, {**body, "structured_outputs": choice}).status == 200
        wanted = client.last.params.structured_outputs
        assert wanted is not None
        assert wanted.choice == ("a", "b")
        assert "send one of them" in refused(structured_outputs=choice, **form)
        assert "structured_outputs" in refused(structured_outputs={"choice": []})
        # Names of other servers have the same hints as in chat completions.
        assert refused(guided_choice=["a"]).endswith("Send structured_outputs.choice.")
        assert refused(request_id="x").endswith("Send the X-Request-Id header.")
        assert refused(num_ctx=10).endswith("--max-model-len sets the context length.")
