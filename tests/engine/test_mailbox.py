"""What waits to be read: order, aborts before the rest, and submits that are never read."""

from __future__ import annotations

from queue import Empty, SimpleQueue

import pytest

from paceline.engine.mailbox import Inbox, Mailbox
from paceline.engine.messages import Abort, Control, decode, encode, encode_abort, encode_submit
from tests.engine.harness import request


def submit(uid: int, length: int = 3) -> bytes:
    return encode_submit(request(uid, [1] * length))


def taken(mailbox: Mailbox) -> list[bytes]:
    frames = []
    while (frame := mailbox.take()) is not None:
        frames.append(frame)
    return frames


def filled(*frames: bytes) -> Mailbox:
    mailbox = Mailbox()
    for frame in frames:
        mailbox.put(frame)
    return mailbox


def test_frames_are_taken_in_the_order_they_came() -> None:
    frames = [
        submit(1),
        encode(Control.RESET_PREFIX_CACHE),
        submit(2),
        encode(Control.DRAIN),
        b'{"config": 1}',
    ]
    assert taken(filled(*frames)) == frames


def test_all_aborts_come_first_and_as_one() -> None:
    mailbox = filled(submit(5), encode_abort([1]), encode(Control.DRAIN), encode_abort([2, 3]))
    assert taken(mailbox) == [encode_abort([1, 2, 3]), submit(5), encode(Control.DRAIN)]


def test_a_submit_that_is_aborted_is_dropped_and_its_abort_goes_on() -> None:
    mailbox = filled(submit(1), submit(2), submit(3), encode_abort([2]))
    assert taken(mailbox) == [encode_abort([2]), submit(1), submit(3)]


def test_bytes_are_counted_until_they_are_taken_or_dropped() -> None:
    mailbox = filled(submit(1), submit(2, 1000), encode(Control.DRAIN))
    assert mailbox.num_bytes == len(submit(1)) + len(submit(2, 1000)) + 1
    mailbox.put(encode_abort([2, 7]))
    assert mailbox.num_bytes == len(submit(1)) + 1
    taken(mailbox)
    assert mailbox.num_bytes == 0


def inbox_of(*frames: bytes | None) -> Inbox:
    arrived: SimpleQueue[bytes | None] = SimpleQueue()
    for frame in frames:
        arrived.put(frame)
    return Inbox(arrived)


def test_an_inbox_sees_all_that_has_come_before_it_gives_anything_out() -> None:
    inbox = inbox_of(submit(1), submit(2), encode_abort([1]))
    assert decode(inbox.get()) == Abort((1,))
    assert inbox.get() == submit(2)
    with pytest.raises(Empty):
        inbox.get()
    with pytest.raises(Empty):
        inbox.get(0.01)


def test_aborts_can_be_read_without_the_rest() -> None:
    inbox = inbox_of(submit(1), encode_abort([7]), encode_abort([8]))
    assert inbox.take_aborts() == [7, 8]
    assert inbox.take_aborts() == []
    assert inbox.get() == submit(1)


def test_a_front_that_is_gone_reads_as_a_stop() -> None:
    assert decode(inbox_of(None).get()) == Control.STOP


def test_submits_that_follow_each_other_travel_as_one_frame() -> None:
    mailbox = filled(submit(1), submit(2), submit(3), encode(Control.DRAIN), submit(4))
    mailbox.put(encode_abort([2]))
    frames = []
    while (frame := mailbox.take_joined()) is not None:
        frames.append(frame)
    assert mailbox.num_bytes == 0
    assert len(frames) == 4
    assert taken(filled(*frames)) == [encode_abort([2]), *map(submit, (1, 3)), *frames[2:]]
    assert frames[2:] == [encode(Control.DRAIN), submit(4)]


def test_an_abort_reaches_a_submit_that_came_with_others() -> None:
    sender, receiver = filled(submit(1), submit(2)), Mailbox()
    joined = sender.take_joined()
    assert joined is not None
    receiver.put(joined)
    receiver.put(encode_abort([1]))
    assert taken(receiver) == [encode_abort([1]), submit(2)]
    assert receiver.num_bytes == 0


def test_a_joined_frame_has_a_limit() -> None:
    mailbox = filled(*(submit(uid, 10_000) for uid in range(1, 21)))
    lengths = []
    while (frame := mailbox.take_joined()) is not None:
        lengths.append(len(frame))
    assert len(lengths) > 1
    assert max(lengths) < 2 * (1 << 18)
