"""The engine process's loop: its inbox, draining, stopping, refusing."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest

from paceline.engine.engine import MOST_MESSAGES_PER_TURN, Engine, run_engine
from paceline.engine.messages import (
    Control,
    EngineMessage,
    StepMessage,
    decode,
    encode,
    encode_abort,
    encode_submit,
)
from paceline.request import Done
from tests.engine.harness import engine_config, request
from tests.fakes import FakeRunner, runner_info
from tests.patience import PATIENCE_S


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + i) % 60 for i in range(length)]


def served(*inbound: bytes) -> list[EngineMessage]:
    """What run_engine publishes for an inbox that was full from the start."""
    info = runner_info()
    inbox: SimpleQueue[bytes | None] = SimpleQueue()
    for data in inbound:
        inbox.put(data)
    out: list[EngineMessage] = []
    engine = Engine(FakeRunner(info), engine_config(info), lambda data: out.append(decode(data)))
    run_engine(engine, inbox)
    return out


def ends(messages: list[EngineMessage]) -> dict[int, Done]:
    found = {}
    for message in messages:
        if isinstance(message, StepMessage):
            result = message.result
            for uid, done in zip(result.uid_B.tolist(), result.done_B.tolist(), strict=True):
                if done:
                    found[uid] = Done(done)
            found |= {ended.uid: Done(ended.done) for ended in message.events.ended}
    return found


def test_drain_finishes_what_was_submitted_and_then_stops() -> None:
    messages = served(
        encode_submit(request(1, prompt(5))),
        encode_submit(request(2, prompt(6))),
        encode(Control.DRAIN),
    )
    assert ends(messages) == {1: Done.LENGTH, 2: Done.LENGTH}
    assert messages[-1] == Control.STOPPED


def test_stop_drops_what_runs() -> None:
    messages = served(encode_submit(request(1, prompt(5))), encode(Control.STOP))
    assert messages == [Control.STOPPED]


def test_a_request_that_cannot_run_is_answered_with_the_reason() -> None:
    messages = served(encode_submit(request(1, prompt(500))), encode(Control.DRAIN))
    ended = [e for m in messages if isinstance(m, StepMessage) for e in m.events.ended]
    assert [(e.uid, e.done, e.error) for e in ended] == [(1, Done.ERROR, "PromptTooLong")]
    assert "500 tokens" in ended[0].reason


def test_aborts_and_resets_arrive_through_the_inbox() -> None:
    messages = served(
        encode_submit(request(1, prompt(5))),
        encode_submit(request(2, prompt(5))),
        encode_abort([2]),
        encode(Control.RESET_PREFIX_CACHE),
        encode(Control.DRAIN),
    )
    assert ends(messages) == {1: Done.LENGTH, 2: Done.ABORT}


def test_submits_that_are_aborted_unread_cost_neither_a_decode_nor_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_decoded = 0

    def counted(data: bytes) -> EngineMessage:
        nonlocal num_decoded
        num_decoded += 1
        return decode(data)

    monkeypatch.setattr("paceline.engine.engine.decode", counted)
    uids = range(1, 10 * MOST_MESSAGES_PER_TURN)
    messages = served(
        *(encode_submit(request(uid, prompt(5))) for uid in uids),
        *(encode_abort([uid]) for uid in uids),
        encode(Control.DRAIN),
    )
    assert ends(messages) == dict.fromkeys(uids, Done.ABORT)  # each has its answer
    assert num_decoded == 2  # all aborts, and Drain
    assert all(m.gauges.num_steps == 0 for m in messages if isinstance(m, StepMessage))


def test_an_abort_does_not_wait_behind_submits_of_others() -> None:
    first, last = request(1, prompt(5), max_tokens=40), 10 * MOST_MESSAGES_PER_TURN
    later = [encode_submit(request(uid, prompt(5), max_tokens=1)) for uid in range(2, last)]
    info = runner_info()
    inbox: SimpleQueue[bytes | None] = SimpleQueue()
    inbox.put(encode_submit(first))
    runner = FakeRunner(info)
    engine = Engine(runner, engine_config(info), lambda data: None)

    def come(stage: str) -> None:
        if stage == "wait" and runner.num_steps == 1:
            for data in [*later, encode_abort([1]), encode(Control.STOP)]:
                inbox.put(data)

    engine._delay = come
    run_engine(engine, inbox)
    num_rows = sum(int((plan.uid_B == 1).sum()) for plan in runner.plans)
    assert num_rows == 1


def test_an_idle_engine_waits_for_its_inbox_and_stops_when_the_front_is_gone() -> None:
    info = runner_info()
    inbox: SimpleQueue[bytes | None] = SimpleQueue()
    out: SimpleQueue[EngineMessage] = SimpleQueue()
    engine = Engine(FakeRunner(info), engine_config(info), lambda data: out.put(decode(data)))
    thread = threading.Thread(target=run_engine, args=(engine, inbox))
    thread.start()
    for uid in (1, 2):
        inbox.put(encode_submit(request(uid, prompt(5), max_tokens=1)))
        found: dict[int, Done] = {}
        while uid not in found:
            found |= ends([out.get(timeout=PATIENCE_S)])
    inbox.put(None)
    thread.join(timeout=PATIENCE_S)
    assert not thread.is_alive()
