"""`paceline serve`: the OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import signal
from argparse import Namespace
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from paceline.commands import loading
from paceline.commands.arguments import dataclass_from, engine_config
from paceline.commands.torchrun import check_ranks, lead_others, live_with_first, set_nodes
from paceline.config import EngineConfig, api_key_from_env, torchrun_from_env
from paceline.engine.node import run_node
from paceline.engine.process import freeze_gc
from paceline.errors import MissingExtra, StoppedWhileLoading
from paceline.observe.log import configure_logging
from paceline.observe.stream import make_lossy
from paceline.server.options import ServerOptions

MAX_RESTARTS = 5  # unless --max-restarts says otherwise
EXTRA_MODULES = {"starlette", "uvicorn", "uvloop", "httptools", "msgspec", "prometheus_client"}


def run(args: Namespace) -> int:
    if args.max_restarts is None:
        args.max_restarts = MAX_RESTARTS
    torchrun = torchrun_from_env()
    if torchrun is not None:
        set_nodes(args, torchrun)
    config = engine_config(args)
    if torchrun is not None:
        check_ranks(config, torchrun)
    if args.api_key is None:
        args.api_key = api_key_from_env()
    options: ServerOptions = dataclass_from(args, ServerOptions)
    make_lossy("stdout")  # a closed stdout must not stop the server
    configure_logging("info")
    with signals_raised(), contextlib.ExitStack() as stack:
        if torchrun is not None and torchrun.local_rank:
            live_with_first()
            return 0
        if torchrun is not None and torchrun.local_world_size > 1:
            stack.enter_context(lead_others())
        if config.nodes.headless:
            run_node(config)
            return 0
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
        freeze_gc()
        announce(url, try_this, has_page=options.page)

    return run_server(lambda: loading.start_engine(config), options, on_ready=on_ready)


@contextlib.contextmanager
def signals_raised() -> Iterator[None]:
    """Until the server installs its handlers, SIGTERM and SIGINT raise StoppedWhileLoading."""

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


def announce(url: str, try_this: str, *, has_page: bool) -> None:
    how = "Open it in a browser, or try" if has_page else "Try"
    print(f"\nPaceline serves on {url} (Ctrl-C stops it). {how}:\n\n  {try_this}\n", flush=True)
