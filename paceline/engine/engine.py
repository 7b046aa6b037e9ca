"""The zero-bubble loop: plan, launch, publish, wait, commit. One loop for every run-ahead depth.

Owns the order of these stages. Never touches a device, a socket or text.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from paceline.config import EngineConfig
from paceline.engine.checks import RequestChecks
from paceline.engine.grammars import Grammars
from paceline.engine.loop_state import Activity, LoopState
from paceline.engine.mailbox import Inbox
from paceline.engine.messages import (
    Abort,
    Control,
    EngineMessage,
    Gauges,
    Traced,
    Wake,
    decode,
    encode,
    encode_step,
    submit_uid,
)
from paceline.engine.stopwatch import Stopwatch
from paceline.errors import EngineDead, InvalidGrammar, PacelineError
from paceline.observe.trace import TraceRing
from paceline.request import Done, EngineRequest
from paceline.scheduler.events import Events, MaskFiller, TokenConstraint
from paceline.scheduler.scheduler import Scheduler
from paceline.step import (
    InFlightStep,
    Lockstep,
    Runner,
    StepAgreement,
    StepPlan,
    StepProposal,
    StepResult,
    StepSize,
)

logger = logging.getLogger(__name__)
_NO_EVENTS = Events()
LONG_STEP_S = 0.05  # while a step runs longer than this, aborts are read
MOST_MESSAGES_PER_TURN = 64  # a burst of submits must not delay running requests


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    step: InFlightStep
    is_bound: bool  # False: a late plan that waits for its masks


class Engine:
    """Requests in, one packed message per step out. Every method is called by the loop thread.

    `filler` computes the masks of constrained requests; by default the grammars do.
    `delay` is a hook for tests: called with the name of each stage before it runs.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        publish: Callable[[bytes], None],
        *,
        filler: MaskFiller | None = None,
        delay: Callable[[str], None] | None = None,
    ) -> None:
        self.grammars = Grammars(config, runner.info.vocab_size)
        self.scheduler = Scheduler(config, runner.info, filler or self.grammars)
        self._checks = RequestChecks(config, runner.info)
        self.depth = config.scheduler.depth
        self._runner = runner
        self.lockstep: Lockstep | None = runner.lockstep
        # An idle loop shows its peers and the other replicas a heartbeat, so that they notice a
        # frozen one.
        self.state = LoopState(heartbeat_s=config.device.stall_timeout / 4)
        self.publish = publish
        self.read_aborts: Callable[[], list[int]] = list  # aborts that came during a long step
        self._delay = delay
        self._in_flight: deque[_Launched] = deque()
        self._unpublished: list[StepResult] = []
        self._dead: str | None = None
        self.watch = Stopwatch()  # any thread may read its `present`
        self._since = Gauges()

    # ---- requests

    def add(self, request: EngineRequest, *, constraint: TokenConstraint | None = None) -> None:
        """Queue a request. Raises InvalidRequest if it could never run."""
        self._check_alive()
        self._checks.check(request)
        if constraint is None and request.params.structured_outputs is not None:
            constraint = self.grammars.start(request)
            if constraint is None:
                return  # a later turn adds it
        self.scheduler.add(request, constraint)

    def _add_compiled(self) -> None:
        """Queue requests whose grammar was compiled meanwhile."""
        for request, outcome in self.grammars.take_ready():
            if isinstance(outcome, PacelineError):
                self.refuse(request.uid, outcome)
            else:
                self.scheduler.add(request, outcome)

    def abort(self, uid: int) -> bool:
        """End a request now. False: there is no such request; it may have ended."""
        if self.grammars.forget(uid):
            self.scheduler.report_abort(uid)
            return True
        return self.scheduler.abort(uid)

    def let_go(self, uids: Iterable[int]) -> None:
        """Abort requests and report the end of each, which frees their places in the front.

        A request that is unknown here has ended before, or was dropped in the inbox.
        """
        for uid in uids:
            if not self.abort(uid):
                self.scheduler.report_abort(uid)
        self.scheduler.drop_unwanted_steps()

    def refuse(self, uid: int, error: Exception) -> None:
        """End a request that could not be decoded or added; other requests go on.

        The front had checked it, so this is a fault of ours, except for grammars: only the engine
        compiles them.
        """
        if not isinstance(error, InvalidGrammar):
            logger.error("request %d cannot run", uid, exc_info=error)
        param = getattr(error, "param", None)
        self.scheduler.refuse(uid, str(error), type(error).__name__, param)

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> None:
        """Forget cached prefixes; with `preempt_running` also recompute the running requests."""
        self.scheduler.reset_prefix_cache(preempt_running=preempt_running)

    @property
    def num_unfinished(self) -> int:
        return self.scheduler.num_unfinished + self.grammars.num_waiting

    @property
    def _is_drained(self) -> bool:
        """No request comes any more, from the front or from the grammars."""
        return self.state.is_draining and not self.grammars.num_waiting

    def start_trace(self) -> None:
        """Record the stages of every step from now on; the ring keeps the newest."""
        self.watch.trace = TraceRing()

    def read_trace(self) -> None:
        """Publish what was recorded since the last time."""
        ring = self.watch.trace
        self.publish(encode(Traced(b"" if ring is None else ring.take())))

    def take_trace(self) -> None:
        """The same, and stop recording."""
        self.read_trace()
        self.watch.trace = None

    # ---- the loop

    def turn(self) -> bool:
        """One turn of the loop. False: there is no work; `state` says what to do."""
        self._check_alive()
        try:
            return self._turn()
        except Exception as error:
            self._fail(error)
            raise EngineDead(self._dead) from error
        finally:
            self.watch.leave()

    def _turn(self) -> bool:
        self._stage("plan")
        if self.grammars.num_waiting:
            self._add_compiled()
        plan, agreed = self.scheduler.plan(), None
        if self.lockstep is not None:
            plan, agreed = self._agree(self.lockstep, plan)
        if plan is None:
            return self._turn_without_plan(agreed)
        self.state.found_work()
        self.watch.step = plan.step
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
        """What all replicas do next. A replica without rows runs an empty plan of that size."""
        self._stage("agree", 0 if plan is None else plan.step)
        agreed = lockstep.agree(
            StepProposal(
                step_size=StepSize() if plan is None else self._runner.step_size(plan),
                has_plan=plan is not None,
                is_unfinished=bool(self._in_flight) or self.scheduler.num_unfinished > 0,
                is_draining=self._is_drained,
                has_spare_time=self.state.has_spare_time,
            )
        )
        if agreed.has_plan:
            plan = plan or self.scheduler.plan_empty()
            size = agreed.step_size
            plan.agreed, plan.k, plan.draft_k = size, size.k, size.draft_k
        return plan, agreed

    def _turn_without_plan(self, agreed: StepAgreement | None) -> bool:
        """Read the oldest result in flight. Without one: prepare in spare time, or go idle."""
        if self._in_flight:
            self.state.found_work()
            self._finish_oldest()
            self._publish_all()
            return True
        self.watch.settle()
        self._publish_all()
        assert self.scheduler.num_unfinished == 0, "unfinished requests and nothing to run"
        if agreed is None:
            drains, prepares = self._is_drained, self.state.has_spare_time
        elif agreed.is_unfinished:
            self.state.found_work()
            return True
        else:
            drains, prepares = agreed.is_draining, agreed.has_spare_time
        if prepares:
            # All ranks prepare the same things in the same order: they contain collectives.
            self.watch.leave()  # it may take long and belongs to no step
            self.state.prepared(has_more=self._runner.use_spare_time())
            return True
        self.state.found_nothing(all_drain=drains)
        self._runner.heartbeat()
        return False

    def _launch(self, plan: StepPlan) -> None:
        self._stage("launch", plan.step)
        step = self._runner.launch(plan)
        self._in_flight.append(_Launched(plan, step, plan.late_B is None))
        self._bind_oldest()

    def _bind_oldest(self) -> None:
        """All results before the oldest step in flight are committed, so its masks are known."""
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
        self.watch.took(result)
        self._since.num_steps += 1
        self.scheduler.commit(launched.plan, result)
        self._unpublished.append(result)
        if not self._in_flight and not self.scheduler.num_unfinished:
            self.watch.ran_out_of_work()
        self._bind_oldest()

    # ---- messages

    def _publish_all(self) -> None:
        self._stage("publish", self._unpublished[-1].step if self._unpublished else 0)
        # Events go with the newest rows: an aborted request has no rows after its event.
        newest = len(self._unpublished) - 1
        for index, result in enumerate(self._unpublished):
            events = self.scheduler.take_events() if index == newest else _NO_EVENTS
            self.publish(encode_step(result, events, self._gauges()))
        self._unpublished.clear()
        if self.scheduler.has_events:
            result = StepResult.without_rows(self.scheduler.num_steps)
            self.publish(encode_step(result, self.scheduler.take_events(), self._gauges()))

    def _gauges(self) -> Gauges:
        gauges, self._since = self._since, Gauges()
        scheduler = self.scheduler
        gauges.num_running = scheduler.num_running
        gauges.kv_usage = scheduler.kv_usage
        gauges.snapshots = scheduler.snapshots
        gauges.num_wasted_rows = scheduler.take_wasted_rows()
        gauges.times = self.watch.take_times()
        return gauges

    @property
    def has_spare_work(self) -> bool:
        return self._runner.has_spare_work

    # ---- failure

    def _fail(self, error: Exception) -> None:
        """The device's state is unknown from here on: end every request, and run no more."""
        logger.exception("the engine failed")
        self._dead = f"the engine failed: {type(error).__name__}: {error}"
        self._in_flight.clear()
        self.scheduler.end_all(Done.ERROR, self._dead)
        for uid in self.grammars.forget_all():
            self.scheduler.refuse(uid, self._dead, EngineDead.__name__)
        self._publish_all()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead)

    def _stage(self, name: str, step: int = 0) -> None:
        self.watch.enter(name, step)
        if self._delay is not None:
            self._delay(name)


def run_engine(
    engine: Engine,
    inbox: SimpleQueue[bytes | None],
    wake: Callable[[int], None] | None = None,
) -> None:
    """Turn the loop until it is told to stop or has drained. None in the inbox means Stop.

    Replicas in lock step sleep and wake together: `wake` sends the number of the next agreement to
    the others. Raises EngineDead if the device failed; every request has been answered by then.
    """
    unread = Inbox(inbox)
    engine.read_aborts = unread.take_aborts
    engine.grammars.on_ready = lambda: inbox.put(encode(Control.COMPILED))
    while engine.state.activity is not Activity.ENDED and _take_messages(engine, unread, wake):
        engine.turn()
    engine.publish(encode(Control.STOPPED))


def _take_messages(engine: Engine, inbox: Inbox, wake: Callable[[int], None] | None) -> bool:
    """Handle what has come; wait for it if there is no work. False: stop now."""
    for _ in range(MOST_MESSAGES_PER_TURN):
        try:
            if engine.state.is_waiting:
                message = _wait(engine, inbox, wake)
            else:
                message = _decode(engine, inbox.get())
        except Empty:
            break
        if message is Control.STOP:
            return False
        if message is None:
            break
        engine.state.received()
        _handle(engine, message)
    return True


def _wait(engine: Engine, inbox: Inbox, wake: Callable[[int], None] | None) -> EngineMessage | None:
    """Block for a message. None: turn without one, because another replica woke this one, because
    the runner can prepare, or because a heartbeat is due."""
    lockstep = engine.lockstep
    while True:
        try:
            message = _decode(engine, inbox.get(engine.state.wait_s))
        except Empty:
            if not engine.state.waited(has_spare_work=engine.has_spare_work):
                continue
            message = None
        if lockstep is None:
            return message
        if isinstance(message, Wake):
            if message.step <= lockstep.number:
                continue  # that agreement has been made
            return None
        if wake is not None and message is not Control.STOP:
            wake(lockstep.number + 1)
        return message


def _decode(engine: Engine, frame: bytes) -> EngineMessage | None:
    """None: the frame was a submit that cannot be decoded. It is refused."""
    try:
        return decode(frame)
    except Exception as error:
        if (uid := submit_uid(frame)) is None:
            raise
        engine.refuse(uid, error)
        return None


def _handle(engine: Engine, message: EngineMessage) -> None:
    match message:
        case EngineRequest():
            try:
                engine.add(message)
            except Exception as error:
                engine.refuse(message.uid, error)
        case Abort(uids=uids):
            engine.let_go(uids)
        case Control.RESET_PREFIX_CACHE:
            engine.reset_prefix_cache()
        case Control.START_TRACE:
            engine.start_trace()
        case Control.READ_TRACE:
            engine.read_trace()
        case Control.TAKE_TRACE:
            engine.take_trace()
        case Control.DRAIN:
            engine.state.is_draining = True
        case Wake() | Control.COMPILED:
            pass  # awake now: the next turn adds what was compiled
        case _:
            raise AssertionError(f"unexpected message {message!r}")
