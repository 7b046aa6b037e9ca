"""Text completions: the four forms of a prompt, echo, the legacy logprobs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.engine.outputs import Delta
from tests.server.fake_client import Asked, FakeClient, Steps, ids_of, table, words
from tests.server.serving import Served, serving


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", ["Hi"]),
        (["Hi", "yo"], ["Hi", "yo"]),
        (ids_of("Hi"), ["Hi"]),
        ([ids_of("Hi"), ids_of("yo")], ["Hi", "yo"]),
    ],
    ids=["text", "texts", "ids", "lists"],
)
def test_the_four_forms_of_a_prompt(prompt: Any, expected: list[str]) -> None:
    client = FakeClient()
    with serving(client) as server:
        body = server.complete(prompt=prompt).json()
    assert [a.prompt_token_ids for a in client.asked] == [ids_of(t) for t in expected]
    assert [c["text"] for c in body["choices"]] == ["Hello"] * len(expected)
    assert [c["index"] for c in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == 2 * len(expected)
    assert body["object"] == "text_completion"
    assert len({a.request_id for a in client.asked}) == len(expected)


@pytest.mark.parametrize(
    "prompt", [[], "", [""], [[]], ["a", 1], [1, [2]], [["a"]], [[1], "a"], None, 5, [-1], [2**31]]
)
def test_a_prompt_of_no_form_is_refused(server: Served, prompt: Any) -> None:
    reply = server.complete(prompt=prompt)
    assert reply.status == 400
    assert reply.error["param"].startswith("prompt")


def test_one_bad_prompt_of_several_submits_none() -> None:
    client = FakeClient()
    with serving(client) as server:
        assert server.complete(prompt=["good", "x" * 5000]).status == 400
        assert client.asked == []
        assert server.complete(prompt="good").status == 200


def test_choices_of_several_prompts_are_numbered_through(server: Served) -> None:
    body = server.complete(prompt=["a", "b"], n=2).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"] | {"prompt_tokens": 2, "completion_tokens": 20} == body["usage"]


def test_echo_puts_the_prompt_before_the_text(server: Served) -> None:
    body = server.complete(prompt=["Hi ", "yo "], echo=True).json()
    assert [c["text"] for c in body["choices"]] == ["Hi Hello", "yo Hello"]
    assert (
        server.complete(prompt=ids_of("Hi "), echo=True).json()["choices"][0]["text"] == "Hi Hello"
    )


def scored(asked: Asked) -> Steps:
    """The prompt's tokens at -1, -2, ...; the output's at -0.5."""
    ids = asked.prompt_token_ids
    prompt: list[Any] = [None]
    prompt += [table(t, (3, -0.125), value=-float(i)) for i, t in enumerate(ids[1:], 1)]
    steps = []
    for index in range(asked.params.n):
        out = ids_of("é!")
        delta = Delta(index, "é!", out, logprobs=[table(t) for t in out], finish_reason="length")
        if index == 0 and asked.params.prompt_logprobs is not None:
            delta.prompt_logprobs = prompt
        steps.append([delta])
    return steps


def test_echoed_logprobs_cover_prompt_and_output() -> None:
    client = FakeClient(scored)
    with serving(client) as server:
        choice = server.complete(prompt="aéb", echo=True, logprobs=1).json()["choices"][0]
    assert client.last.params.prompt_logprobs == 1
    logprobs = choice["logprobs"]
    assert choice["text"] == "aébé!"
    assert logprobs["tokens"] == [
        "a",
        "bytes:\\xc3",
        "bytes:\\xa9",
        "b",
        "bytes:\\xc3",
        "bytes:\\xa9",
        "!",
    ]
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -3.0, -0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 3, 4]
    third = client.tokenizer.token_text(3)
    assert logprobs["top_logprobs"][0] is None
    # One likeliest, and the token itself as OpenAI always shows it.
    assert logprobs["top_logprobs"][3] == {third: -0.125, "b": -3.0}


def test_max_tokens_0_with_echo_scores_the_prompt_alone() -> None:
    client = FakeClient(scored)
    with serving(client) as server:
        body = server.complete(prompt="abc", echo=True, logprobs=1, max_tokens=0).json()
        assert client.last.params.max_tokens == 1
        assert body["choices"][0]["text"] == "abc"
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
        assert body["usage"]["completion_tokens"] == 0
        stream = server.complete(prompt="abc", echo=True, max_tokens=0, stream=True).body
        texts = [json.loads(e[6:])["choices"][0]["text"] for e in stream.split(b"\n\n")[:-2]]
        assert texts == ["abc", ""]
        assert server.complete(prompt="abc", max_tokens=0).error["param"] == "max_tokens"


def test_every_choice_of_n_shows_the_prompts_logprobs() -> None:
    with serving(FakeClient(scored)) as server:
        choices = server.complete(prompt="ab", echo=True, logprobs=0, n=2).json()["choices"]
    assert [c["logprobs"]["token_logprobs"][:2] for c in choices] == [[None, -1.0]] * 2


def test_logprobs_0_shows_the_token_itself() -> None:
    with serving(FakeClient(scored)) as server:
        logprobs = server.complete(prompt="ab", logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][2] == {"!": -0.5}
    assert logprobs["text_offset"] == [0, 0, 1]


def test_vllm_extras_sit_in_the_choice(server: Served, client: FakeClient) -> None:
    choice = server.complete(return_token_ids=True, prompt_logprobs=0).json()["choices"][0]
    assert choice["prompt_token_ids"] == ids_of("Hi")
    assert choice["token_ids"] == ids_of("Hello")
    assert choice["prompt_logprobs"][0] is None
    assert list(choice["prompt_logprobs"][1]) == [str(ids_of("i")[0])]


def test_special_tokens_are_added_unless_told_not_to(server: Served, client: FakeClient) -> None:
    server.complete(prompt="Hi", add_special_tokens=False)
    assert client.last.prompt_token_ids == ids_of("Hi")


def test_a_special_token_left_out_of_the_text_takes_no_room_in_it() -> None:
    end = 256

    def script(asked: Asked) -> Steps:
        ids = [*ids_of("a"), end, *ids_of("b")]
        return [[Delta(0, "ab", ids, [table(t) for t in ids], "length")]]

    with serving(FakeClient(script)) as server:
        shown = server.complete(logprobs=0).json()["choices"][0]["logprobs"]
        assert (shown["tokens"], shown["text_offset"]) == (["a", "<end>", "b"], [0, 1, 1])
        shown = server.complete(logprobs=0, skip_special_tokens=False).json()["choices"][0]
        assert shown["logprobs"]["text_offset"] == [0, 1, 6]


def test_an_engine_error_is_a_500_that_says_why() -> None:
    with serving(FakeClient(lambda _: words("x", finish="error"))) as server:
        reply = server.complete()
    assert reply.status == 500
    assert reply.error["type"] == "server_error"
