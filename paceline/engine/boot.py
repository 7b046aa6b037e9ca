"""How a rank is told where it sits and what to build, and how it says why it could not.

JSON that comes before any of `messages.py`; frames are told apart by their first byte, "{".
"""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass

from paceline import errors
from paceline.config import EngineConfig
from paceline.errors import CollectiveError, EngineDead, PacelineError
from paceline.parallel.placement import ONLY_RANK, Layout, RankPlace

_MAX_PLACES = 8


@dataclass(frozen=True, slots=True)
class Post:
    """A rank's place, and the descriptors that it has inherited beside its channel to the front."""

    place: RankPlace = ONLY_RANK
    plans: tuple[int, ...] = ()  # a leader: one to each peer, in rank order; a peer: to its leader
    wake: int | None = None  # where a leader is woken by others
    wake_others: tuple[int, ...] = ()  # where it wakes them
    shared: tuple[int, ...] = ()  # files that all ranks share; the first has their beats
    may_use_gpu: bool = False

    @property
    def beats(self) -> int | None:
        """See life.Beats; None for a rank in a thread of the front."""
        return self.shared[0] if self.shared else None

    @property
    def descriptors(self) -> list[int]:
        woken = [] if self.wake is None else [self.wake]
        return [*self.plans, *woken, *self.wake_others, *self.shared]

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Post:
        values = json.loads(text)
        place = values["place"]
        return cls(
            place=RankPlace(**{**place, "layout": Layout(**place["layout"])}),
            plans=tuple(values["plans"]),
            wake=values["wake"],
            wake_others=tuple(values["wake_others"]),
            shared=tuple(values["shared"]),
            may_use_gpu=values["may_use_gpu"],
        )


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
    after_another: bool = False  # another rank seems to have gone first

    @classmethod
    def because(cls, error: BaseException) -> Failed:
        """A deliberate error says all there is to say; any other one says where it came from."""
        known = isinstance(error, PacelineError)
        message = str(error) if known else describe(error)
        return cls(type(error).__name__, message, is_after_another(error))

    def to_error(self, who: str = "") -> PacelineError:
        """The error that the engine raised, of the same type; EngineDead for one not ours."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, PacelineError):
            return kind(f"{who}{self.message}")
        return EngineDead(f"The engine could not start: {who}{self.message}")

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, frame: bytes) -> Failed:
        return cls(**json.loads(frame))


def is_boot_frame(frame: bytes) -> bool:
    return frame[:1] == b"{"


def is_after_another(error: BaseException) -> bool:
    """Whether an error is what a rank sees when another one is gone: nobody answers."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, CollectiveError | ConnectionError):
            return True
        seen = seen.__cause__
    return False


def describe(error: BaseException) -> str:
    """The error and the innermost places of its traceback: enough to know where to look."""
    head = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)[-_MAX_PLACES:]
    places = [f"  at {f.filename}:{f.lineno} in {f.name}" for f in reversed(frames)]
    return "\n".join([head, *places])
