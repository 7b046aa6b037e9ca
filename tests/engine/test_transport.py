"""Frames arrive whole and in order, and neither end can make the other wait."""

from __future__ import annotations

import random
import select
import threading
import time
from queue import SimpleQueue

import pytest

from paceline.engine.transport import (
    Channel,
    ChannelClosed,
    Channels,
    Port,
    connected_pair,
)
from tests.patience import PATIENCE_S


def opened() -> tuple[Channel, Port, SimpleQueue[str]]:
    front, engine = connected_pair()
    said: SimpleQueue[str] = SimpleQueue()
    port = Port(engine, on_end=lambda: said.put("end"))
    port.start()
    return Channel(front), port, said


def receive_count(channel: Channel, count: int) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < count:
        frames += channel.receive(PATIENCE_S)
    return frames


def payloads() -> list[bytes]:
    rng = random.Random(1)
    sizes = [0, 1, 5, 4096, 70_000, 3_000_000, 2]
    return [b"{" + rng.randbytes(size) for size in sizes]  # neither a submit nor an abort


def test_frames_of_any_size_arrive_whole_and_in_order_both_ways() -> None:
    channel, port, _ = opened()
    for payload in payloads():
        channel.send(payload)
        port.send(payload)
    channel.flush(PATIENCE_S)
    assert [port.inbox.get(timeout=PATIENCE_S) for _ in payloads()] == payloads()
    assert receive_count(channel, len(payloads())) == payloads()
    port.close()
    channel.close()


def test_receive_returns_when_nothing_comes_in_time() -> None:
    channel, port, _ = opened()
    started = time.monotonic()
    assert channel.receive(0.05) == []
    assert time.monotonic() - started >= 0.04
    port.close()
    channel.close()


def test_a_front_that_does_not_read_does_not_stop_the_engine() -> None:
    channel, port, _ = opened()
    for _ in range(1000):
        port.send(bytes(20_000))
    # and it still hears the front
    channel.send(b"abort")
    assert port.inbox.get(timeout=PATIENCE_S) == b"abort"
    assert sum(map(len, receive_count(channel, 1000))) == 20_000_000
    port.close()
    channel.close()


def test_one_receive_takes_a_bounded_share_and_leaves_the_rest_readable() -> None:
    channel, port, _ = opened()
    for _ in range(400):
        port.send(bytes(20_000))
    seen = 0
    while seen < 400:
        frames = channel.receive(PATIENCE_S)
        assert len(frames) <= 100
        seen += len(frames)
    port.close()
    channel.close()


def test_a_send_that_the_engine_does_not_read_returns_and_is_sent_later() -> None:
    front, engine = connected_pair()
    channel = Channel(front)
    for payload in (
        b"a" * 5_000_000,
        b"b",
    ):  # more than the socket holds, and there is no reader yet
        channel.send(payload)
    assert channel.num_unsent_bytes > 1_000_000
    port = Port(engine, on_end=lambda: None)
    port.start()
    channel.flush(PATIENCE_S)
    assert channel.num_unsent_bytes == 0
    found = [port.inbox.get(timeout=PATIENCE_S) for _ in range(2)]
    assert found == [b"a" * 5_000_000, b"b"]
    port.close()
    channel.close()


def test_the_descriptor_is_readable_as_long_as_something_can_be_sent() -> None:
    front, engine = connected_pair()
    channel = Channel(front)
    channels = Channels([channel])
    channels.send(0, b"a" * 5_000_000)
    assert not is_readable(channels)
    port = Port(engine, on_end=lambda: None)
    port.start()
    while channel.num_unsent_bytes:
        assert is_readable(channels, PATIENCE_S)
        assert channels.receive() == []
    assert port.inbox.get(timeout=PATIENCE_S) == b"a" * 5_000_000
    assert not is_readable(channels)  # or an event loop would turn for ever
    port.close()
    channels.close()


def test_time_counts_as_blocked_only_while_the_engine_takes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    front, engine = connected_pair()
    channel = Channel(front)
    channel.send(b"a")
    now_s += 1.0
    assert channel.blocked_s == 0.0
    channel.send(b"b" * 5_000_000)
    now_s += 2.0
    assert channel.blocked_s == 2.0
    engine.recv(1_000_000)
    channel.flush()
    now_s += 1.0
    assert channel.num_unsent_bytes > 0
    assert channel.blocked_s == 1.0
    channel.close()
    engine.close()


def test_an_engine_that_was_cut_off_has_ended() -> None:
    front, engine = connected_pair()
    channel = Channel(front)
    channel.cut()
    assert channel.receive(PATIENCE_S) == []
    assert channel.at_end
    with pytest.raises(ChannelClosed):
        channel.send(b"b")
    channel.close()
    engine.close()


def test_the_front_sees_the_end_after_the_last_frame() -> None:
    channel, port, _ = opened()
    port.send(b"last words")
    closing = threading.Thread(target=port.close)
    closing.start()
    assert receive_count(channel, 1) == [b"last words"]
    while not channel.at_end:
        assert channel.receive(PATIENCE_S) == []
    closing.join()
    with pytest.raises(ChannelClosed):
        channel.send(b"too late")
    channel.close()


def test_the_engine_is_told_when_the_front_is_gone() -> None:
    channel, port, said = opened()
    channel.close()
    assert said.get(timeout=PATIENCE_S) == "end"
    port.close()
    with pytest.raises(ChannelClosed):
        channel.send(b"too late")


def is_readable(channels: Channels, within_s: float = 0.0) -> bool:
    return bool(select.select([channels.fileno()], [], [], within_s)[0])


def test_several_channels_are_one_descriptor_and_frames_say_where_they_came_from() -> None:
    opened_ones = [opened() for _ in range(3)]
    channels = Channels([channel for channel, _, _ in opened_ones])
    assert not is_readable(channels)
    assert channels.receive() == []
    opened_ones[2][1].send(b"two")
    assert is_readable(channels, PATIENCE_S)
    assert channels.receive(5.0) == [(2, b"two")]
    for _, port, _ in opened_ones:
        port.send(b"all")
    found: list[tuple[int, bytes]] = []
    while len(found) < 3:
        found += channels.receive(5.0)
    assert sorted(found) == [(0, b"all"), (1, b"all"), (2, b"all")]
    channels.close()


def test_a_channel_that_has_ended_says_so_once_and_leaves_the_others_to_be_waited_for() -> None:
    opened_ones = [opened() for _ in range(2)]
    channels = Channels([channel for channel, _, _ in opened_ones])
    opened_ones[0][1].send(b"last words")
    opened_ones[0][1].close()
    found: list[tuple[int, bytes]] = []
    while not opened_ones[0][0].at_end:
        found += channels.receive(5.0)
    assert found == [(0, b"last words")]
    assert not is_readable(channels)  # or an event loop would turn for ever
    opened_ones[1][1].close()
    while not opened_ones[1][0].at_end:
        channels.receive(5.0)
    assert channels.receive(None) == []  # no peer is left to wait for
    channels.close()


def test_a_frame_can_be_seen_before_it_is_queued() -> None:
    front, engine = connected_pair()
    seen: SimpleQueue[bytes] = SimpleQueue()
    port = Port(engine, on_end=lambda: None, on_frame=seen.put)
    port.start()
    channel = Channel(front)
    channel.send(b"stop")
    assert seen.get(timeout=PATIENCE_S) == port.inbox.get(timeout=PATIENCE_S) == b"stop"
    channel.close()
    port.close()
