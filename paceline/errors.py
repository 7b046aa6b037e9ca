"""Every error Paceline raises on purpose. An error says what, the numbers, and what to do.

PacelineError
├── InvalidRequest (ValueError)    the request cannot be served as written       -> HTTP 400
│   └── PromptTooLong              prompt and output cannot fit the model        -> HTTP 400
├── NotFound                       no such model or route                        -> HTTP 404
├── Overloaded                     the queue is full; try again later            -> HTTP 429
├── ConfigError (ValueError)       a flag, keyword or config file is wrong       -> exit 2
├── CheckpointError                weights, config or tokenizer cannot be loaded -> exit 1
├── MissingExtra (ImportError)     a feature needs a package that is not there   -> exit 1
├── CollectiveError                ranks disagree, or one of them did not come   -> exit 1
└── EngineDead                     the engine process stopped; nothing can run   -> HTTP 503
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    """Base of every deliberate error."""


class InvalidRequest(PacelineError, ValueError):
    """A request that cannot be served as written. `param` names the field at fault."""

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


class NotFound(PacelineError):
    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Overloaded(PacelineError):
    """The waiting queue is full. `retry_after_s` is a hint for the Retry-After header."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConfigError(PacelineError, ValueError):
    """A flag, keyword or configuration file that cannot be used."""


class CheckpointError(PacelineError):
    """Weights, config or tokenizer files that cannot be loaded."""


class MissingExtra(PacelineError, ImportError):
    """A feature whose package is not installed; the message names the extra."""


class CollectiveError(PacelineError, RuntimeError):
    """Ranks are not at the same collective; the message says who is where."""


class EngineDead(PacelineError, RuntimeError):
    """The engine process has stopped; the message says why."""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """` Did you mean 'x'?`, or an empty string when nothing is close."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {match[0]!r}?" if match else ""
