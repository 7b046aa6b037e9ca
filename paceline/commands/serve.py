"""`paceline serve`: the OpenAI-compatible server. Says where it listens and what to try."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from paceline.commands.arguments import dataclass_from, engine_config
from paceline.commands.loading import LoadingLine
from paceline.config import EngineConfig, api_key_from_env
from paceline.engine.heap import keep_what_was_loaded
from paceline.errors import MissingExtra
from paceline.observe.log import configure_logging
from paceline.server.options import ServerOptions

if TYPE_CHECKING:
    from paceline.engine.client import EngineClient

EXTRA_MODULES = {"starlette", "uvicorn", "uvloop", "httptools", "msgspec", "prometheus_client"}


def run(args: Namespace) -> int:
    config = engine_config(args)
    if args.api_key is None:
        args.api_key = api_key_from_env()
    options: ServerOptions = dataclass_from(args, ServerOptions)
    configure_logging("info")
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


def load(config: EngineConfig) -> EngineClient:
    from paceline.engine.client import EngineClient

    line = LoadingLine()
    try:
        return EngineClient.start(config, progress=line)
    finally:
        line.close()


def announce(url: str, try_this: str) -> None:
    print(f"\nPaceline serves on {url} (Ctrl-C stops it). Try:\n\n  {try_this}\n")
    sys.stdout.flush()
