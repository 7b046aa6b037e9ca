"""Whole chat replies: their shape, their prompt, their logprobs and accounts."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.engine.outputs import Delta
from tests.server.fake_client import Asked, FakeClient, Steps, ids_of, table, words
from tests.server.serving import Served, serving


def prompt_of(client: FakeClient) -> str:
    return client.tokenizer.decode(client.last.prompt_token_ids)


def test_the_reply_has_openais_shape(server: Served, client: FakeClient) -> None:
    body = server.chat(model="tiny").json()
    created, fingerprint = body.pop("created"), body.pop("system_fingerprint")
    assert isinstance(created, int)
    assert fingerprint.startswith("fp_")
    assert body.pop("id").startswith("chatcmpl-")
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(client.last.prompt_token_ids),
            "completion_tokens": 5,
            "total_tokens": len(client.last.prompt_token_ids) + 5,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
    }


def test_messages_go_through_the_template(server: Served, client: FakeClient) -> None:
    server.chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "refusal": "no"},
            {"role": "user", "content": "Hi", "name": "Bo"},
        ]
    )
    assert prompt_of(client) == "<system>Be brief.<user>ab<assistant>no<user>Hi<assistant>"
    server.chat(add_generation_prompt=False, chat_template_kwargs={"extra": "more"})
    assert prompt_of(client) == "<user>Hi[more]"


def test_the_final_message_can_be_continued_and_echoed(server: Served, client: FakeClient) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    body = server.chat(messages=messages, continue_final_message=True).json()
    assert prompt_of(client) == "<user>Hi<assistant>Well, "
    assert body["choices"][0]["message"]["content"] == "Hello"
    body = server.chat(messages=messages, continue_final_message=True, echo=True).json()
    assert body["choices"][0]["message"]["content"] == "Well, Hello"


def test_a_template_of_the_request_needs_trust(client: FakeClient) -> None:
    with serving(client, trust_request_chat_template=True) as server:
        assert server.chat(chat_template="{{ messages[0].content }}!").status == 200
        assert prompt_of(client) == "Hi!"
        for bad in ("/etc/passwd", "{% if %}"):
            reply = server.chat(chat_template=bad)
            assert (reply.status, reply.error["param"]) == (400, "chat_template")


def test_the_servers_own_template_replaces_the_models(client: FakeClient) -> None:
    with serving(client, chat_template="{{ messages[0].content }}?") as server:
        assert server.chat().status == 200
        assert prompt_of(client) == "Hi?"


def test_a_prompt_too_long_is_a_context_length_error(server: Served) -> None:
    reply = server.chat(messages=[{"role": "user", "content": "x" * 5000}])
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"
    assert reply.error["param"] == "messages"


def test_n_choices_come_in_order(server: Served) -> None:
    body = server.chat(n=3).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 15


def with_logprobs(asked: Asked) -> Steps:
    (h,), e = ids_of("H"), ids_of("é")
    first = Delta(0, "H", [h], logprobs=[table(h, (1, -0.75), (2, -2.0), value=-0.25)])
    # The sampled token is not among the two likeliest.
    odd = table(e[0], (1, -0.5), (2, -1.0), value=-7.0)
    low = table(e[1], value=float("-inf"))
    second = Delta(0, "é", e, logprobs=[odd, low], finish_reason="length")
    return [[first], [second]]


def test_logprobs_show_tokens_bytes_and_the_likeliest() -> None:
    client = FakeClient(with_logprobs)
    with serving(client) as server:
        choice = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]
    assert client.last.params.logprobs == 2
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert content[0] == {
        "token": "H",
        "logprob": -0.25,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -0.25, "bytes": [72]},
            {
                "token": client.tokenizer.token_text(1),
                "logprob": -0.75,
                "bytes": list(client.tokenizer.token_bytes(1)),
            },
        ],
    }
    assert [t["logprob"] for t in content[1]["top_logprobs"]] == [-0.5, -1.0]
    assert content[1]["logprob"] == -7.0
    assert content[1]["token"] == "\ufffd"
    assert bytes(content[1]["bytes"] + content[2]["bytes"]) == "é".encode()
    assert content[2]["logprob"] == -9999.0  # JSON has no infinity


def test_logprobs_without_top_ones_are_still_there() -> None:
    client = FakeClient(with_logprobs)
    with serving(client) as server:
        choice = server.chat(logprobs=True).json()["choices"][0]
    assert client.last.params.logprobs == 0
    assert [t["top_logprobs"] for t in choice["logprobs"]["content"]] == [[], [], []]


def test_token_ids_and_prompt_logprobs_on_request(server: Served, client: FakeClient) -> None:
    body = server.chat(return_token_ids=True, prompt_logprobs=1).json()
    assert body["prompt_token_ids"] == client.last.prompt_token_ids
    assert body["choices"][0]["token_ids"] == ids_of("Hello")
    assert body["prompt_logprobs"][0] is None
    second = client.last.prompt_token_ids[1]
    expected = {"logprob": -0.5, "rank": 1, "decoded_token": client.tokenizer.token_text(second)}
    assert body["prompt_logprobs"][1] == {str(second): expected}
    assert len(body["prompt_logprobs"]) == len(client.last.prompt_token_ids)


@pytest.mark.parametrize("stop_reason", ["END", 7])
def test_stop_reason_says_which_stop_it_was(stop_reason: int | str) -> None:
    with serving(FakeClient(lambda _: words("Hi", stop_reason=stop_reason))) as server:
        choice = server.chat().json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop_reason)


def counted(n: int, **metrics: int) -> dict[str, Any]:
    def script(asked: Asked) -> Steps:
        for name, value in metrics.items():
            setattr(asked.generation.metrics, name, value)
        steps = [words("ab", index=i) for i in range(n)]
        return [deltas for step in steps for deltas in step]

    with serving(FakeClient(script)) as server:
        usage: dict[str, Any] = server.complete(prompt="x" * 32, n=n).json()["usage"]
        return usage


def test_usage_counts_drafts_and_cached_tokens() -> None:
    usage = counted(1, num_draft_tokens=9, num_accepted_tokens=4, num_cached_tokens=16)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    details = {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 4,
        "rejected_prediction_tokens": 5,
    }
    assert usage["completion_tokens_details"] == details


def test_usage_of_n_counts_the_prompt_once_and_not_what_siblings_share() -> None:
    usage = counted(3, num_cached_tokens=0 + 31 + 31)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (32, 6)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    usage = counted(3, num_cached_tokens=31 + 31 + 31)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 29}
