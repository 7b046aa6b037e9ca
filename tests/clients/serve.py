"""The command `paceline` with the scripted runner instead of a model: python -m tests.clients.serve

Everything else is real: flags, the server, the text, the engine process and its loop.
"""

from __future__ import annotations

import sys
from functools import partial

from paceline.cli import main
from paceline.engine.client import EngineClient

FACTORY = "tests.clients.scripted_runner:build_scripted"

if __name__ == "__main__":
    setattr(EngineClient, "start", partial(EngineClient.start, factory=FACTORY))  # noqa: B010
    sys.exit(main())
