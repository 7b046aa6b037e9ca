"""return_token_sources: where each token of a reply came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.engine.outputs import Generation, SequenceOutput, TokenSource
from paceline.request import Done, EngineRequest, RequestMetrics, SamplingParams
from tests.engine.echo_client import byte_tokenizer, echo_client
from tests.server.serving import Served, serving

LONG = {"max_tokens": 20, "ignore_eos": True, "return_token_sources": True}


@pytest.fixture(scope="module")
def drafting() -> Iterator[Served]:
    """The echo runner with two drafts per step, all of which are right."""
    with echo_client("k=2") as client, serving(client) as served:
        yield served


def chunks(server: Served, **fields: Any) -> list[dict[str, Any]]:
    lines = server.complete(stream=True, **fields).body.decode().split("\n\n")
    events = [line[6:] for line in lines if line.startswith("data: ")]
    return [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]


def test_every_token_has_its_text_and_its_source(drafting: Served) -> None:
    choice = drafting.complete(**LONG, prompt="abcd").json()["choices"][0]
    tokens = choice["token_sources"]
    assert "".join(t["token"] for t in tokens) == choice["text"]
    sources = [t["source"] for t in tokens]
    assert len(sources) == 20
    # The first token follows the prompt; then two drafts and the token after them, step by step.
    assert set(sources) == {"draft", "drawn"}
    first = sources.index("draft")
    steady = sources[first:]
    assert steady == (["draft", "draft", "drawn"] * 10)[: len(steady)]


def test_chunks_have_the_sources_of_the_whole_reply(drafting: Served) -> None:
    whole = drafting.complete(**LONG, prompt="abcd").json()["choices"][0]["token_sources"]
    streamed = chunks(drafting, **LONG, prompt="abcd")
    assert [t for c in streamed for t in c.get("token_sources", ())] == whole


def test_without_drafts_every_token_is_drawn(drafting: Served) -> None:
    choice = drafting.complete(**LONG, num_speculative_tokens=0).json()["choices"][0]
    assert {t["source"] for t in choice["token_sources"]} == {"drawn"}


def test_nothing_is_shown_unless_it_is_asked_for(drafting: Served) -> None:
    assert "token_sources" not in drafting.complete(max_tokens=4).json()["choices"][0]
    assert not any("token_sources" in c for c in chunks(drafting, max_tokens=4))


def test_sources_end_where_a_stop_string_ends_the_output(drafting: Served) -> None:
    choice = drafting.complete(**LONG, prompt="abcd", stop="cd").json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert len(choice["token_sources"]) == 4  # "cd" was sampled, and is no text
    assert choice["text"] == "ab"


@pytest.mark.parametrize(
    ("num_tokens", "num_accepted", "num_forced", "expected"),
    [
        (3, 2, 0, ["draft", "draft", "drawn"]),
        (3, 2, 2, ["forced", "forced", "drawn"]),
        (1, 0, 0, ["drawn"]),
        (2, 3, 0, ["draft", "draft"]),  # the output ends within the drafts
        (0, 0, 0, []),
    ],
)
def test_accepted_drafts_come_first(
    num_tokens: int, num_accepted: int, num_forced: int, expected: list[TokenSource]
) -> None:
    metrics = RequestMetrics(arrival_time=0.0)
    generation = Generation("r", None, [1], SamplingParams(), lambda _: None, metrics)
    generation.wants_sources = True
    request = EngineRequest(1, [1], SamplingParams())
    output = SequenceOutput(generation, 0, request, byte_tokenizer(), ())
    delta = output.take([5] * num_tokens, Done.RUNNING, None)
    output.name_sources(delta, num_accepted, num_forced)
    assert delta.sources == expected
