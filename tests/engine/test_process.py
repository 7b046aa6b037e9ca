"""Garbage collection of a process that waits for tokens."""

from __future__ import annotations

import gc
import subprocess
import sys

from paceline.engine.process import gc_frozen

PROGRAM = """
import gc
from paceline.engine.process import gc_frozen
before = gc.get_threshold()
for frozen_before in (False, True):
    with gc_frozen():
        assert gc.get_freeze_count() > 1000, "what was loaded is exempt"
        assert gc.get_threshold()[0] > before[0]
    assert gc.get_threshold() == before
    assert (gc.get_freeze_count() > 0) == frozen_before
    gc.freeze()
"""


def test_what_was_loaded_is_not_collected_until_the_block_ends() -> None:
    """In a new process: this one was frozen by the tests."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


def test_garbage_of_the_block_is_still_collected() -> None:
    with gc_frozen():
        ring: list[object] = []
        ring.append(ring)
        del ring
        assert gc.collect() >= 1
