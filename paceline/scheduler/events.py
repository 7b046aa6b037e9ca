"""What the scheduler reports: rows to publish, and requests admitted, preempted or ended.

Plain data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.step import Ints, Longs, TokenLogprobs


class TokenConstraint(Protocol):
    """Which tokens may come next in one request, for example by a grammar. Runs on the host.

    If a method raises, this request ends with an error; others are not affected.
    """

    def masks(self, draft_ids: list[int]) -> Ints:
        """Allowed tokens as bits, [1 + len(draft_ids), ceil(V / 32)] int32.

        Row j is the mask after the accepted tokens and draft_ids[:j]. If a draft is not allowed,
        the rows after it are not used and may hold anything. Changes no state.
        """

    def accept(self, tokens: list[int]) -> None:
        """These tokens were committed, in order. The last may be a stop token."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that ended outside a step's result: aborted, refused or failed."""

    uid: int
    done: int  # request.Done
    reason: str = ""
    error: str = (
        ""  # class name in paceline.errors, if the request was refused or the engine failed
    )


@dataclass(slots=True)
class Events:
    """What happened since the events were last taken."""

    admitted: list[tuple[int, int]] = field(default_factory=list)  # uid, cached prompt tokens
    preempted: list[int] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.admitted or self.preempted or self.ended)

    def take(self) -> Events:
        """All of them; this object is empty afterwards."""
        taken = Events(self.admitted, self.preempted, self.ended)
        self.admitted, self.preempted, self.ended = [], [], []
        return taken


@dataclass(slots=True)
class Emitted:
    """The rows of one result whose requests have not ended."""

    step: int
    uid_B: Longs
    count_B: Ints
    token_BW: Ints
    done_B: Ints
    num_drafts_B: Ints
    num_accepted_B: Ints
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
