"""Which request fields are taken, which have no effect, which are refused and how."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from paceline.errors import InvalidRequest
from paceline.server.conversation import checked_messages
from paceline.server.fields import parse
from paceline.server.messages_types import MessagesRequest
from paceline.server.requests import (
    NOT_BUILT,
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
    TokenizeText,
)
from paceline.server.responses_types import ResponsesRequest
from paceline.text.chat import ChatTemplate
from tests.server.fake_client import FakeClient
from tests.server.serving import Served

MESSAGES = [{"role": "user", "content": "Hi"}]

# As OpenAI's schema of August 2026 lists them.
OPENAI_CHAT = re.findall(
    r"\w+",
    """audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens
    max_tokens messages metadata modalities model moderation n parallel_tool_calls prediction
    presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort
    response_format safety_identifier seed service_tier stop store stream stream_options temperature
    tool_choice tools top_logprobs top_p user verbosity web_search_options""",
)
OPENAI_COMPLETIONS = re.findall(
    r"\w+",
    """best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt
    seed stop stream stream_options suffix temperature top_p user""",
)


def chat(**fields: Any) -> ChatRequest:
    return parse(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatRequest)


def refused(body: bytes, kind: type[msgspec.Struct] = ChatRequest) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body, kind)
    return caught.value


@pytest.mark.parametrize("name", OPENAI_CHAT)
def test_every_chat_field_of_openai_has_a_policy(name: str) -> None:
    known = ChatRequest.__struct_fields__
    assert (name in known) + (name in WITHOUT_EFFECT) + (name in NOT_BUILT) == 1


@pytest.mark.parametrize("name", OPENAI_COMPLETIONS)
def test_every_completion_field_of_openai_has_a_policy(name: str) -> None:
    known = CompletionRequest.__struct_fields__
    assert (name in known) + (name in WITHOUT_EFFECT) + (name in NOT_BUILT) == 1


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
@pytest.mark.parametrize("value", [None, "x", {"a": "b"}], ids=repr)
def test_fields_without_effect_are_accepted(name: str, value: object) -> None:
    assert chat(**{name: value}) == chat()


NOTHING = [(name, value) for name, values in NOT_BUILT.items() for value in (None, *values)]


@pytest.mark.parametrize(("name", "value"), NOTHING, ids=repr)
def test_an_unsupported_field_that_asks_for_nothing_is_accepted(name: str, value: object) -> None:
    assert chat(**{name: value}) == chat()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("moderation", {}),
        ("web_search_options", {}),
        ("verbosity", "low"),
        ("store", True),
        ("store", 0),  # not false
        ("suffix", "end"),
        ("best_of", 2),
        ("best_of", True),  # not 1
        ("use_beam_search", True),
        ("length_penalty", 0.5),
        ("guided_json", {"type": "object"}),
        ("truncate_prompt_tokens", 5),
        ("vllm_xargs", {"a": 1}),
    ],
    ids=repr,
)
def test_an_unsupported_field_is_refused_by_name(name: str, value: object) -> None:
    body = json.dumps({"messages": MESSAGES, name: value}).encode()
    error = refused(body)
    assert error.param == name
    assert name in str(error)
    assert "not supported" in str(error)


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("guided_json", {"type": "object"}, "Send structured_outputs.json."),
        ("guided_regex", "a+", "Send structured_outputs.regex."),
        ("request_id", "mine", "Send the X-Request-Id header."),
        ("num_ctx", 4096, "--max-model-len sets the context length."),
        ("enable_thinking", False, "chat_template_kwargs.enable_thinking."),
        ("extra_body", {"top_k": 3}, "beside the others, as the openai package does."),
    ],
)
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_a_field_of_another_server_says_what_to_send(
    kind: type[Any], name: str, value: object, hint: str
) -> None:
    asked = {"messages": MESSAGES} if kind is ChatRequest else {"prompt": "x"}
    error = refused(json.dumps({**asked, name: value}).encode(), kind)
    assert error.param == name
    assert str(error).endswith(hint)


def test_best_of_n_of_n_asks_for_nothing() -> None:
    body = {"prompt": "x", "n": 3, "best_of": 3}
    parsed = parse(json.dumps(body).encode(), CompletionRequest)
    assert msgspec.to_builtins(parsed)["n"] == 3
    assert refused(json.dumps(body | {"best_of": 1}).encode(), CompletionRequest).param == "best_of"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("top_logprob", "top_logprobs"),
        ("repition_penalty", "repetition_penalty"),
        ("chat_template_kwarg", "chat_template_kwargs"),
    ],
)
def test_an_unknown_field_names_the_nearest_one(name: str, near: str) -> None:
    error = refused(json.dumps({"messages": MESSAGES, name: 1}).encode())
    assert error.param == name
    assert f"Did you mean {near!r}?" in str(error)


@pytest.mark.parametrize("name", ["zzz" * 100, "topP", "penalty", "stop_sequences", "tokens"])
def test_a_name_like_no_other_is_refused_without_a_guess(name: str) -> None:
    error = refused(json.dumps({"messages": MESSAGES, name: 1}).encode())
    assert "Did you mean" not in str(error)
    assert len(str(error)) < 250


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        (CompletionRequest, "messages", "/v1/chat/completions"),
        (ChatRequest, "prompt", "/v1/completions"),
        (CompletionRequest, "max_completion_tokens", "Did you mean 'max_tokens'?"),
        (CompletionRequest, "top_logprobs", "Did you mean 'logprobs'?"),
    ],
)
def test_a_name_of_the_other_route_is_refused_with_what_to_do(
    kind: type[msgspec.Struct], name: str, says: str
) -> None:
    own = {"messages": MESSAGES} if kind is ChatRequest else {"prompt": "x"}
    error = refused(json.dumps({**own, name: 5}).encode(), kind)
    assert error.param == name
    assert says in str(error)


# What `message.model_dump()` of OpenAI's and of litellm's client gives for an answer of ours.
ECHOED_MESSAGES: list[dict[str, Any]] = [
    {
        "content": "Hello",
        "refusal": None,
        "role": "assistant",
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    },
    {
        "content": "Hello",
        "role": "assistant",
        "tool_calls": None,
        "function_call": None,
        "provider_specific_fields": {"refusal": None},
        "reasoning_content": None,
        "thinking_blocks": [{"type": "thinking"}],
        "images": None,
    },
    {"content": "Hello", "role": "assistant", "tool_calls": [], "made_up": None},
    {"content": "Hello", "role": "assistant", "cache_control": {"type": "ephemeral"}},
    {
        "content": [
            {"type": "text", "text": "Hel", "cache_control": {"type": "ephemeral"}},
            {"type": "output_text", "text": "lo", "annotations": [], "logprobs": [], "x": None},
        ],
        "role": "assistant",
    },
]


@pytest.mark.parametrize("message", ECHOED_MESSAGES, ids=lambda m: ",".join(sorted(m)))
def test_an_answer_that_a_client_sends_back_is_taken(
    server: Served, client: FakeClient, message: dict[str, Any]
) -> None:
    reply = server.chat(messages=[*MESSAGES, message, *MESSAGES])
    assert reply.status == 200, reply.body
    assert client.last.prompt == "<user>Hi<assistant>Hello<user>Hi<assistant>"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_of_an_answer_reaches_the_template_by_either_name(name: str) -> None:
    asked = chat(messages=[{"role": "assistant", "content": "x", name: "because"}])
    template = ChatTemplate("tiny", {"default": "{{ messages[0].reasoning_content }}"}, {})
    assert template.render(checked_messages(asked.messages)) == "because"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "x", "made_up": 0}, "messages[0].made_up"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
        (
            {"role": "assistant", "content": "x", "tool_calls": [{}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "made_up": 0}]},
            "messages[0].content[0].made_up",
        ),
    ],
)
def test_what_would_be_lost_in_a_message_is_refused(
    server: Served, message: dict[str, Any], param: str
) -> None:
    reply = server.chat(messages=[message])
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "x", "nme": "y"}]}, "messages[0].nme"),
        ({"messages": [{"role": "user", "content": "x", "type": "y"}]}, "messages[0].type"),
        ({"messages": MESSAGES, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": "x"}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({}, "messages"),
        ({"messages": MESSAGES, "max_tokens": "3"}, "max_tokens"),
        ({"messages": MESSAGES, "max_tokens": 3.5}, "max_tokens"),
        ({"messages": MESSAGES, "max_tokens": True}, "max_tokens"),
        ({"messages": MESSAGES, "temperature": "hot"}, "temperature"),
        ({"messages": MESSAGES, "stream": 1}, "stream"),
        ({"messages": MESSAGES, "stop": [1]}, "stop[0]"),
        ({"messages": MESSAGES, "stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"messages": MESSAGES, "logit_bias": {"a": 1}}, "logit_bias"),
        ({"messages": MESSAGES, "seed": 2**64}, "seed"),
        ({"messages": MESSAGES, "n": 10**40}, "n"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_type_names_its_path(fields: dict[str, Any], param: str) -> None:
    assert refused(json.dumps(fields).encode()).param == param


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        (ChatRequest, {"messages": [{"role": "x"}]}, "developer, user, assistant, tool, function."),
        (MessagesRequest, {"messages": [{"role": "tool"}]}, "it takes user, assistant, system."),
        (ResponsesRequest, {"input": [{"role": "tool"}]}, "user, assistant, system, developer."),
        (ResponsesRequest, {"truncation": "auto"}, "it takes disabled."),
        (ResponsesRequest, {"include": ["logprobs"]}, "it takes reasoning.encrypted_content, "),
        (ChatRequest, {"logit_bias": {"a": 1}}, "logit_bias: Expected 'int', got 'str' as a key."),
    ],
)
def test_a_value_that_is_not_on_the_list_is_answered_with_the_list(
    kind: type[Any], fields: dict[str, Any], says: str
) -> None:
    given = {} if kind is ResponsesRequest else {"messages": MESSAGES}
    assert says in str(refused(json.dumps({**given, **fields}).encode(), kind))


def test_a_whole_number_may_be_written_with_a_fraction() -> None:
    body = b'\xef\xbb\xbf{"messages": [], "max_tokens": 16.0, "top_k": 2e1, "temperature": 1}'
    asked = parse(body, ChatRequest)  # it begins with a byte order mark, too
    assert (asked.max_tokens, asked.top_k, asked.temperature) == (16, 20, 1.0)
    assert type(asked.max_tokens) is int


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"{", "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b'{"temperature": NaN}', "not JSON"),
        (b'{"temperature": -Infinity}', "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "\\ud800"}', "not JSON"),
        (b"[]", "an array"),
        (b'"x"', "a string"),
        (b"null", "null"),
        (b"true", "a boolean"),
        (b"3", "a number"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"messages": ' + b"[" * 100_000, "nested too deeply"),
    ],
    ids=lambda v: repr(v[:30]),
)
def test_a_broken_body_is_explained(body: bytes, says: str) -> None:
    assert says in str(refused(body))


@pytest.mark.parametrize("digits", [b"1e999", b"-1e999", b"9" * 400, b"9" * 6000])
@pytest.mark.parametrize("name", ["temperature", "max_tokens", "seed", "priority"])
def test_a_number_that_nothing_can_hold_names_its_field(name: str, digits: bytes) -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}], "%b": %b}' % (name.encode(), digits)
    assert refused(body).param == name


def test_a_huge_integer_in_free_form_arguments_is_refused() -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}], "extra_args": {"a": %b}}'
    assert refused(body % (b"9" * 6000)).param is not None


def test_the_policy_for_openai_fields_holds_for_generation_only() -> None:
    assert refused(b'{"prompt": "x", "user": "u"}', TokenizeText).param == "user"
