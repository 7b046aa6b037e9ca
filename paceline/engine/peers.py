"""Ranks that share the layers of a replica: the leader sends its plans, the others launch them.

Every rank computes its own results, which are the same to the bit; only plans and masks travel.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence

from paceline.engine.plans import decode_late, decode_plan, encode_late, encode_plan
from paceline.errors import CollectiveError
from paceline.step import (
    InFlightStep,
    LateMasks,
    Lockstep,
    Runner,
    RunnerInfo,
    StepPlan,
    StepResult,
    StepSize,
)

_HEADER = struct.Struct("<IB")  # bytes that follow, kind
_PLAN, _LATE, _SPARE, _REST = 1, 2, 3, 4
# Without a new plan for so long, a peer waits for its newest steps too: one of them may fail.
_QUIET_S = 0.005


class LeadingRunner:
    """A leader's runner: what it launches, its peers launch too. See step.Runner."""

    def __init__(self, runner: Runner, peers: Sequence[socket.socket], timeout_s: float) -> None:
        self._runner = runner
        self._peers = peers
        self._timeout_s = timeout_s
        for peer in peers:
            peer.settimeout(timeout_s)

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    @property
    def lockstep(self) -> Lockstep | None:
        return self._runner.lockstep

    @property
    def has_spare_work(self) -> bool:
        return self._runner.has_spare_work

    def step_size(self, plan: StepPlan) -> StepSize:
        return self._runner.step_size(plan)

    def launch(self, plan: StepPlan) -> InFlightStep:
        self.send(_PLAN, encode_plan(plan))
        return _LeadingStep(self, self._runner.launch(plan))

    def use_spare_time(self) -> bool:
        self.send(_SPARE, b"")
        return self._runner.use_spare_time()

    def rest(self) -> None:
        self.send(_REST, b"")
        self._runner.rest()

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._runner.close()

    def send(self, kind: int, payload: bytes) -> None:
        frame = _HEADER.pack(len(payload), kind) + payload
        for peer in self._peers:
            # A peer that is gone is the front's to notice; the step would wait for it in vain.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                try:
                    peer.sendall(frame)
                except TimeoutError as error:
                    raise CollectiveError(
                        f"a rank of this replica has not taken its plan for {self._timeout_s:g} s."
                    ) from error


class _LeadingStep:
    def __init__(self, runner: LeadingRunner, step: InFlightStep) -> None:
        self._runner = runner
        self._step = step

    def bind(self, late: LateMasks) -> None:
        self._runner.send(_LATE, encode_late(late))
        self._step.bind(late)

    def is_over(self, within_s: float) -> bool:
        return self._step.is_over(within_s)

    def wait(self) -> StepResult:
        return self._step.wait()


def follow(runner: Runner, leader: socket.socket, depth: int, timeout_s: float) -> None:
    """Launch what the leader launches until its end is closed. Raises what a step raised.

    The leader owes the next frame, also at rest (engine.pulse_s): twice `timeout_s` are enough for
    it to say itself whom it waits for.
    """
    in_flight: deque[InFlightStep] = deque()
    unbound: InFlightStep | None = None  # the newest, when it waits for masks
    poll = select.poll()
    poll.register(leader, select.POLLIN)
    while True:
        # As the leader does. A step that waits for masks gets them from the next frame.
        while len(in_flight) > depth and in_flight[0] is not unbound:
            in_flight.popleft().wait()
        has_more = bool(in_flight) and in_flight[0] is not unbound
        if has_more and not poll.poll(_QUIET_S * 1000):
            in_flight.popleft().wait()
            continue
        frame = _read_frame(leader)
        if frame is None:
            return
        kind, payload = frame
        leader.settimeout(2 * timeout_s)
        if kind == _SPARE:
            runner.use_spare_time()
        elif kind == _REST:
            runner.rest()
        elif kind == _LATE:
            assert unbound is not None, "masks for a step that waits for none"
            unbound.bind(decode_late(payload))
            unbound = None
        else:
            plan = decode_plan(payload)
            in_flight.append(runner.launch(plan))
            unbound = in_flight[-1] if plan.late_B is not None else None


def _read_frame(leader: socket.socket) -> tuple[int, bytes] | None:
    """(kind, payload); None: the leader's end is closed."""
    try:
        header = _read_exactly(leader, _HEADER.size)
        if header is None:
            return None
        size, kind = _HEADER.unpack(header)
        payload = _read_exactly(leader, size)
    except TimeoutError as error:
        raise CollectiveError(
            f"the leader of this replica has sent nothing for {leader.gettimeout():g} s."
        ) from error
    return None if payload is None else (kind, payload)


def _read_exactly(sock: socket.socket, size: int) -> bytes | None:
    """None: the other end is closed."""
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        try:
            count = sock.recv_into(view[filled:])
        except ConnectionResetError:
            return None
        if not count:
            return None
        filled += count
    return bytes(data)
