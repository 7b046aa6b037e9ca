"""How an engine is told what to build, and how it says why it could not.

JSON frames that come before any of `messages.py`; told apart by their first byte, "{".
"""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass

from paceline import errors
from paceline.config import EngineConfig
from paceline.errors import EngineDead, PacelineError

_MAX_PLACES = 8


@dataclass(frozen=True, slots=True)
class Start:
    """Front to engine: build this."""

    config: EngineConfig
    log_level: str = "warning"

    def encode(self) -> bytes:
        return json.dumps({"config": self.config.flat(), "log_level": self.log_level}).encode()

    @classmethod
    def decode(cls, frame: bytes) -> Start:
        values = json.loads(frame)
        return cls(EngineConfig.from_keywords(**values["config"]), values["log_level"])


@dataclass(frozen=True, slots=True)
class Failed:
    """Engine to front: it cannot start. `kind` is the class name of the error."""

    kind: str
    message: str

    @classmethod
    def because(cls, error: BaseException) -> Failed:
        """A deliberate error says all there is to say; any other one says where it came from."""
        known = isinstance(error, PacelineError)
        return cls(type(error).__name__, str(error) if known else describe(error))

    def to_error(self) -> PacelineError:
        """The error that the engine raised, of the same type; EngineDead for one not ours."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, PacelineError):
            return kind(self.message)
        return EngineDead(f"The engine could not start: {self.message}")

    def encode(self) -> bytes:
        return json.dumps({"kind": self.kind, "message": self.message}).encode()

    @classmethod
    def decode(cls, frame: bytes) -> Failed:
        return cls(**json.loads(frame))


def is_boot_frame(frame: bytes) -> bool:
    return frame[:1] == b"{"


def describe(error: BaseException) -> str:
    """The error and the innermost places of its traceback: enough to know where to look."""
    head = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)[-_MAX_PLACES:]
    places = [f"  at {f.filename}:{f.lineno} in {f.name}" for f in reversed(frames)]
    return "\n".join([head, *places])
