"""Bodies that ask for too much: each is answered 400 by name, and the event loop goes on."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from paceline.errors import NotFound
from paceline.server import generate
from paceline.server.limits import LIMITS, MAX_CONTAINERS, MAX_MEMBERS, MAX_VALUES, Limit
from paceline.server.requests import (
    ChatRequest,
    CompletionRequest,
    Detokenize,
    TokenizeChat,
    TokenizeText,
)
from paceline.server.start_queue import StartQueue
from paceline.text import template_child
from paceline.text.chat import ChatTemplate
from paceline.text.tokenizer import Tokenizer
from tests.engine.echo_client import echo_client
from tests.patience import wait_for
from tests.server.fake_client import FakeClient
from tests.server.serving import Reply, Served, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
HUGE = "x" * 3_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(FakeClient()) as served_:
        yield served_


@pytest.fixture(scope="module")
def admitting() -> Iterator[Served]:
    """With a real client, which checks what the fake one takes."""
    with echo_client() as client, serving(client) as served_:
        yield served_


# ---- limits


def _over(name: str, limit: Limit) -> list[tuple[str, dict[str, Any]]]:
    """Requests that are over the limit of a field by one."""
    values: list[Any] = []
    if limit.entries is not None:
        count = limit.entries + 1
        many: dict[str, Any] = {
            "messages": HI * count,
            "messages[].content": ["x"] * count,
            "logit_bias": {str(i): 0 for i in range(count)},
            "stop": ["x"] * count,
            "bad_words": ["x"] * count,
            "logits_processors": ["x"] * count,
        }
        values.append(many.get(name, [1] * count))
    if limit.chars is not None:
        text = "x" * (limit.chars + 1)
        values.append([text] if limit.entries is not None else text)
    if limit.json_bytes is not None:
        values.append({"a": "x" * limit.json_bytes})
    path = "/detokenize" if name == "tokens" else TEXT if name == "prompt" else CHAT
    asked = []
    for value in values:
        fields: dict[str, Any] = {"prompt": "Hi"} if path == TEXT else {}
        if path == CHAT:
            fields["messages"] = HI
        inner = name.removeprefix("messages[].")
        if inner != name:
            fields["messages"] = [HI[0] | {inner: value}]
        else:
            fields[name] = value
        asked.append((path, fields))
    return asked


@pytest.mark.parametrize("name", LIMITS)
def test_a_field_over_its_limit_is_named_with_the_limit(server: Served, name: str) -> None:
    limit = LIMITS[name]
    numbers = {n for n in (limit.entries, limit.chars, limit.json_bytes) if n is not None}
    for path, fields in _over(name, limit):
        reply = server.post(path, fields)
        assert reply.status == 400, reply.body[:300]
        assert reply.error["param"] == name.replace("[]", "[0]")
        assert any(str(number) in reply.error["message"] for number in numbers), reply.error


@pytest.mark.parametrize(
    "kind", [ChatRequest, CompletionRequest, TokenizeText, TokenizeChat, Detokenize]
)
def test_every_field_that_can_be_large_has_a_limit(kind: type[msgspec.Struct]) -> None:
    sized = (msgspec.inspect.StrType, msgspec.inspect.ListType, msgspec.inspect.DictType)
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        union = isinstance(field.type, msgspec.inspect.UnionType)
        types = field.type.types if union else (field.type,)  # type: ignore[attr-defined]
        if any(isinstance(t, sized) for t in types):
            assert field.name in LIMITS


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        (TEXT, {"prompt": "Hi", "extra_args": {"a": [1] * MAX_VALUES}}, "extra_args has"),
        (TEXT, {"prompt": [[1]] * (MAX_CONTAINERS + 1)}, "objects and arrays"),
        (CHAT, {"messages": [{"role": "user", "content": [{}] * MAX_CONTAINERS}]}, "'messages'"),
        (CHAT, {"messages": HI, "zzz": {str(i): 0 for i in range(MAX_MEMBERS)}}, "members"),
        (CHAT, {"messages": HI} | {str(i): 0 for i in range(MAX_MEMBERS)}, "members"),
        (CHAT, {"messages": HI, "wishes": [0] * MAX_VALUES + [0]}, "values"),
        ("/tokenize", {"prompt": "Hi " * 400_000}, "1048576"),
    ],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(
    server: Served, path: str, fields: dict[str, Any], says: str
) -> None:
    reply = server.post(path, fields)
    assert reply.status == 400
    assert says in reply.error["message"]


def test_commas_and_braces_in_a_text_are_no_values(server: Served) -> None:
    text = '{,:["' * (MAX_VALUES // 2) + '\\"'
    reply = server.post(TEXT, {"prompt": text})
    assert reply.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("tail", [b'\\"', b'""', b'"', b"{", b",", b"\\", b"[{,"])
def test_a_large_broken_body_is_refused_all_the_same(server: Served, tail: bytes) -> None:
    reply = server.post(TEXT, b'{"prompt": "' + tail * 3_000_000)
    assert reply.status == 400
    assert re.search("not JSON|nested too deeply|holds more than", reply.error["message"])


def test_tables_are_counted_for_every_sequence(server: Served) -> None:
    ids = list(range(600))
    assert server.complete(prompt=["Hi"] * 8, n=100, allowed_token_ids=ids).status == 200
    many = server.complete(prompt=["Hi"] * 10, n=100, allowed_token_ids=ids)
    assert many.status == 400
    assert "600 entries for each of 1000 sequences" in many.error["message"]
    assert many.error["param"] == "allowed_token_ids"


# ---- the event loop


class Latch:
    """Holds every thread that passes until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.open.wait(60)


def _stays_alive_while(server: Served, latch: Latch, path: str, fields: dict[str, Any]) -> Reply:
    """The answer to a request whose work is held at the latch while others are answered."""
    with ThreadPoolExecutor(1) as sender:
        answer = sender.submit(server.post, path, fields)
        try:
            assert latch.reached.wait(60)
            assert server.get("/health").status == 200
            assert server.get("/metrics").status == 200
            assert server.complete().status == 200  # small ones go on as well
            assert not answer.done()
        finally:
            latch.open.set()
        return answer.result(60)


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_large_bodies_are_parsed_while_the_loop_goes_on(
    server: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    latch, decode = Latch(), msgspec.json.decode

    def held(body: bytes, **options: Any) -> Any:
        if len(body) > 10_000:
            latch.wait()
        return decode(body, **options)

    monkeypatch.setattr("paceline.server.fields.msgspec.json.decode", held)
    text = "x" * 20_000
    fields: dict[str, Any] = {"prompt": text}
    if path == CHAT:
        fields = {"messages": [{"role": "user", "content": text}]}
    elif path == "/detokenize":
        fields = {"tokens": [7] * 20_000}
    assert _stays_alive_while(server, latch, path, fields).status in (200, 400)


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize"])
def test_long_texts_are_tokenised_while_the_loop_goes_on(
    server: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    latch, encode = Latch(), Tokenizer.encode

    def held(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 10_000:
            latch.wait()
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", held)
    text = "x" * 20_000
    fields: dict[str, Any] = {"prompt": text, "messages": [{"role": "user", "content": text}]}
    fields.pop("prompt" if path == CHAT else "messages")
    assert _stays_alive_while(server, latch, path, fields).status in (200, 400)


def test_many_messages_are_rendered_while_the_loop_goes_on(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    latch, render = Latch(), ChatTemplate.render

    def held(self: ChatTemplate, messages: list[dict[str, Any]], **arguments: Any) -> str:
        if len(messages) > 1:
            latch.wait()
        return render(self, messages, **arguments)

    monkeypatch.setattr(ChatTemplate, "render", held)
    assert _stays_alive_while(server, latch, CHAT, {"messages": HI * 500}).status in (200, 400)


def test_requests_that_come_together_go_on_in_turns_of_the_loop() -> None:
    async def main() -> list[tuple[int, int]]:
        queue, loop = StartQueue(), asyncio.get_running_loop()
        turn = 0
        went: list[tuple[int, int]] = []

        def count() -> None:
            nonlocal turn
            turn += 1
            if len(went) < 300:
                loop.call_soon(count)

        async def request(number: int) -> None:
            await queue.wait_turn()
            went.append((turn, number))

        count()
        await asyncio.gather(*(request(i) for i in range(300)))
        return went

    went = asyncio.run(main())
    assert [number for _, number in went] == list(range(300))
    assert len({turn for turn, _ in went}) == 300


def test_a_request_that_has_begun_goes_before_those_that_have_not() -> None:
    async def main() -> list[str]:
        queue = StartQueue()
        went: list[str] = []

        async def request(name: str, **how: bool) -> None:
            await queue.wait_turn(**how)
            went.append(name)

        new = [asyncio.create_task(request(f"new {i}")) for i in range(3)]
        await asyncio.sleep(0)
        await request("begun", has_begun=True)
        await asyncio.gather(*new)
        return went

    assert asyncio.run(main()) == ["new 0", "begun", "new 1", "new 2"]


def test_a_request_that_gives_up_its_place_leaves_the_turn_to_the_next() -> None:
    async def main() -> None:
        queue = StartQueue()
        tasks = [asyncio.create_task(queue.wait_turn()) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait_for(tasks[2], 30)

    asyncio.run(main())


def test_health_and_metrics_wait_for_no_turn() -> None:
    with serving(FakeClient()) as server:
        queue = server.service.start_queue
        queue._is_taken = True  # as while thousands of requests are before this one
        with ThreadPoolExecutor(1) as sender:
            answer = sender.submit(server.complete)
            wait_for(lambda: len(queue._waiting) == 1)
            assert server.get("/health").status == 200
            assert server.get("/metrics").status == 200
            assert not answer.done()
            server.loop.call_soon_threadsafe(queue._pass_on)
            assert answer.result(60).status == 200


def test_a_full_server_refuses_before_it_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakeClient(), max_waiting=2) as server:
        parsed: list[int] = []
        monkeypatch.setattr(generate, "parse", lambda body, kind: parsed.append(len(body)))
        server.service._num_open = 2
        assert server.complete().status == 429
        assert server.chat().status == 429
        assert parsed == []
        assert server.service.body_bytes == 0


# ---- error texts

_BAD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HI, "model": "m" * 4000}),
    (CHAT, {"messages": HI, HUGE: 1}),
    (CHAT, {"messages": HI, HUGE: None}),
    (CHAT, {"messages": [{"role": HUGE, "content": "x"}]}),
    (CHAT, {"messages": [HI[0] | {HUGE: 1}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": HUGE}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": [HUGE] * 2}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", HUGE: 1}]}]}),
    (CHAT, {"messages": HI, "chat_template": HUGE}),
    (CHAT, {"messages": HI, "chat_template": "{{ x" + "y" * 100_000 + " }"}),
    (CHAT, {"messages": HI, "chat_template": "{{ raise_exception('" + "y" * 100_000 + "') }}"}),
    (CHAT, {"messages": HI, "chat_template": "{{ messages." + "y" * 100_000 + ".z }}"}),
    (CHAT, {"messages": HI, "stream": True, "stream_options": {HUGE: True}}),
    (TEXT, {"prompt": "Hi", "temperature": HUGE}),
    (TEXT, {"prompt": "Hi", "stop": [HUGE]}),
    (TEXT, {"prompt": "Hi", "bad_words": ["y" * 256]}),
    (TEXT, {"prompt": "Hi", "logits_processors": ["y" * 256]}),
    (TEXT, {"prompt": "Hi", "logit_bias": {HUGE: 1}}),
    (TEXT, {"prompt": "Hi", "extra_args": HUGE}),
    (TEXT, {"prompt": {HUGE: HUGE}}),
    (TEXT, {"prompt": HUGE}),
    (TEXT, {"prompt": "Hi", "allowed_token_ids": list(range(250)), "bad_words": [HUGE]}),
    ("/tokenize", {HUGE: HUGE}),
    ("/detokenize", {"tokens": [10**30]}),
]


@pytest.mark.parametrize("number", range(len(_BAD)))
def test_no_error_echoes_a_large_input(admitting: Served, number: int) -> None:
    path, fields = _BAD[number]
    reply = admitting.post(path, fields)
    assert reply.status in (400, 404), reply.body[:300]
    assert reply.error["message"]
    assert len(reply.body) < 2048


@pytest.mark.parametrize("path", ["/v1/models/", "/", "/v1/chat/completions/"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_error_echoes_a_long_path(server: Served, path: str, method: str) -> None:
    reply = server.request(method, path + "x" * 20_000)
    assert reply.status in (404, 405)
    assert len(reply.body) < 2048


@pytest.mark.parametrize("size", [10, 200, 201, 5_000_000])
def test_the_name_of_an_unknown_model_is_shown_up_to_200_characters(size: int) -> None:
    with serving(FakeClient()) as server, pytest.raises(NotFound) as caught:
        server.service.resolve_model("m" * size)
    assert ("m" * min(size, 200) + "'") in str(caught.value)
    assert len(str(caught.value)) < 400


# ---- templates of requests


@pytest.fixture(scope="module")
def trusting() -> Iterator[Served]:
    with serving(FakeClient(), trust_request_chat_template=True) as served_:
        yield served_


def test_a_template_of_a_request_is_rendered(trusting: Served) -> None:
    template = "{% for m in messages %}[{{ m.content }}{{ extra }}]{% endfor %}"
    reply = trusting.chat(
        chat_template=template, chat_template_kwargs={"extra": 7}, return_token_ids=True
    )
    assert reply.status == 200
    ids = reply.json()["prompt_token_ids"]
    assert trusting.post("/detokenize", {"tokens": ids}).json() == {"prompt": "[Hi7]"}


_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ '%1000000000d' % 1 }}", "needed more than 512 MiB"),
        ("{{ 'x' * 1000000000 }}", "needed more than 512 MiB"),
        ("{{ ('x' * 17000000) }}", "more than 16777216 characters"),
        (_LOOP, "took more than 2 s of CPU time"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('no') }}", "refuses these messages: no"),
        ("{% if %}", "not valid Jinja in line 1"),
        ("tokenizer/template.jinja", "not a Jinja template"),
    ],
)
def test_a_template_that_takes_too_much_is_a_400_that_says_so(
    trusting: Served, template: str, says: str
) -> None:
    reply = trusting.chat(chat_template=template)
    assert reply.status == 400, reply.body[:300]
    assert says in reply.error["message"]


def test_a_template_that_does_not_end_is_stopped(
    trusting: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_child, "WALL_S", 0.001)
    reply = trusting.chat(chat_template="{{ messages }}")
    assert reply.status == 400
    assert "chat_template was stopped: it took more than" in reply.error["message"]


def test_a_template_is_rendered_while_the_loop_goes_on(
    trusting: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    latch = Latch()

    def held(*_: Any) -> str:
        latch.wait()
        return "Hi"

    monkeypatch.setattr("paceline.server.conversation.render_in_child", held)
    fields = {"messages": HI, "chat_template": "{{ messages }}"}
    assert _stays_alive_while(trusting, latch, CHAT, fields).status == 200
