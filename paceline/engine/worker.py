"""The engine's side of its process: build the runner, run the loop, say how it ended.

Never decides when to stop: the front does, by a message or by closing its end. The runner comes
from a factory given by name; with `launch.py` this is the only door from the host to torch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import cast

from paceline.config import EngineConfig
from paceline.engine.boot import Failed, Start, describe
from paceline.engine.engine import Engine, run_engine
from paceline.engine.messages import Died, Progress, Ready, Stop, encode
from paceline.engine.transport import Port
from paceline.observe.log import configure_logging
from paceline.step import Runner

logger = logging.getLogger(__name__)

RunnerFactory = Callable[[EngineConfig, Callable[[str, float], None]], Runner]

# The loop thread and the device thread of a CPU runner share one GIL. With Python's 5 ms the
# device thread would wait that long for its turn whenever the loop computes.
_SWITCH_INTERVAL_S = 0.0002
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1000  # a wait for the device is a row of short naps; Linux would add 50 us each


def main(fd: int, factory: str, *, die_with_parent: bool) -> None:
    """The engine process. `fd` is its end of the socket pair."""
    # Ctrl-C and a supervisor's SIGTERM reach the whole process group; what they mean (finish what
    # runs, or stop now) is for the front to say. launch.py started us with SIGINT blocked.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    faulthandler.enable()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_NAME, b"paceline-engine", 0, 0, 0)
        libc.prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)
        if die_with_parent:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The front is gone: nobody is left to hear anything, whatever the loop is doing.
    port = Port(socket.socket(fileno=fd), on_end=lambda: os._exit(0))
    port.start()
    serve(port, factory, own_process=True)
    os._exit(0)  # a device thread that hangs must not keep the process


def serve_in_thread(sock: socket.socket, factory: str) -> None:
    """The same over the same messages, for `in_process`. Returns when the front closes its end."""
    port = Port(sock, on_end=lambda: port.inbox.put(None))
    port.start()
    serve(port, factory, own_process=False)


def serve(port: Port, factory: str, *, own_process: bool) -> None:
    """Load, say Ready, run until told to stop; every way out is said to the front."""
    runner: Runner | None = None
    try:
        # Importing torch takes seconds: do it while the front still looks for the model.
        build_runner = resolve(factory)
        frame = port.inbox.get()
        if frame is None or frame == encode(Stop()):
            return
        start = Start.decode(frame)
        if own_process:
            configure_logging(start.log_level, process="engine")

        def progress(stage: str, fraction: float) -> None:
            port.send(encode(Progress(stage, fraction)))

        runner = build_runner(start.config, progress)
        engine = Engine(runner, start.config, port.send)
        port.send(encode(Ready(runner.info)))
        _run(engine, port)
    except BaseException as error:
        port.send(Failed.because(error).encode())
    finally:
        # In this order: a device that hangs must not keep the news from the front.
        port.close()
        if runner is not None:
            runner.close()


def _run(engine: Engine, port: Port) -> None:
    try:
        run_engine(engine, port.inbox)
    except BaseException as error:
        logger.exception("the engine loop failed")
        port.send(encode(Died(describe(error))))


def resolve(factory: str) -> RunnerFactory:
    """`module:function`, imported."""
    module, _, name = factory.partition(":")
    return cast(RunnerFactory, getattr(importlib.import_module(module), name))
