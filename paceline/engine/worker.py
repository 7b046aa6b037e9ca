"""One rank's side of its process: build the runner, lead or follow, say how it ended.

Never decides when to stop: the front does, by a message or by closing its end. The runner comes
from a factory given by name; with `launch.py` this is the only door from the host to torch.
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
from queue import SimpleQueue
from typing import cast

from paceline.config import EngineConfig
from paceline.engine.boot import Failed, Post, Start, describe, is_after_another
from paceline.engine.engine import Engine, run_engine
from paceline.engine.heap import keep_what_was_loaded
from paceline.engine.life import Beats, LoopWatch, keep_beating
from paceline.engine.messages import Died, Progress, Ready, Stop, Stopped, Wake, encode
from paceline.engine.peers import LeadingRunner, follow
from paceline.engine.transport import Port
from paceline.observe.log import configure_logging
from paceline.observe.stream import flush_streams, make_lossy
from paceline.parallel.placement import RankPlace
from paceline.step import Runner

logger = logging.getLogger(__name__)

RunnerFactory = Callable[[EngineConfig, Callable[[str, float], None], RankPlace], Runner]

# The loop thread and the device thread of a CPU runner share one GIL. With Python's 5 ms the
# device thread would wait that long for its turn whenever the loop computes.
_SWITCH_INTERVAL_S = 0.0002
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1000  # a wait for the device is a row of short naps; Linux would add 50 us each
_WAKE_TIMEOUT_S = 1.0  # the other side always reads, unless it is gone
_WAKE_BYTES = 64


def main(fd: int, factory: str, post_text: str, *, parent: int | None) -> None:
    """The process of a rank. `fd` is its end of the socket pair with the front, which is `parent`
    (None: this process was started by another one)."""
    if parent is not None:
        _end_with(parent)
    # Ctrl-C, a supervisor's SIGTERM and the SIGHUP of a terminal that closes reach the whole
    # process group; what they mean (finish what runs, or stop now) is for the front to say.
    # launch.py started us with SIGINT blocked.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    make_lossy("stdout")
    make_lossy("stderr")
    faulthandler.enable()
    gc.disable()  # while modules are imported: there is nothing to find among them
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    post = Post.decode(post_text)
    if post.may_use_gpu:
        threading.Thread(target=_wake_driver, name="paceline-cuda", daemon=True).start()
    is_alone = post.place.layout.num_ranks == 1
    if sys.platform == "linux":
        name = b"paceline-engine" if is_alone else b"paceline-rank%d" % post.place.rank
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_NAME, name, 0, 0, 0)
        libc.prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)
    # A loop that waits for other ranks does not see its inbox.
    on_frame = None if is_alone else _leave_at_stop
    # Without a front there is no reader of anything that the loop may still compute.
    port = Port(socket.socket(fileno=fd), on_end=lambda: os._exit(0), on_frame=on_frame)
    port.start()
    serve(port, factory, post, own_process=True)
    flush_streams()
    os._exit(0)  # a device thread that hangs must not keep the process


def _end_with(parent: int) -> None:
    """Have the kernel end this process with the front, also while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it was gone before that
            os._exit(0)


def _wake_driver() -> None:
    """CUDA's driver takes a while to open; torch, which is imported meanwhile, finds it open."""
    with contextlib.suppress(OSError, AttributeError):  # there is none
        ctypes.CDLL("libcuda.so.1").cuInit(0)


def _leave_at_stop(frame: bytes) -> None:
    if frame == encode(Stop()):
        os._exit(0)


def serve_in_thread(sock: socket.socket, factory: str, post: Post) -> None:
    """The same over the same messages, for `in_process`. Returns when the front closes its end."""
    port = Port(sock, on_end=lambda: port.inbox.put(None))
    port.start()
    serve(port, factory, post, own_process=False)


def serve(port: Port, factory: str, post: Post, *, own_process: bool) -> None:
    """Load, say Ready, run until told to stop; every way out is said to the front."""
    runner: Runner | None = None
    place = post.place
    try:
        # Importing torch takes seconds: do it while the front still looks for the model.
        build_runner = resolve(factory)
        if own_process:
            gc.enable()
        frame = port.inbox.get()
        if frame is None or frame == encode(Stop()):
            return
        start = Start.decode(frame)
        if own_process:
            number = "" if place.layout.num_ranks == 1 else f"-{place.rank}"
            configure_logging(start.log_level, process=f"engine{number}")

        def progress(stage: str, fraction: float) -> None:
            if place.rank == 0:  # all of them do the same
                port.send(encode(Progress(stage, fraction)))

        runner = build_runner(start.config, progress, place)
        if own_process:
            keep_what_was_loaded()
        plans = [socket.socket(fileno=fd) for fd in post.plans]
        if place.is_leader:
            if plans:
                runner = LeadingRunner(runner, plans, start.config.device.stall_timeout)
            _lead(runner, start.config, port, post)
        else:
            _start_pulse(post, start.config)
            _follow(runner, plans[0], port, start.config)
    except BaseException as error:
        port.send(Failed.because(error).encode())
    finally:
        # In this order: a device that hangs must not keep the news from the front.
        port.close()
        if runner is not None:
            runner.close()


def _lead(runner: Runner, config: EngineConfig, port: Port, post: Post) -> None:
    engine = Engine(runner, config, port.send)
    wake = _open_wakes(post, port.inbox)
    _start_pulse(post, config, _watch(engine, config, port))
    port.send(encode(Ready(runner.info)))
    try:
        run_engine(engine, port.inbox, wake)
    except BaseException as error:
        logger.exception("the engine loop failed")
        flush_streams()  # the front may kill this process once it knows
        port.send(encode(Died(describe(error), is_after_another(error))))


def _start_pulse(post: Post, config: EngineConfig, check: Callable[[], None] | None = None) -> None:
    """From here on the front may expect signs of life."""
    if post.beats is None:  # in the front's own process, where people debug
        return
    beats = Beats(post.beats, post.place.layout.num_ranks)
    arguments = (beats, post.place.rank, config.device.stall_timeout, check)
    threading.Thread(
        target=keep_beating, args=arguments, name="paceline-pulse", daemon=True
    ).start()


def _watch(engine: Engine, config: EngineConfig, port: Port) -> Callable[[], None]:
    """A check that ends this process when its loop, the present thread, is stuck."""
    loop = LoopWatch(lambda: engine.doing, config.device.stall_timeout)

    def check() -> None:
        if (reason := loop.look()) is None:
            return
        # Before the front is told, which ends this process at once.
        logger.error("%s; this is where the threads are:", reason)
        with contextlib.suppress(RuntimeError, OSError, ValueError):  # no standard error
            faulthandler.dump_traceback()
        port.send(encode(Died(reason)))
        port.close()
        os._exit(1)

    return check


def _follow(runner: Runner, plans: socket.socket, port: Port, config: EngineConfig) -> None:
    port.send(encode(Ready(runner.info)))
    try:
        follow(runner, plans, config.scheduler.depth, config.device.stall_timeout)
    except BaseException as error:
        logger.exception("the rank failed")
        flush_streams()
        port.send(encode(Died(describe(error), is_after_another(error))))
    else:
        port.send(encode(Stopped()))


def _open_wakes(post: Post, inbox: SimpleQueue[bytes | None]) -> Callable[[int], None] | None:
    """How a leader wakes the others; what they send goes into its inbox. None: it has no others."""
    if post.wake is None:
        return None
    inward = socket.socket(fileno=post.wake)
    outward = [socket.socket(fileno=fd) for fd in post.wake_others]
    for sock in outward:
        sock.settimeout(_WAKE_TIMEOUT_S)

    def listen() -> None:
        while True:
            inbox.put(inward.recv(_WAKE_BYTES))

    def wake(step: int) -> None:
        frame = encode(Wake(step))
        for sock in outward:
            with contextlib.suppress(OSError):  # a leader that is gone is the front's business
                sock.send(frame)

    threading.Thread(target=listen, name="paceline-wake", daemon=True).start()
    return wake


def resolve(factory: str) -> RunnerFactory:
    """`module:function`, imported."""
    module, _, name = factory.partition(":")
    return cast(RunnerFactory, getattr(importlib.import_module(module), name))
