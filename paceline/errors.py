"""Every error Paceline raises on purpose. An error says what, the numbers, and what to do.

PacelineError
├── InvalidRequest (ValueError)    the request cannot be served as written       -> HTTP 400
│   ├── PromptTooLong              prompt and output cannot fit the model        -> HTTP 400
│   └── InvalidGrammar             a schema, regex or grammar cannot be served   -> HTTP 400
├── NotFound                       no such model or route                        -> HTTP 404
├── Overloaded                     the queue is full; try again later            -> HTTP 429
├── RequestFailed                  one request failed; the engine goes on        -> HTTP 500
├── ConfigError (ValueError)       a flag, keyword or config file is wrong       -> exit 2
├── CheckpointError                weights, config or tokenizer cannot be loaded -> exit 1
├── MissingExtra (ImportError)     a feature needs a package that is not there   -> exit 1
├── CollectiveError                ranks disagree, or one of them did not come   -> exit 1
├── StoppedWhileLoading            a signal came before the engine was ready     -> exit 128 + n
└── EngineDead                     the engine process stopped; nothing can run   -> HTTP 503
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable

# Most characters of a user's input in an error message.
MAX_SHOWN = 200


class PacelineError(Exception):
    """Base of every deliberate error."""

    exit_code = 1  # of a command that ends with it


class InvalidRequest(PacelineError, ValueError):
    """A request that cannot be served as written. `param` names the field at fault."""

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = None if param is None else cut(param)


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


class InvalidGrammar(InvalidRequest):
    """A schema, regex, grammar or structural tag that cannot be served."""

    def __init__(self, message: str, *, param: str | None = "structured_outputs") -> None:
        super().__init__(message, param=param)


class NotFound(PacelineError):
    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = None if param is None else cut(param)
        self.code = code


class Overloaded(PacelineError):
    """A limit of the server or of a key is reached. `retry_after_s` is for a Retry-After header."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestFailed(PacelineError):
    """Something failed while one request ran. Other requests are not affected."""


class ConfigError(PacelineError, ValueError):
    """A flag, keyword or configuration file that cannot be used."""

    exit_code = 2


class CheckpointError(PacelineError):
    """Weights, config or tokenizer files that cannot be loaded."""


class MissingExtra(PacelineError, ImportError):
    """A feature whose package is not installed; the message names the extra."""


class CollectiveError(PacelineError, RuntimeError):
    """Ranks are not at the same collective; the message says where each rank is."""


class StoppedWhileLoading(PacelineError):
    """A signal ended the command before its model was loaded."""

    def __init__(self, signal_number: int) -> None:
        super().__init__("stopped while loading")
        self.exit_code = 128 + signal_number  # what a shell reports for a program that it ended


class EngineDead(PacelineError, RuntimeError):
    """The engine process has stopped; the message says why."""


def error_class(name: str) -> type[PacelineError] | None:
    """The error of this name, which another process has raised. None: it is none of ours."""
    kind = globals().get(name)
    return kind if isinstance(kind, type) and issubclass(kind, PacelineError) else None


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """` Did you mean 'x'?`, or an empty string when nothing is close."""
    # The cost grows with the square of the length.
    match = difflib.get_close_matches(name[:MAX_SHOWN], list(known), n=1, cutoff=cutoff)
    return f" Did you mean {match[0]!r}?" if match else ""


def context_length(limit: int) -> str:
    """How errors about a long prompt begin; litellm and others look for these words."""
    return f"This model's maximum context length is {limit} tokens of prompt and output together."


def shown(value: object) -> str:
    """A user's value as an error message quotes it."""
    # `reprlib` looks at the first entries only, so that a large value costs nothing.
    return repr(value[:MAX_SHOWN]) + _dots(value) if type(value) is str else cut(_REPR.repr(value))


def cut(text: str) -> str:
    """A user's text, or one that quotes it, at the length an error message may have of it."""
    return text[:MAX_SHOWN] + _dots(text)


def _dots(text: str) -> str:
    return "..." if len(text) > MAX_SHOWN else ""


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = MAX_SHOWN
