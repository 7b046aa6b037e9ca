"""What a process of ours sets for itself: Ctrl-C as a flag, and when Python collects garbage."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

# Young objects per collection, young collections per middle one, middle ones per full one.
_GC_THRESHOLDS = (50_000, 20, 50)


def freeze_gc() -> None:
    """Exempt everything loaded so far from garbage collection. Call once when a process is ready.

    A full collection visits every object. Torch and a model have about 180,000, which stopped a
    process for 75 ms on a small machine. Requests leave few cycles behind, so collections can be
    rare: with Python's thresholds they took half the time of a front that answers 5,000 requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


@contextmanager
def gc_frozen() -> Iterator[None]:
    """The same until the end of the block, for a process that goes on afterwards. What was frozen
    before stays so."""
    thresholds, was_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    freeze_gc()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        gc.set_threshold(*thresholds)


class InterruptFlag:
    """Within it the first Ctrl-C waits for `check` to raise it; a second one raises at once.

    Replaces the handler of SIGINT only if that is Python's own, which raises KeyboardInterrupt: a
    handler of an event loop or a notebook stays.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._is_mine = False

    def __enter__(self) -> Self:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)
            self._is_mine = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_mine:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if error is None:
                self.check()

    def check(self) -> None:
        if self._is_set:
            self._is_set = False
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_set:
            raise KeyboardInterrupt
        self._is_set = True
