"""How the fields of a request become sampling parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from paceline.errors import InvalidRequest
from paceline.request import SamplingParams
from paceline.server.fields import parse
from paceline.server.params import chat_params, completion_params
from paceline.server.requests import (
    ChatRequest,
    CompletionRequest,
    GenerateFields,
    _with_sampling_params,
)
from tests.server.fake_client import FakeClient
from tests.server.serving import Served
from tests.server.test_fields import chat, refused

SAME: dict[str, Any] = {
    "n": 2,
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.125,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1.5},
    "bad_words": ["no"],
    "allowed_token_ids": [1, 2],
    "min_tokens": 3,
    "max_tokens": 9,
    "stop": ["END"],
    "stop_token_ids": [4],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "seed": -5,
    "prompt_logprobs": 2,
    "skip_special_tokens": False,
    "logits_processors": ["mod:Class"],
    "extra_args": {"a": [1]},
    "num_speculative_tokens": 1,
    "speculative": {"method": "ngram"},
}


def test_every_sampling_field_arrives(server: Served, client: FakeClient) -> None:
    assert server.complete(**SAME, priority=4).status == 200
    expected = SamplingParams(**{**SAME, "logit_bias": {5: 1.5}})
    assert client.last.params == expected
    assert client.last.priority == 4
    assert server.chat(**SAME).status == 200
    assert client.last.params == expected


def test_every_field_of_sampling_params_can_be_asked_for() -> None:
    """Those of SamplingParams that a request does not name are not for HTTP."""
    fields = set(SamplingParams.__dataclass_fields__)
    named = set(GenerateFields.__struct_fields__)
    assert fields - named == {"detokenize", "logprobs"}  # logprobs differ by endpoint


def test_openai_defaults_apply_where_a_body_is_silent() -> None:
    asked = parse(b'{"prompt": "x"}', CompletionRequest)
    assert completion_params(asked, {}) == SamplingParams(temperature=1.0, max_tokens=16)
    assert chat_params(chat(), {}) == SamplingParams(temperature=1.0, max_tokens=None)


def test_model_defaults_come_before_openai_and_after_the_request() -> None:
    defaults = {"temperature": 0.2, "top_k": 5, "max_tokens": 99}
    params = chat_params(chat(top_k=6), defaults)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.2, 6, 99)
    asked = parse(b'{"prompt": "x", "max_tokens": 3, "temperature": 0}', CompletionRequest)
    assert completion_params(asked, defaults) == SamplingParams(
        temperature=0, top_k=5, max_tokens=3
    )


def test_null_is_as_good_as_absent() -> None:
    every = dict.fromkeys(n for n in ChatRequest.__struct_fields__ if n != "messages")
    assert chat_params(chat(**every), {"top_k": 3}) == chat_params(chat(), {"top_k": 3})


def test_max_completion_tokens_is_the_new_name_of_max_tokens() -> None:
    assert chat_params(chat(max_completion_tokens=7), {}).max_tokens == 7
    assert chat_params(chat(max_completion_tokens=7, max_tokens=7), {}).max_tokens == 7
    with pytest.raises(InvalidRequest) as caught:
        chat_params(chat(max_completion_tokens=7, max_tokens=8), {})
    assert caught.value.param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": -3, "logprobs": True}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"echo": True}, "echo"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_value_out_of_place_is_a_400_with_its_param(
    server: Served, fields: dict[str, Any], param: str
) -> None:
    reply = server.chat(**fields)
    assert reply.status == 400
    assert reply.error["param"] == param
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"logprobs": True, "top_logprobs": -3}, "top_logprobs is -3;"),
        ({"max_completion_tokens": 0}, "max_completion_tokens is 0;"),
        ({"max_tokens": 0}, "max_tokens is 0;"),
    ],
)
def test_an_error_calls_a_field_as_the_client_did(
    server: Served, fields: dict[str, Any], says: str
) -> None:
    assert server.chat(**fields).error["message"].startswith(says)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_sampling_parameter_is_a_field(kind: type[msgspec.Struct]) -> None:
    """Whoever adds one to SamplingParams changes no file of the server."""
    params = {field.name for field in dataclasses.fields(SamplingParams)}
    assert params - {*kind.__struct_fields__} == {"detokenize"}


def test_a_new_sampling_parameter_is_a_field_of_its_json_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wider = dataclasses.make_dataclass(
        "Wider",
        [("cap", "float | None", None), ("table", "Mapping[int, float] | None", None)],
        bases=(SamplingParams,),
        frozen=True,
        kw_only=True,
    )
    monkeypatch.setattr("paceline.server.requests.SamplingParams", wider)
    kind = _with_sampling_params(GenerateFields)
    parsed = parse(b'{"cap": 2.5, "table": {"7": 1}}', kind)
    assert (parsed.cap, parsed.table) == (2.5, {7: 1.0})  # type: ignore[attr-defined]
    assert refused(b'{"cap": "x"}', kind).param == "cap"
