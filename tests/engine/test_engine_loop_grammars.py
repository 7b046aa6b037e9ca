"""Requests that wait for a grammar: others go on, and each way to end one of them is reported."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from paceline.engine.engine import Engine, run_engine
from paceline.engine.grammars import Grammars
from paceline.engine.messages import (
    Control,
    EngineMessage,
    decode,
    encode,
    encode_abort,
    encode_submit,
)
from paceline.errors import EngineDead, InvalidGrammar, PacelineError
from paceline.request import Done, EngineRequest
from tests.engine.harness import (
    Harness,
    ModThree,
    engine_config,
    mod_three_reference,
    request,
)
from tests.engine.test_engine_loop_process import ends
from tests.fakes import FakeRunner, runner_info
from tests.patience import PATIENCE_S


class SlowGrammars(Grammars):
    """Its one grammar is ready when the test says so."""

    def __init__(self, harness_vocab: int) -> None:
        self.on_ready: Callable[[], None] = lambda: None
        self.outcome: PacelineError | None = None
        self.is_ready = False
        self.has_started = threading.Event()
        self._vocab = harness_vocab
        self._slow: dict[int, EngineRequest] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._slow)

    def start(self, request: EngineRequest) -> None:
        self._slow[request.uid] = request
        self.has_started.set()

    def forget(self, uid: int) -> bool:
        return self._slow.pop(uid, None) is not None

    def forget_all(self) -> list[int]:
        uids, self._slow = list(self._slow), {}
        return uids

    def take_ready(self) -> list[Any]:
        if not self.is_ready:
            return []
        ready = [(r, self.outcome or ModThree(self._vocab)) for r in self._slow.values()]
        self._slow = {}
        return ready


def structured(uid: int, **fields: Any) -> EngineRequest:
    return request(uid, [1, 2, 3], structured_outputs={"choice": ["a"]}, **fields)


def slow_harness(depth: int = 1) -> tuple[Harness, SlowGrammars]:
    harness = Harness(runner_info(), depth=depth)
    grammars = SlowGrammars(harness.info.vocab_size)
    harness.engine.grammars = grammars
    return harness, grammars


def test_others_finish_while_a_grammar_compiles() -> None:
    harness, grammars = slow_harness()
    slow = harness.add(structured(1))
    other = harness.add(request(2, [4, 5]))
    while harness.turn():
        pass
    assert other.done == Done.LENGTH
    assert not slow.done
    assert harness.engine.num_unfinished == 1
    grammars.is_ready = True
    harness.constrained[1] = mod_three_reference(harness.info.vocab_size)
    while harness.turn():
        pass
    assert slow.done == Done.LENGTH
    assert all((b - a) % 3 == 1 for a, b in zip([0, *slow.tokens], slow.tokens, strict=False))


def test_an_abort_while_compiling_ends_the_request() -> None:
    harness, grammars = slow_harness()
    slow = harness.add(structured(1))
    harness.turn()
    harness.engine.let_go([1])
    harness.turn()
    assert slow.done == Done.ABORT
    grammars.is_ready = True
    assert not harness.turn()
    assert harness.engine.num_unfinished == 0


def test_a_grammar_that_cannot_be_compiled_ends_its_request_with_a_reason() -> None:
    harness, grammars = slow_harness()
    slow, other = harness.add(structured(1)), harness.add(request(2, [4, 5]))
    grammars.is_ready, grammars.outcome = True, InvalidGrammar("keyword 'x' is not supported")
    while harness.turn():
        pass
    assert (slow.done, slow.reason) == (Done.ERROR, "keyword 'x' is not supported")
    assert other.done == Done.LENGTH
    assert harness.front.last is not None


def test_the_end_of_the_engine_ends_requests_that_compile() -> None:
    harness, _ = slow_harness()
    slow = harness.add(structured(1))
    harness.add(request(2, [4, 5]))

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    harness.runner.launch = broken  # type: ignore[method-assign,assignment]
    with pytest.raises(EngineDead):
        harness.turn()
    assert slow.done == Done.ERROR
    assert "the device is gone" in slow.reason


@pytest.mark.parametrize("ending", ["drain", "abort"])
def test_an_idle_loop_wakes_for_a_grammar_and_drains_after_it(ending: str) -> None:
    info = runner_info()
    inbox: SimpleQueue[bytes | None] = SimpleQueue()
    out: list[EngineMessage] = []
    engine = Engine(FakeRunner(info), engine_config(info), lambda data: out.append(decode(data)))
    grammars = engine.grammars = SlowGrammars(info.vocab_size)
    inbox.put(encode_submit(structured(1)))
    inbox.put(encode(Control.DRAIN))
    loop = threading.Thread(target=run_engine, args=(engine, inbox))
    loop.start()
    assert grammars.has_started.wait(PATIENCE_S)
    if ending == "drain":
        grammars.is_ready = True
        grammars.on_ready()
    else:
        inbox.put(encode_abort([1]))
    loop.join(PATIENCE_S)
    assert not loop.is_alive()
    assert ends(out) == {1: Done.LENGTH if ending == "drain" else Done.ABORT}
