"""What the scheduler reports beside plans: rows to publish and the rare events around them.

Plain data; never decides anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.step import Ints, Longs, TokenLogprobs


class TokenConstraint(Protocol):
    """What may come next, for one request: a grammar, an automaton. Lives on the host.

    An exception of either method ends this request with an error, and no other.
    """

    def masks(self, draft_ids: list[int]) -> Ints:
        """Allowed tokens as bits, [1 + len(draft_ids), ceil(V / 32)] int32.

        Row j is the mask after the accepted tokens and draft_ids[:j]; where a draft cannot
        follow, the rows after it are never used and may hold anything. Changes no state.
        """

    def accept(self, tokens: list[int]) -> None:
        """These tokens were committed, in order; a stop token may be the last one."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that ended without a row in a step: aborted, refused or failed."""

    uid: int
    done: int  # request.Done
    reason: str = ""
    error: str = ""  # class name in paceline.errors: refused, or the whole engine failed


@dataclass(slots=True)
class Events:
    """The rare things that happened since the events were last taken."""

    admitted: list[tuple[int, int]] = field(default_factory=list)  # uid, cached prompt tokens
    preempted: list[int] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.admitted or self.preempted or self.ended)


@dataclass(slots=True)
class Emitted:
    """The rows of one result that somebody still waits for."""

    step: int
    uid_B: Longs
    count_B: Ints
    token_BW: Ints
    done_B: Ints
    num_drafts_B: Ints
    num_accepted_B: Ints
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
