"""The zero-bubble loop: plan, launch, publish, wait, commit. One loop for every run-ahead depth.

Never touches a device, a socket or text; owns the order of things.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from paceline.config import EngineConfig
from paceline.engine.mailbox import Inbox
from paceline.engine.messages import (
    Abort,
    Drain,
    Gauges,
    ResetPrefixCache,
    StartTrace,
    Stop,
    Stopped,
    Submit,
    TakeTrace,
    Traced,
    Wake,
    decode,
    encode,
    encode_step,
    pack_step,
    without_rows,
)
from paceline.engine.stopwatch import Stopwatch
from paceline.errors import EngineDead, InvalidRequest
from paceline.observe.trace import TraceRing
from paceline.request import Done, EngineRequest
from paceline.scheduler.events import Emitted, Events, TokenConstraint
from paceline.scheduler.scheduler import Scheduler
from paceline.step import (
    InFlightStep,
    Lockstep,
    Runner,
    StepAgreement,
    StepPlan,
    StepProposal,
    StepSize,
)

logger = logging.getLogger(__name__)
_NO_EVENTS = Events()
SPARE_AFTER_S = 1.0  # a pause between two requests is no spare time
LONG_STEP_S = 0.05  # so often aborts are looked for while a step runs
MOST_MESSAGES_PER_TURN = 64  # a burst of submits must not hold up those who run


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    step: InFlightStep
    is_bound: bool  # False: a late plan whose masks are still to come


class Engine:
    """Requests in, one packed message per step out. Every method is called by the loop thread.

    `delay` is a hook for tests: called with the name of each stage before it runs.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        publish: Callable[[bytes], None],
        *,
        delay: Callable[[str], None] | None = None,
    ) -> None:
        self.scheduler = Scheduler(config, runner.info)
        self.depth = config.scheduler.depth
        self._runner = runner
        self.lockstep: Lockstep | None = runner.lockstep
        self.is_draining = False  # takes no more requests, and ends when all have ended
        self.has_spare_time = False  # idle for a while
        self.may_end = False  # drained, and nobody needs this rank
        # So often does a loop at rest show others that it is there: a frozen one is missed.
        self.pulse_s = config.device.stall_timeout / 4
        self.publish = publish
        self.read_aborts: Callable[[], list[int]] = list  # that came while a long step runs
        self._delay = delay
        self._in_flight: deque[_Launched] = deque()
        self._unpublished: list[Emitted] = []
        self._dead: str | None = None
        self._watch = Stopwatch()
        self._since = Gauges()

    # ---- requests

    def add(self, request: EngineRequest, *, constraint: TokenConstraint | None = None) -> None:
        """Queue a request. Raises InvalidRequest when it could never run."""
        self._check_alive()
        self.scheduler.add(request, constraint)

    def abort(self, uid: int) -> None:
        """End a request now, whatever it is doing. Unknown uids (ended ones) are ignored."""
        self.scheduler.abort(uid)

    def let_go(self, uids: Iterable[int]) -> None:
        """Abort these, and report an end of each: the front keeps their places until it hears it.

        One that is not here has ended before, or was dropped in the inbox.
        """
        for uid in uids:
            if not self.scheduler.abort(uid):
                self.scheduler.report_abort(uid)
        self.scheduler.drop_unwanted_steps()

    def refuse(self, uid: int, error: InvalidRequest) -> None:
        """Answer a request that `add` raised for."""
        self.scheduler.refuse(uid, str(error), type(error).__name__)

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> None:
        """Forget cached prefixes; with `preempt_running` recompute the running requests too."""
        self.scheduler.reset_prefix_cache(preempt_running=preempt_running)

    @property
    def num_unfinished(self) -> int:
        return self.scheduler.num_unfinished

    def stats(self) -> dict[str, float]:
        """Totals since the start, and where things stand now."""
        return {
            **self.scheduler.stats(),
            "bubble_s": self._watch.idle_s,
            "busy_s": self._watch.busy_s,
            "host_s": self._watch.host_s,
            "num_in_flight": float(len(self._in_flight)),
        }

    @property
    def doing(self) -> tuple[str, int, float]:
        """The present stage, the step it is about and when it began; no stage: at rest. For any
        thread."""
        return self._watch.present

    def start_trace(self) -> None:
        """Record the stages of every step from now on; the ring keeps the newest."""
        self._watch.trace = TraceRing()

    def take_trace(self) -> None:
        """Publish what was recorded, and stop recording."""
        ring, self._watch.trace = self._watch.trace, None
        self.publish(encode(Traced(b"" if ring is None else ring.packed())))

    # ---- the loop

    def turn(self) -> bool:
        """One turn of the loop. False: nothing to do, block on the inbox."""
        self._check_alive()
        try:
            return self._turn()
        except Exception as error:
            self._fail(error)
            raise EngineDead(self._dead) from error
        finally:
            self._watch.leave()

    def _turn(self) -> bool:
        self._stage("plan")
        plan, agreed = self.scheduler.plan(), None
        if self.lockstep is not None:
            plan, agreed = self._agree(self.lockstep, plan)
        if plan is None:
            return self._drain(agreed)
        self._watch.step = plan.step
        self._launch(plan)
        self._publish_all()
        # The masks of a late plan need the result before it, so nothing may run ahead of it.
        depth = self.depth if plan.late_B is None else min(self.depth, 1)
        while len(self._in_flight) > depth:
            self._finish_oldest()
        return True

    def _agree(
        self, lockstep: Lockstep, plan: StepPlan | None
    ) -> tuple[StepPlan | None, StepAgreement]:
        """What all replicas do next. Who has no rows for it runs an empty plan of that shape."""
        self._stage("agree", 0 if plan is None else plan.step)
        agreed = lockstep.agree(
            StepProposal(
                step_size=StepSize() if plan is None else self._runner.step_size(plan),
                has_plan=plan is not None,
                is_unfinished=bool(self._in_flight) or self.scheduler.num_unfinished > 0,
                is_draining=self.is_draining,
                has_spare_time=self.has_spare_time,
            )
        )
        if agreed.has_plan:
            plan = plan or self.scheduler.plan_empty()
            plan.agreed, plan.k = agreed.step_size, agreed.step_size.k
        return plan, agreed

    def _drain(self, agreed: StepAgreement | None) -> bool:
        """Nobody has a plan: take what is in flight. False: there is nothing left anywhere."""
        if self._in_flight:
            self._finish_oldest()
            self._publish_all()
            return True
        self._watch.settle()
        self._publish_all()
        assert self.scheduler.num_unfinished == 0, "unfinished requests and nothing to run"
        if agreed is None:
            self.may_end = self.is_draining
            self._runner.rest()
            return False
        if agreed.has_spare_time and not agreed.is_unfinished:
            # All ranks prepare the same things in the same order: there are collectives in it.
            self._watch.leave()  # it may take long, and is no step
            self.has_spare_time = self._runner.use_spare_time() and self.has_spare_time
            return True
        self.may_end = agreed.is_draining and not agreed.is_unfinished
        if not agreed.is_unfinished:
            self._runner.rest()
        return agreed.is_unfinished

    def _launch(self, plan: StepPlan) -> None:
        self._stage("launch", plan.step)
        step = self._runner.launch(plan)
        self._in_flight.append(_Launched(plan, step, plan.late_B is None))
        self._bind_oldest()

    def _bind_oldest(self) -> None:
        """The oldest step in flight has every earlier result committed: its masks are known."""
        if self._in_flight and not self._in_flight[0].is_bound:
            oldest = self._in_flight[0]
            self._stage("bind", oldest.plan.step)
            oldest.step.bind(self.scheduler.late_masks(oldest.plan))
            oldest.is_bound = True

    def _finish_oldest(self) -> None:
        launched = self._in_flight[0]
        self._stage("wait", launched.plan.step)
        while not launched.step.is_over(LONG_STEP_S):
            self.let_go(self.read_aborts())
        result = launched.step.wait()
        self._in_flight.popleft()
        self._stage("commit", launched.plan.step)
        self._watch.took(result)
        self._since.num_steps += 1
        self._unpublished.append(self.scheduler.commit(launched.plan, result))
        if not self._in_flight and not self.scheduler.num_unfinished:
            self._watch.rest()
        self._bind_oldest()

    # ---- messages

    def _publish_all(self) -> None:
        self._stage("publish", self._unpublished[-1].step if self._unpublished else 0)
        # Events go with the newest rows: a request that was aborted meanwhile has no rows after.
        newest = len(self._unpublished) - 1
        for index, emitted in enumerate(self._unpublished):
            events = self.scheduler.take_events() if index == newest else _NO_EVENTS
            self.publish(pack_step(emitted, events, self._gauges(emitted.step)))
        self._unpublished.clear()
        if self.scheduler.has_events:
            events, gauges = self.scheduler.take_events(), self._gauges(self.scheduler.num_steps)
            self.publish(encode_step(without_rows(events, gauges)))

    def _gauges(self, step: int) -> Gauges:
        gauges, self._since = self._since, Gauges()
        scheduler = self.scheduler
        gauges.step = step
        gauges.num_running = scheduler.num_running
        gauges.kv_usage = scheduler.kv_usage
        gauges.num_wasted_rows = scheduler.take_wasted_rows()
        gauges.times = self._watch.take_times()
        return gauges

    def use_spare_time(self) -> bool:
        """Nobody waits for anything: let the runner prepare. False: it has nothing to prepare."""
        return self._runner.use_spare_time()

    @property
    def has_spare_work(self) -> bool:
        return self._runner.has_spare_work

    # ---- failure

    def _fail(self, error: Exception) -> None:
        """The device's state is unknown from here on: answer everybody and stop for good."""
        logger.exception("the engine failed")
        self._dead = f"the engine failed: {type(error).__name__}: {error}"
        self._in_flight.clear()
        self.scheduler.end_all(Done.ERROR, self._dead)
        self._publish_all()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead)

    def _stage(self, name: str, step: int = 0) -> None:
        self._watch.enter(name, step)
        if self._delay is not None:
            self._delay(name)


def run_engine(
    engine: Engine,
    inbox: SimpleQueue[bytes | None],
    wake: Callable[[int], None] | None = None,
) -> None:
    """Turn the loop until Stop, or Drain and everything finished. None in the inbox = peer gone.

    Replicas in lock step sleep and wake together: `wake` sends the number of the next agreement to
    all others. Raises EngineDead when the device failed; every request has been answered by then.
    """
    unread = Inbox(inbox)
    engine.read_aborts = unread.take_aborts
    is_idle = False
    while True:
        for _ in range(MOST_MESSAGES_PER_TURN):
            try:
                message = _rest(engine, unread, wake) if is_idle else decode(unread.get())
            except Empty:
                break
            is_idle = False
            if isinstance(message, Stop):
                engine.publish(encode(Stopped()))
                return
            if message is not None:
                _handle(engine, message)
        is_idle = not engine.turn()
        if is_idle and engine.may_end:
            engine.publish(encode(Stopped()))
            return


def _rest(engine: Engine, inbox: Inbox, wake: Callable[[int], None] | None) -> object | None:
    """The next message, or None: others are awake, or should see that this one is. Meanwhile the
    runner may prepare."""
    timeout_s, prepares = min(SPARE_AFTER_S, engine.pulse_s), True
    lockstep = engine.lockstep
    message: object | None
    while True:
        try:
            message = decode(inbox.get(timeout_s))
        except Empty:
            if prepares and lockstep is None:
                prepares = engine.use_spare_time()
                timeout_s = 0.0 if prepares else engine.pulse_s
                continue
            if prepares and not engine.has_spare_work:
                prepares, timeout_s = False, engine.pulse_s
                continue
            engine.has_spare_time, message = prepares, None
        if lockstep is None:
            return message
        if isinstance(message, Wake):
            if message.step <= lockstep.number:
                continue  # of an agreement that has been
            return None
        if wake is not None and not isinstance(message, Stop):
            wake(lockstep.number + 1)
        return message


def _handle(engine: Engine, message: object) -> None:
    match message:
        case Submit(request=request):
            try:
                engine.add(request)
            except InvalidRequest as error:
                engine.refuse(request.uid, error)
        case Abort(uids=uids):
            engine.let_go(uids)
        case ResetPrefixCache():
            engine.reset_prefix_cache()
        case StartTrace():
            engine.start_trace()
        case TakeTrace():
            engine.take_trace()
        case Drain():
            engine.is_draining = True
        case Wake():
            pass  # awake already
        case _:
            raise AssertionError(f"unexpected message {message!r}")
