"""The official client against our server: it must find nothing odd."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import openai
import pytest

from tests.server.fake_client import FakeClient, words
from tests.server.serving import serving

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def api() -> Iterator[openai.OpenAI]:
    with (
        serving(FakeClient(), api_key="k") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as api,
    ):
        yield api


def test_chat(api: openai.OpenAI) -> None:
    reply = api.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1, n=2
    )
    assert [c.message.content for c in reply.choices] == ["Hello", "Hello"]
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.content is not None
    assert reply.choices[0].logprobs.content[0].token == "H"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 10
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream(api: openai.OpenAI) -> None:
    stream = api.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 5


def test_completions(api: openai.OpenAI) -> None:
    reply = api.completions.create(model="tiny", prompt=["a", "b"], logprobs=1, echo=True)
    assert [c.text for c in reply.choices] == ["aHello", "bHello"]
    assert reply.choices[1].logprobs is not None
    assert reply.choices[1].logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    stream = api.completions.create(model="tiny", prompt="a", stream=True)
    assert "".join(c.choices[0].text for c in stream) == "Hello"


def test_models(api: openai.OpenAI) -> None:
    assert [m.id for m in api.models.list()] == ["tiny"]
    assert api.models.retrieve("tiny").id == "tiny"


def test_extensions_go_through_extra_body(api: openai.OpenAI) -> None:
    reply = api.chat.completions.create(
        model="tiny", messages=MESSAGES, extra_body={"top_k": 5, "return_token_ids": True}
    )
    assert reply.model_extra is not None
    assert "prompt_token_ids" in reply.model_extra


def test_errors_are_the_clients_own_types(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        api.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        api.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        api.with_options(api_key="wrong").models.list()
    assert bad.value.request_id


def test_an_error_in_a_stream_is_raised() -> None:
    broken = FakeClient(lambda _: [*words("Hel", finish=None), *words("", finish="error")])
    with serving(broken) as server:
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
        stream = api.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "Hel"]
        with pytest.raises(openai.APIError, match="cannot go on"):
            next(stream)


def test_a_full_queue_is_retried_by_the_client() -> None:
    """Retry-After is understood: the client waits and its next try succeeds."""
    with serving(FakeClient()) as server:
        service = server.service
        service._num_open = service.options.max_waiting
        later = partial(server.loop.call_later, 0.3, lambda: setattr(service, "_num_open", 0))
        server.loop.call_soon_threadsafe(later)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=2) as api:
            reply = api.chat.completions.create(model="tiny", messages=MESSAGES)
        assert reply.choices[0].message.content == "Hello"
