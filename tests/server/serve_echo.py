"""A whole server as a process of its own: `run_server` over a real client and the echo runner.

Usage: python -m tests.server.serve_echo BEHAVIOUR OPTIONS(JSON) [ENGINE(JSON)]; prints the URL when
it is ready.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from paceline.checkpoint.source import ModelFiles
from paceline.config import EngineConfig
from paceline.engine.client import EngineClient
from paceline.errors import PacelineError
from paceline.server.app import run_server
from paceline.server.options import ServerOptions
from tests.engine.echo_client import FACTORY, echo_front


def main(behaviour: str, options: dict[str, Any], engine: dict[str, Any]) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)

    def factory() -> EngineClient:
        sys.stdout.write("loading\n")
        sys.stdout.flush()
        config = EngineConfig.from_keywords(model=behaviour, **engine)
        files = ModelFiles("echo", "hf", Path(__file__).parent, None, [], {})
        return EngineClient.start(config, factory=FACTORY, front=echo_front(text_files=files))

    def on_ready(url: str, curl: str) -> None:
        sys.stdout.write(f"{url}\n{curl}\n")
        sys.stdout.flush()

    try:
        return run_server(factory, ServerOptions(**options), on_ready=on_ready)
    except PacelineError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(json.loads, [*sys.argv[2:], "{}"][:2])))
