"""What was loaded stays: Python's collector no longer walks through it while requests run."""

from __future__ import annotations

import gc

# Objects that a young collection waits for, young ones per middle one, middle ones per full one.
_THRESHOLDS = (50_000, 20, 50)


def keep_what_was_loaded() -> None:
    """Call it once, when a process of ours is ready.

    A full collection walks through every object. Those of torch and a model are some 180,000, which
    stopped a process for 75 ms on a small machine whenever enough requests had come and gone.
    Requests leave few cycles behind, so looking for them can be rare: with Python's own thresholds
    half the time of a front that answers 5,000 requests went into collections.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
