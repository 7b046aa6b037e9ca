"""What the scheduler reports beside results: requests admitted, preempted or ended.

Plain data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.step import Ints


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

    def forced(self) -> list[int]:
        """The tokens that must follow the accepted ones, as far as there is only one choice.

        Empty if there are several choices. Changes no state.
        """


class MaskFiller(Protocol):
    """Computes the masks of all late rows of a step in one call."""

    def fill(
        self, rows: Sequence[tuple[int, TokenConstraint, list[int]]], mask_RWV: Ints
    ) -> dict[int, Exception]:
        """For each (index, constraint, drafts): write what `constraint.masks(drafts)` would return
        to the beginning of mask_RWV[index]. Returns the errors of constraints, by index.

        The array is used again for the next step: nothing may keep it.
        """


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that ended outside a step's result: aborted, refused or failed."""

    uid: int
    done: int  # request.Done
    reason: str = ""
    error: str = (
        ""  # class name in paceline.errors, if the request was refused or the engine failed
    )
    param: str | None = None  # of an InvalidRequest


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
