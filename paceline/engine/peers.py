"""Tensor parallel ranks of a replica: the leader sends its plans, its peers launch them.

Every rank computes the results itself, bit for bit the same. Only plans and masks are sent.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque
from collections.abc import Sequence

from paceline.engine.plans import decode_late, decode_plan, encode_late, encode_plan
from paceline.engine.transport import framed, read_frame
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

# The first byte of every frame.
_PLAN, _LATE, _SPARE, _HEARTBEAT = 1, 2, 3, 4
# If no plan comes for this long, a peer also waits for its newest steps, to notice a failure.
_QUIET_S = 0.005


class LeadingRunner:
    """The runner of a leader: its peers launch what it launches. See step.Runner."""

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

    def heartbeat(self) -> None:
        self.send(_HEARTBEAT, b"")
        self._runner.heartbeat()

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._runner.close()

    def send(self, kind: int, payload: bytes) -> None:
        frame = framed(bytes((kind,)) + payload)
        for peer in self._peers:
            # The front notices a peer that has ended or whose machine is gone, and ends this rank.
            with contextlib.suppress(OSError):
                try:
                    peer.sendall(frame)
                except TimeoutError as error:
                    raise CollectiveError(
                        f"a rank of this replica has not read its plan for {self._timeout_s:g} s."
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
    """Launch what the leader launches, until the leader closes its end. Raises what a step raised.

    The leader sends a heartbeat while it is idle. Without any frame for twice `timeout_s` this
    raises; by then a leader that waits for another rank has reported that rank.
    """
    in_flight: deque[InFlightStep] = deque()
    unbound: InFlightStep | None = None  # the newest step, if it waits for masks
    poll = select.poll()
    poll.register(leader, select.POLLIN)
    while True:
        # The same run-ahead depth as the leader. The next frame has the masks of an unbound step.
        while len(in_flight) > depth and in_flight[0] is not unbound:
            in_flight.popleft().wait()
        has_more = bool(in_flight) and in_flight[0] is not unbound
        if has_more and not poll.poll(_QUIET_S * 1000):
            in_flight.popleft().wait()
            continue
        frame = _read_frame(leader)
        if frame is None:
            return
        kind, payload = frame[0], frame[1:]
        leader.settimeout(2 * timeout_s)
        if kind == _SPARE:
            runner.use_spare_time()
        elif kind == _HEARTBEAT:
            runner.heartbeat()
        elif kind == _LATE:
            assert unbound is not None, "masks came, but no step waits for them"
            unbound.bind(decode_late(payload))
            unbound = None
        else:
            plan = decode_plan(payload)
            in_flight.append(runner.launch(plan))
            unbound = in_flight[-1] if plan.late_B is not None else None


def _read_frame(leader: socket.socket) -> bytes | None:
    """None: the leader's end is closed."""
    try:
        return read_frame(leader)
    except OSError as error:
        waited_s = leader.gettimeout() if isinstance(error, TimeoutError) else None
        why = "cannot be reached" if waited_s is None else f"has sent nothing for {waited_s:g} s"
        raise CollectiveError(f"the leader of this replica {why}.") from error
