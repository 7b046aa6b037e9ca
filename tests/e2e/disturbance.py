"""Eight healthy greedy streams that must not notice what else happens to the server or near it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tests.e2e.serving import ServerProcess, Streamed
from tests.patience import PATIENCE_S

NUM_TOKENS = 120
_PHRASE = "the quick brown fox jumps over the lazy dog. "
# Chats and texts, short and longer than a chunk of pages, two with a common beginning (cached),
# one that repeats itself (drafts), one of token ids.
_CHATS = ("Hello", _PHRASE + "Why?", _PHRASE + "When?", "def main():\n    for i in range(9):\n")
_TEXTS: tuple[str | list[int], ...] = ("a", _PHRASE * 3, "Größe 東京 😀 café", [1, 44, 55, 66, 299])
_FIELDS = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}


def healthy_requests() -> list[tuple[str, dict[str, Any]]]:
    chats: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": c}], **_FIELDS})
        for c in _CHATS
    ]
    return chats + [("/v1/completions", {"prompt": text, **_FIELDS}) for text in _TEXTS]


class Disturbance:
    """A server, what its eight streams say when nothing happens, and a way to disturb them."""

    def __init__(self, server: ServerProcess, expected: list[Streamed] | None = None) -> None:
        """`expected` is what another server of the same model said when nothing happened."""
        self.server = server
        self._requests = healthy_requests()
        self._pool = ThreadPoolExecutor(len(self._requests))
        self.expected = expected or self._undisturbed()

    def _undisturbed(self) -> list[Streamed]:
        expected = list(self._pool.map(self._stream, range(len(self._requests))))
        for said in expected:
            assert (len(said.token_ids), said.finish_reason) == (NUM_TOKENS, "length")
        assert len({tuple(said.token_ids) for said in expected}) == len(expected)
        return expected

    def during(self, disturb: Callable[[], None], *, rounds: int = 10) -> None:
        """Call `disturb` again and again while all eight streams run, and compare them.

        The streams are repeated until there were `rounds`, so that each of them falls into the
        life of every stream, on however slow a machine.
        """
        with self.streaming():
            for _ in range(rounds):
                disturb()

    @contextlib.contextmanager
    def streaming(self, *, once: bool = False, pause_s: float = 0.0) -> Iterator[None]:
        """Within it the eight streams run, again and again or once; all of them are compared.

        With a pause between two of them they leave processor time to what they are not part of.
        """
        is_over = threading.Event()
        if once:
            is_over.set()
        begun = threading.Semaphore(0)
        futures = [
            self._pool.submit(self._repeat, i, begun, is_over, pause_s)
            for i in range(len(self._requests))
        ]
        try:
            for _ in futures:
                _await_first_token(begun, futures)
            yield
        finally:
            is_over.set()
            failures = [f.exception(PATIENCE_S) for f in futures]
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        self._pool.shutdown()

    def _repeat(
        self, index: int, begun: threading.Semaphore, is_over: threading.Event, pause_s: float
    ) -> None:
        while True:
            said = self._stream(index, begun)
            assert said == self.expected[index], f"stream {index} was disturbed"
            if is_over.wait(pause_s):
                return

    def _stream(self, index: int, begun: threading.Semaphore | None = None) -> Streamed:
        said = Streamed()
        for event in self.server.stream(*self._requests[index]):
            said.take(event)
            if begun is not None and said.token_ids:
                begun.release()
                begun = None
        return said


def _await_first_token(begun: threading.Semaphore, futures: list[Future[None]]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not begun.acquire(timeout=1.0):
        for future in futures:
            if future.done():
                future.result()
        assert time.monotonic() < give_up_s, "a stream did not begin"
