"""Frames arrive whole and in order, and neither end can make the other wait."""

from __future__ import annotations

import random
import threading
import time
from queue import SimpleQueue

import pytest

from paceline.engine.transport import Channel, ChannelClosed, Port, connected_pair


def opened() -> tuple[Channel, Port, SimpleQueue[str]]:
    front, engine = connected_pair()
    said: SimpleQueue[str] = SimpleQueue()
    port = Port(engine, on_end=lambda: said.put("end"))
    port.start()
    return Channel(front), port, said


def receive_count(channel: Channel, count: int) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < count:
        frames += channel.receive(5.0)
    return frames


def payloads() -> list[bytes]:
    rng = random.Random(1)
    sizes = [0, 1, 5, 4096, 70_000, 3_000_000, 2]
    return [rng.randbytes(size) for size in sizes]


def test_frames_of_any_size_arrive_whole_and_in_order_both_ways() -> None:
    channel, port, _ = opened()
    for payload in payloads():
        channel.send(payload)
        port.send(payload)
    assert [port.inbox.get(timeout=5) for _ in payloads()] == payloads()
    assert receive_count(channel, len(payloads())) == payloads()
    port.close()
    channel.close()


def test_receive_returns_when_nothing_comes_in_time() -> None:
    channel, port, _ = opened()
    started = time.monotonic()
    assert channel.receive(0.05) == []
    assert 0.04 <= time.monotonic() - started < 2.0
    port.close()
    channel.close()


def test_a_front_that_does_not_read_does_not_stop_the_engine() -> None:
    channel, port, _ = opened()
    started = time.monotonic()
    for _ in range(1000):
        port.send(bytes(20_000))
    assert time.monotonic() - started < 1.0
    # and it still hears the front
    channel.send(b"abort")
    assert port.inbox.get(timeout=5) == b"abort"
    assert sum(map(len, receive_count(channel, 1000))) == 20_000_000
    port.close()
    channel.close()


def test_one_receive_takes_a_bounded_share_and_leaves_the_rest_readable() -> None:
    channel, port, _ = opened()
    for _ in range(400):
        port.send(bytes(20_000))
    seen = 0
    while seen < 400:
        frames = channel.receive(5.0)
        assert len(frames) <= 100
        seen += len(frames)
    port.close()
    channel.close()


def test_an_interrupted_send_does_not_tear_its_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    front, engine = connected_pair()
    channel = Channel(front)
    wait = Channel._wait

    def interrupted(self: Channel, events: int, timeout_s: float | None) -> bool:
        monkeypatch.setattr(Channel, "_wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(Channel, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        channel.send(b"a" * 5_000_000)  # more than the socket holds, and nobody reads yet
    port = Port(engine, on_end=lambda: None)
    port.start()
    channel.send(b"b")
    assert port.inbox.get(timeout=5) == b"a" * 5_000_000
    assert port.inbox.get(timeout=5) == b"b"
    port.close()
    channel.close()


def test_the_front_sees_the_end_after_the_last_frame() -> None:
    channel, port, _ = opened()
    port.send(b"last words")
    closing = threading.Thread(target=port.close)
    closing.start()
    assert receive_count(channel, 1) == [b"last words"]
    while not channel.at_end:
        assert channel.receive(5.0) == []
    closing.join()
    with pytest.raises(ChannelClosed):
        channel.send(b"too late")
    channel.close()


def test_the_engine_is_told_when_the_front_is_gone() -> None:
    channel, port, said = opened()
    channel.close()
    assert said.get(timeout=5) == "end"
    port.close()
    with pytest.raises(ChannelClosed):
        channel.send(b"too late")
