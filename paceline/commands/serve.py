"""`paceline serve`: the OpenAI-compatible server. Says where it listens and what to try."""

from __future__ import annotations

import contextlib
import signal
from argparse import Namespace
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from paceline.commands.arguments import dataclass_from, engine_config
from paceline.commands.loading import LoadingLine
from paceline.config import EngineConfig, api_key_from_env
from paceline.engine.heap import keep_what_was_loaded
from paceline.errors import MissingExtra, StoppedWhileLoading
from paceline.observe.log import configure_logging
from paceline.observe.stream import make_lossy
from paceline.server.options import ServerOptions

if TYPE_CHECKING:
    from paceline.engine.client import EngineClient

EXTRA_MODULES = {"starlette", "uvicorn", "uvloop", "httptools", "msgspec", "prometheus_client"}


def run(args: Namespace) -> int:
    config = engine_config(args)
    if args.api_key is None:
        args.api_key = api_key_from_env()
    options: ServerOptions = dataclass_from(args, ServerOptions)
    make_lossy("stdout")  # serving goes on when the announcement cannot be written
    configure_logging("info")
    with signals_raised():
        return serve(config, options)


def serve(config: EngineConfig, options: ServerOptions) -> int:
    try:
        from paceline.server.app import run_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA_MODULES:
            raise
        raise MissingExtra(
            f"the server needs the package {error.name}, which is not installed: "
            "pip install 'paceline[server]'"
        ) from None

    def on_ready(url: str, try_this: str) -> None:
        keep_what_was_loaded()
        announce(url, try_this)

    return run_server(lambda: load(config), options, on_ready=on_ready)


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """A signal before the server has handlers of its own ends the command like one after that."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise StoppedWhileLoading(number)

    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def load(config: EngineConfig) -> EngineClient:
    from paceline.engine.client import EngineClient

    line = LoadingLine()
    try:
        return EngineClient.start(config, progress=line)
    finally:
        line.close()


def announce(url: str, try_this: str) -> None:
    print(f"\nPaceline serves on {url} (Ctrl-C stops it). Try:\n\n  {try_this}\n", flush=True)
