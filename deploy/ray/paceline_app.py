"""Paceline as a Ray Serve application. Each replica of Serve is one engine with its HTTP routes.

usage, in this folder: serve run serve.yaml

Serve's proxy listens and chooses the replica. The application takes one argument, `flags`: what
follows `paceline serve` on a command line. All ranks of an engine run on its replica's machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray import serve

from paceline.cli import build_parser
from paceline.commands.arguments import dataclass_from, engine_config
from paceline.commands.serve import MAX_RESTARTS
from paceline.config import EngineConfig, api_key_from_env
from paceline.errors import ConfigError
from paceline.server.options import ServerOptions

# Of Serve's proxy, or of a front that has other machines.
REFUSED = ("port", "headless", "nnodes", "distributed_executor_backend")


def parse(flags: Sequence[str]) -> tuple[EngineConfig, ServerOptions]:
    """Raises ConfigError, or exits with argparse's message, if a flag is wrong."""
    args = build_parser().parse_args(["serve", *flags])
    for name in REFUSED:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning in a Ray Serve replica.")
    if args.api_key is None:
        args.api_key = api_key_from_env()
    if args.max_restarts is None:
        args.max_restarts = MAX_RESTARTS
    # Serve's proxy listens on every address, so Host headers of other names are served.
    return engine_config(args), replace(dataclass_from(args, ServerOptions), host="0.0.0.0")


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application of serve.yaml."""
    flags = [str(flag) for flag in args["flags"]]
    parse(flags)  # a wrong flag is refused here, before a replica starts

    def load() -> Any:
        from paceline.engine.client import EngineClient
        from paceline.server.app import build_app

        config, options = parse(flags)
        return build_app(EngineClient.start(config), options)

    @serve.deployment(name="Paceline")
    @serve.ingress(load)
    class Paceline:
        """Serve runs `load` in the replica and sends it the requests."""

        app: Any

        def check_health(self) -> None:
            """Serve starts the replica again if this raises."""
            error = self.app.state.service.engine_error
            if error is not None:
                raise error

    return Paceline.bind()
