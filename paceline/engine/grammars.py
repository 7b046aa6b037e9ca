"""Compiles the grammars of requests in threads of the engine process, and keeps the latest ones.

A request waits here, not in the scheduler, until its grammar is ready. An error ends its own
request only. llguidance and the tokenizer are loaded for the first request that needs them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.config import EngineConfig
from paceline.engine.front import Front, load_front
from paceline.engine.grammar_constraint import GrammarConstraint, GrammarMasks, GrammarTokens
from paceline.engine.grammar_text import grammar_text
from paceline.engine.structural_tags import ENDS_OUTPUT
from paceline.errors import InvalidGrammar, MissingExtra, PacelineError, RequestFailed, cut
from paceline.request import EngineRequest, StructuredOutputsParams
from paceline.scheduler.constraints import OneByOne
from paceline.scheduler.events import TokenConstraint
from paceline.step import Ints
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

NUM_THREADS = 2
# The native compiler recurses once for each rule in a chain of rules. The pages of a stack are
# taken from the system when they are used.
STACK_BYTES = 512 << 20
COMPILE_TIMEOUT_S = 30.0
MOST_KEPT = 256
MOST_KEPT_BYTES = 8 << 20  # of grammar texts
# Limits of llguidance. The time of a step is bounded by its fuel and its items.
LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,  # one or two KiB each
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# Where in a grammar llguidance found an error, and the lines around it.
_LISTING = re.compile(r"^at \d+\(\d+\): |\n +\d+ \| .*", re.DOTALL)
# What llguidance says -> what the client is told.
_REASONS = [
    (r"Unimplemented keys: \[([^\]]*)\]", r"JSON Schema keyword \1 is not supported."),
    (
        r"oneOf constraints are not supported",
        "JSON Schema keyword 'oneOf' is not supported if its schemas may overlap; use anyOf.",
    ),
    (r"Unknown format: (\S+)", r"JSON Schema keyword 'format' does not support '\1'."),
    (
        r"Resource '([^']*)' is not present",
        r"JSON Schema keyword '$ref': '\1' is not in the schema, and none is fetched.",
    ),
    (r"^panic: |<backtrace>", "it is too large or too complex; simplify it."),
]

LoadFront = Callable[[EngineConfig], Front]
_Job = tuple[StructuredOutputsParams, "Future[LLMatcher]"]


@dataclass(slots=True)
class _Kept:
    compiled: Future[LLMatcher]
    num_bytes: int


class Grammars:
    """Called by the loop thread. `on_ready` is called by other threads: a request may be ready."""

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        *,
        timeout_s: float = COMPILE_TIMEOUT_S,
        load: LoadFront = load_front,
    ) -> None:
        self.on_ready: Callable[[], None] = lambda: None
        self.masks: GrammarMasks | None = None  # from the first compiled grammar on
        self._compiler = _Compiler(config, vocab_size, timeout_s, load)
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_bytes = 0
        self._waiting: dict[int, tuple[EngineRequest, Future[LLMatcher]]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def start(self, request: EngineRequest) -> GrammarConstraint | None:
        """The constraint of a request. None: it compiles, and `take_ready` will have it."""
        compiled = self._compile(_asked(request))
        if compiled.done():
            return self._constraint(compiled, _asked(request), request.output_token_ids)
        self._waiting[request.uid] = request, compiled
        compiled.add_done_callback(lambda _: self.on_ready())
        return None

    def fill(
        self, rows: Sequence[tuple[int, TokenConstraint, list[int]]], mask_RWV: Ints
    ) -> dict[int, Exception]:
        """See MaskFiller."""
        return (self.masks or OneByOne()).fill(rows, mask_RWV)

    def forget(self, uid: int) -> bool:
        """A waiting request was aborted. False: it does not wait here."""
        return self._waiting.pop(uid, None) is not None

    def forget_all(self) -> list[int]:
        waiting, self._waiting = self._waiting, {}
        return list(waiting)

    def take_ready(self) -> list[tuple[EngineRequest, GrammarConstraint | PacelineError]]:
        """Requests whose grammar was compiled, or why it was not."""
        ready: list[tuple[EngineRequest, GrammarConstraint | PacelineError]] = []
        for uid, (request, compiled) in list(self._waiting.items()):
            if compiled.done():
                del self._waiting[uid]
                emitted = request.output_token_ids
                try:
                    ready.append((request, self._constraint(compiled, _asked(request), emitted)))
                except PacelineError as error:
                    ready.append((request, error))
        return ready

    def constraint(
        self, params: StructuredOutputsParams, emitted: Iterable[int] = ()
    ) -> GrammarConstraint:
        """Compile now. `emitted` is the output so far of a request that goes on."""
        return self._constraint(self._compile(params), params, emitted)

    def _constraint(
        self, compiled: Future[LLMatcher], params: StructuredOutputsParams, emitted: Iterable[int]
    ) -> GrammarConstraint:
        matcher = compiled.result()
        self.masks = self._compiler.masks
        assert self.masks is not None
        return GrammarConstraint(matcher.deep_copy(), self.masks, params, emitted)

    def _compile(self, params: StructuredOutputsParams) -> Future[LLMatcher]:
        """The compiled grammar with this content: a kept one, or a new one from a thread."""
        key = json.dumps(replace(params, after_token_ids=(), opening_token_ids=()).as_dict())
        if (kept := self._kept.pop(key, None)) is not None:
            if not _may_be_tried_again(kept.compiled):
                self._kept[key] = kept  # the newest
                return kept.compiled
            self._num_bytes -= kept.num_bytes
        kept = self._kept[key] = _Kept(self._compiler.submit(params), len(key))
        self._num_bytes += kept.num_bytes
        while len(self._kept) > MOST_KEPT or self._num_bytes > MOST_KEPT_BYTES:
            self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes
        return kept.compiled


class _Compiler:
    """Threads that compile; they live while there is work. The first grammar loads everything."""

    def __init__(
        self, config: EngineConfig, vocab_size: int, timeout_s: float, load: LoadFront
    ) -> None:
        self.masks: GrammarMasks | None = None
        self._timeout_s = timeout_s
        self._config = config
        self._vocab_size = vocab_size
        self._load = load
        self._loading = threading.Lock()
        self._lock = threading.Lock()  # of the jobs and the number of threads
        self._jobs: deque[_Job] = deque()
        self._num_threads = 0

    def submit(self, params: StructuredOutputsParams) -> Future[LLMatcher]:
        compiled: Future[LLMatcher] = Future()
        timer = threading.Timer(self._timeout_s, self._give_up, (params.kind, compiled))
        timer.daemon = True
        timer.start()
        compiled.add_done_callback(lambda _: timer.cancel())
        with self._lock:
            self._jobs.append((params, compiled))
            if self._num_threads < NUM_THREADS:
                self._start_thread()
        return compiled

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="paceline-grammar", daemon=True)
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
        self._num_threads += 1

    def _give_up(self, kind: str, compiled: Future[LLMatcher]) -> None:
        """The limits of llguidance end the compilation itself; its result is not used."""
        error: PacelineError = InvalidGrammar(
            f"{kind} was not compiled within {self._timeout_s:g} s; simplify it."
        )
        if not compiled.running():
            reason = f"{kind} has waited for {self._timeout_s:g} s while others were compiled."
            error = RequestFailed(f"{reason} Try again.")
        with contextlib.suppress(InvalidStateError):
            compiled.set_exception(error)

    def _next_job(self) -> _Job | None:
        """None: there is none, and this thread ends."""
        with self._lock:
            if self._jobs:
                return self._jobs.popleft()
            self._num_threads -= 1
            return None

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            params, compiled = job
            if compiled.done():
                continue  # it waited for too long
            with contextlib.suppress(RuntimeError):  # it was given up just now
                compiled.set_running_or_notify_cancel()
            try:
                matcher, error = self._compile(params), None
            except PacelineError as known:
                matcher, error = None, known
            except Exception as unknown:
                logger.exception("a grammar could not be compiled")
                reason = f"the grammar could not be compiled: {type(unknown).__name__}"
                matcher, error = None, RequestFailed(reason)
            with contextlib.suppress(InvalidStateError):  # it was given up meanwhile
                if matcher is not None:
                    compiled.set_result(matcher)
                else:
                    compiled.set_exception(error)

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        with self._loading:
            if self.masks is None:
                self.masks = self._load_masks()
        from llguidance import LLMatcher, LLParserLimits

        tokens = self.masks.tokens
        text = grammar_text(params, tokens.specials)
        limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        matcher = LLMatcher(tokens.native, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(params.kind, matcher.get_error())
        return matcher

    def _load_masks(self) -> GrammarMasks:
        try:
            import llguidance  # noqa: F401
        except ImportError:
            raise MissingExtra(
                "Structured output needs llguidance: pip install 'paceline[structured]'."
            ) from None
        front = self._load(self._config)
        assert front.tokenizer is not None, "the front refuses a grammar without a tokenizer"
        tokens = grammar_tokens(front.tokenizer, front.eos_token_ids, self._vocab_size)
        return GrammarMasks(tokens, self._vocab_size)


def grammar_tokens(
    tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], vocab_size: int
) -> GrammarTokens:
    """Tokens of the model that the tokenizer does not have are never allowed."""
    from llguidance import LLTokenizer

    eos = tuple(i for i in eos_token_ids if 0 <= i < vocab_size)
    if not eos:
        raise InvalidGrammar(
            "structured_outputs need an end-of-sequence token; this model has none."
        )
    native = LLTokenizer(
        tokenizer.backend.to_str(),
        n_vocab=max(vocab_size, tokenizer.vocab_size),
        eos_token=list(eos),
    )
    ends = dict.fromkeys(eos, ENDS_OUTPUT)
    specials = {tokenizer.token_text(i): ends.get(i, i) for i in tokenizer.special_ids}
    return GrammarTokens(native, eos, specials)


def _asked(request: EngineRequest) -> StructuredOutputsParams:
    assert request.params.structured_outputs is not None
    return request.params.structured_outputs


def _may_be_tried_again(compiled: Future[LLMatcher]) -> bool:
    """Whether it failed for a reason that is not in the grammar."""
    error = compiled.exception() if compiled.done() else None
    return error is not None and not isinstance(error, InvalidGrammar)


def _refusal(kind: str, reason: str) -> InvalidGrammar:
    """The 400 of a grammar that llguidance refuses: it names what is not supported. The server puts
    the field that the client has sent, such as tools, in place of structured_outputs."""
    for pattern, told in _REASONS:
        if (found := re.search(pattern, reason)) is not None:
            said = found.expand(told).replace('"', "'")
            return InvalidGrammar(f"structured_outputs: {cut(said)}")
    if kind != "grammar":  # else it shows a place in the client's grammar
        reason = _LISTING.sub("", reason)
    return InvalidGrammar(f"structured_outputs cannot be served: {cut(reason.strip())}")
