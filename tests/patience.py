"""The deadline of whatever must happen, on a machine that is busy with other work.

A test that ends says that something happened, never how fast: that is measured in bench/.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0


def wait_for(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    give_up_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_s, f"it did not happen within {within_s:g} s"
        time.sleep(0.002)
