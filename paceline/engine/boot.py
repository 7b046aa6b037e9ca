"""How a rank is told its place and what to build, and how it says why it ended.

`Start` is JSON; it comes before any message of `messages.py`.
"""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass
from typing import Any

from paceline.config import EngineConfig
from paceline.engine.messages import Died
from paceline.errors import CollectiveError, PacelineError
from paceline.parallel.placement import ONLY_RANK, Layout, RankPlace

_MAX_PLACES = 8


@dataclass(frozen=True, slots=True)
class RankSpawn:
    """A rank's place, and the descriptors that it inherits beside its channel to the front."""

    place: RankPlace = ONLY_RANK
    plans: tuple[int, ...] = ()  # of a leader: one to each peer; of a peer: one to its leader
    wake: int | None = None  # a leader reads here that another leader wakes it
    wake_others: tuple[int, ...] = ()  # a leader wakes the others here
    shared: tuple[int, ...] = ()  # files that all ranks share; the first has the heartbeats
    wakes_by_front: bool = False  # leaders on other nodes are woken through the front
    may_use_gpu: bool = False

    @property
    def beats(self) -> int | None:
        """For life.Beats; None for a rank in a thread of the front."""
        return self.shared[0] if self.shared else None

    @property
    def descriptors(self) -> list[int]:
        woken = [] if self.wake is None else [self.wake]
        store = [] if self.place.store_fd is None else [self.place.store_fd]
        return [*self.plans, *woken, *self.wake_others, *self.shared, *store]

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> RankSpawn:
        values = json.loads(text)
        tuples = {name: tuple(v) for name, v in values.items() if isinstance(v, list)}
        return cls(**{**values, **tuples, "place": decode_place(values["place"])})


def decode_place(values: dict[str, Any]) -> RankPlace:
    """From what `asdict` made of it."""
    return RankPlace(**{**values, "layout": Layout(**values["layout"])})


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


def last_words(error: BaseException, *, is_starting: bool = False) -> Died:
    """What a rank says when it ends. A deliberate error at the start is its own explanation; any
    other error says where it came from."""
    is_plain = is_starting and isinstance(error, PacelineError)
    reason = str(error) if is_plain else describe(error)
    kind = type(error).__name__ if is_starting else ""
    return Died(reason, is_after_another(error), kind)


def is_after_another(error: BaseException) -> bool:
    """Whether an error is what a rank sees when another rank has ended or does not answer."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, CollectiveError | ConnectionError):
            return True
        seen = seen.__cause__
    return False


def describe(error: BaseException) -> str:
    """The error and the innermost places of its traceback."""
    head = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)[-_MAX_PLACES:]
    places = [f"  at {f.filename}:{f.lineno} in {f.name}" for f in reversed(frames)]
    return "\n".join([head, *places])
