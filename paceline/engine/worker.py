"""The process of a rank: builds the runner, leads or follows, and reports how it ended.

The front decides when it stops, by a message or by closing its end. A factory given by name builds
the runner, so that only this process imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import cast

from paceline.config import EngineConfig
from paceline.engine.boot import RankSpawn, Start, last_words
from paceline.engine.engine import Engine, run_engine
from paceline.engine.life import Beats, LoopWatch, keep_beating
from paceline.engine.messages import Control, Died, Ready, StartupProgress, Wake, encode
from paceline.engine.peers import LeadingRunner, follow
from paceline.engine.process import freeze_gc
from paceline.engine.transport import Port
from paceline.observe.log import configure_logging
from paceline.observe.stream import flush_streams, make_lossy
from paceline.parallel.placement import RankPlace
from paceline.step import Runner

logger = logging.getLogger(__name__)

RunnerFactory = Callable[[EngineConfig, Callable[[str, float], None], RankPlace], Runner]

# The loop thread and the device thread of a CPU runner share one GIL. With Python's 5 ms the
# device thread would wait that long each time the loop computes.
_SWITCH_INTERVAL_S = 0.0002
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1000  # waits for the device are short sleeps; Linux adds 50 us to each by default
_WAKE_TIMEOUT_S = 1.0  # the other leader always reads, unless it has ended
_WAKE_BYTES = 64


def main(fd: int, factory: str, spawn_text: str, *, parent: int | None) -> None:
    """Run a rank. `fd` is its end of the socket pair with the front. `parent` is the pid of the
    front, or None if another process started this one."""
    if parent is not None:
        _end_with(parent)
    # Ctrl-C, a supervisor's SIGTERM and the SIGHUP of a closed terminal reach the whole process
    # group. The front handles them and tells the ranks. launch.py has blocked SIGINT until here.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    make_lossy("stdout")
    make_lossy("stderr")
    faulthandler.enable()
    gc.disable()  # imports leave no garbage
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    spawn = RankSpawn.decode(spawn_text)
    if spawn.may_use_gpu:
        threading.Thread(target=_wake_driver, name="paceline-cuda", daemon=True).start()
    is_alone = spawn.place.layout.num_ranks == 1  # in its group
    if sys.platform == "linux":
        name = b"paceline-engine"
        if spawn.place.num_engine_ranks > 1:
            name = b"paceline-rank%d" % spawn.place.engine_rank
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_NAME, name, 0, 0, 0)
        libc.prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)
    # A loop that waits for other ranks does not read its inbox.
    on_frame = None if is_alone else _leave_at_stop
    # Without a front, nothing reads what the loop would compute: exit at once.
    port = Port(socket.socket(fileno=fd), on_end=lambda: os._exit(0), on_frame=on_frame)
    port.start()
    serve(port, factory, spawn, own_process=True)
    flush_streams()
    os._exit(0)  # without waiting for a device thread that may hang


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when the front ends, even if this process is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the front ended before the call
            os._exit(0)


def _wake_driver() -> None:
    """Open CUDA's driver, which takes a while, at the same time as torch is imported."""
    with contextlib.suppress(OSError, AttributeError):  # no driver
        ctypes.CDLL("libcuda.so.1").cuInit(0)


def _leave_at_stop(frame: bytes) -> None:
    if frame == encode(Control.STOP):
        os._exit(0)


def serve_in_thread(sock: socket.socket, factory: str, spawn: RankSpawn) -> None:
    """For `in_process`: the same with the same messages. Returns when the front closes its end."""
    port = Port(sock, on_end=lambda: port.inbox.put(None))
    port.start()
    serve(port, factory, spawn, own_process=False)


def serve(port: Port, factory: str, spawn: RankSpawn, *, own_process: bool) -> None:
    """Load, report Ready, and run until told to stop. Every failure is reported to the front."""
    runner: Runner | None = None
    place, is_starting = spawn.place, True
    try:
        # Importing torch takes seconds: do it while the front looks for the model.
        build_runner = resolve(factory)
        if own_process:
            gc.enable()
        frame = port.inbox.get()
        if frame is None or frame == encode(Control.STOP):
            return
        start = Start.decode(frame)
        if own_process:
            number = "" if place.num_engine_ranks == 1 else f"-{place.engine_rank}"
            configure_logging(start.log_level, process=f"engine{number}")

        def progress(stage: str, fraction: float) -> None:
            if place.engine_rank == 0:  # all ranks have the same stages
                port.send(encode(StartupProgress(stage, fraction)))

        runner = build_runner(start.config, progress, place)
        if own_process:
            freeze_gc()
        plans = [socket.socket(fileno=fd) for fd in spawn.plans]
        if place.is_leader and plans:
            runner = LeadingRunner(runner, plans, start.config.device.stall_timeout)
        prepare = _lead if place.is_leader else partial(_follow, leader=plans[0])
        run = prepare(runner, start.config, port, spawn)
        is_starting = False
        port.send(encode(Ready(runner.info)))
        run()
    except BaseException as error:
        if not is_starting:
            logger.exception("the rank failed")
            flush_streams()  # the front may kill this process after the message
        port.send(encode(last_words(error, is_starting=is_starting)))
    finally:
        # The port first, so that the front gets the last message even if the device hangs.
        port.close()
        if runner is not None:
            runner.close()


def _lead(runner: Runner, config: EngineConfig, port: Port, spawn: RankSpawn) -> Callable[[], None]:
    """What the leader of a replica does when it is ready."""
    engine = Engine(runner, config, port.send)
    wake = _wakes_by_front(port) if spawn.wakes_by_front else _open_wakes(spawn, port.inbox)
    _start_heartbeat(spawn, config, _watch(engine, config, port))
    return lambda: run_engine(engine, port.inbox, wake)


def _follow(
    runner: Runner, config: EngineConfig, port: Port, spawn: RankSpawn, *, leader: socket.socket
) -> Callable[[], None]:
    """What any other rank of it does."""

    def run() -> None:
        follow(runner, leader, config.scheduler.depth, config.device.stall_timeout)
        port.send(encode(Control.STOPPED))

    _start_heartbeat(spawn, config)
    return run


def _start_heartbeat(
    spawn: RankSpawn, config: EngineConfig, check: Callable[[], None] | None = None
) -> None:
    """Start the heartbeats that the front watches."""
    if spawn.beats is None:  # a thread of the front: a debugger may stop it
        return
    beats = Beats(spawn.beats, spawn.place.layout.num_ranks)
    arguments = (beats, spawn.place.rank, config.device.stall_timeout, check)
    threading.Thread(
        target=keep_beating, args=arguments, name="paceline-heartbeat", daemon=True
    ).start()


def _watch(engine: Engine, config: EngineConfig, port: Port) -> Callable[[], None]:
    """A check that ends this process if its loop is stuck. Called in the loop's thread."""

    def doing() -> tuple[str, int, float]:
        stage, step, since_s = engine.watch.present
        # A loop that waits for messages and leaves them unread is stuck, too.
        return stage or ("" if port.inbox.empty() else "inbox"), step, since_s

    loop = LoopWatch(doing, config.device.stall_timeout)

    def check() -> None:
        if (reason := loop.look()) is None:
            return
        # Before the message to the front, which kills this process.
        logger.error("%s; tracebacks of all threads follow", reason)
        with contextlib.suppress(RuntimeError, OSError, ValueError):  # no standard error
            faulthandler.dump_traceback()
        port.send(encode(Died(reason)))
        port.close()
        os._exit(1)

    return check


def _open_wakes(spawn: RankSpawn, inbox: SimpleQueue[bytes | None]) -> Callable[[int], None] | None:
    """How a leader wakes the others, whose wakes go to its inbox. None: it is the only leader."""
    if spawn.wake is None:
        return None
    inward = socket.socket(fileno=spawn.wake)
    outward = [socket.socket(fileno=fd) for fd in spawn.wake_others]
    for sock in outward:
        sock.settimeout(_WAKE_TIMEOUT_S)

    def listen() -> None:
        while True:
            inbox.put(inward.recv(_WAKE_BYTES))

    def wake(step: int) -> None:
        frame = encode(Wake(step))
        for sock in outward:
            with contextlib.suppress(OSError):  # the front notices a leader that has ended
                sock.send(frame)

    threading.Thread(target=listen, name="paceline-wake", daemon=True).start()
    return wake


def _wakes_by_front(port: Port) -> Callable[[int], None]:
    """How a leader wakes leaders on other nodes: the front sends its wake on to them."""
    return lambda step: port.send(encode(Wake(step)))


def resolve(factory: str) -> RunnerFactory:
    """Import `module:function`."""
    module, _, name = factory.partition(":")
    return cast(RunnerFactory, getattr(importlib.import_module(module), name))
