"""The store of responses: bounded in number and bytes, the oldest use goes first."""

from __future__ import annotations

from paceline.server.response_store import ResponseStore
from paceline.server.responses_types import (
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningOptions,
    Response,
    TextOptions,
)

INPUT: list[Item] = [MessageItem(id="msg_in", role="user", content=[InputText(text="Hi")])]


def response(name: str, text: str = "Hello") -> Response:
    said = MessageItem(id=f"msg_{name}", role="assistant", content=[OutputText(text=text)])
    return Response(
        id=name,
        created_at=0,
        status="completed",
        instructions=None,
        max_output_tokens=None,
        model="tiny",
        output=[said],
        parallel_tool_calls=True,
        previous_response_id=None,
        reasoning=ReasoningOptions(),
        store=True,
        temperature=1.0,
        text=TextOptions(),
        tool_choice="auto",
        tools=[],
        top_p=1.0,
        metadata={},
    )


def test_items_come_back_as_they_went_in() -> None:
    store = ResponseStore(2, 1 << 20)
    store.put(response("a"), INPUT)
    entry = store.get("a")
    assert entry is not None
    assert entry.input_items() == INPUT
    assert entry.all_items() == [*INPUT, *response("a").output]
    find = store.finder()
    assert find("msg_a") == response("a").output[0]
    assert find("msg_in") is None


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(2, 1 << 20)
    store.put(response("a"), INPUT)
    store.put(response("b"), INPUT)
    store.get("a")
    store.put(response("c"), INPUT)
    assert [store.get(name) is not None for name in "abc"] == [True, False, True]
    assert store.finder()("msg_b") is None


def test_bytes_are_counted_and_given_back() -> None:
    store = ResponseStore(100, 4000)
    for i in range(20):
        store.put(response(str(i)), INPUT)
        assert 0 < store.num_bytes <= 4000
    assert 1 < len(store) < 20
    for i in range(20):
        store.remove(str(i))
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_response_larger_than_the_store_is_not_kept_and_drops_no_other() -> None:
    store = ResponseStore(100, 4000)
    store.put(response("small"), INPUT)
    store.put(response("large", "x" * 5000), INPUT)
    assert not store.remove("large")
    assert store.remove("small")
