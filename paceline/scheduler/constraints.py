"""Token constraints (grammars) of running requests: masks before a step, tokens after it.

A constraint that raises ends its own request with an error and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from paceline.request import Done
from paceline.scheduler.allocator import Allocator
from paceline.scheduler.events import Ended, Events, MaskFiller, TokenConstraint
from paceline.scheduler.inflight import Flight, Rows
from paceline.scheduler.live_request import LiveRequest
from paceline.scheduler.request_table import RequestTable
from paceline.step import Bools, Ints, LateMasks, StepPlan, StepResult

logger = logging.getLogger(__name__)


class OneByOne:
    """Asks one constraint after another. See MaskFiller."""

    def fill(
        self, rows: Sequence[tuple[int, TokenConstraint, list[int]]], mask_RWV: Ints
    ) -> dict[int, Exception]:
        errors: dict[int, Exception] = {}
        for index, constraint, drafts in rows:
            try:
                mask_RWV[index, : 1 + len(drafts)] = constraint.masks(drafts)
            except Exception as error:
                errors[index] = error
        return errors


class Constraints:
    """Asks the constraint of each late row, and tells it what was committed.

    A late row is a row whose token mask depends on the result of the step before.
    """

    def __init__(
        self,
        requests: RequestTable,
        allocator: Allocator,
        events: Events,
        vocab_size: int,
        filler: MaskFiller | None = None,
    ) -> None:
        self._requests = requests
        self._allocator = allocator
        self._events = events
        self._num_words = (vocab_size + 31) // 32
        self._filler = filler or OneByOne()
        # The masks of a step. Its result comes before the masks of the next step are made.
        self._words: Ints = np.empty(0, np.int32)

    def late_rows(self, slots: Rows, samples_B: Bools) -> Bools | None:
        """The rows that sample under a constraint; None if there are none."""
        if not self._requests.num_constrained:
            return None
        owners = [self._requests.owner(slot) for slot in slots.tolist()]
        is_constrained = [live.constraint is not None for live in owners]
        late_B: Bools = np.array(is_constrained, np.bool_) & samples_B
        return late_B if late_B.any() else None

    def masks(self, plan: StepPlan, taken: Mapping[int, Ints]) -> LateMasks:
        """Allowed tokens of the late rows, after everything their requests have accepted.

        `taken`: the host drafts that rows verify instead of the drafter's, by row.
        """
        assert plan.late_B is not None
        row_R: Ints = np.flatnonzero(plan.late_B).astype(np.int32)
        mask_RWV = self._mask_array(len(row_R), plan.k + 1)
        asked: list[tuple[int, TokenConstraint, list[int]]] = []
        owners: dict[int, LiveRequest] = {}
        for index, row in enumerate(row_R.tolist()):
            live = self._requests.by_uid.get(int(plan.uid_B[row]))
            if live is None or live.constraint is None:
                mask_RWV[index] = -1
                continue  # it ended in the step before: the device emits nothing for it
            drafts = taken[row].tolist() if row in taken else live.drafts
            asked.append((index, live.constraint, drafts[: int(plan.k_B[row])]))
            owners[index] = live
        for index, error in self._filler.fill(asked, mask_RWV).items():
            mask_RWV[index] = -1
            self._fail(owners[index], error)
        return LateMasks(row_R, mask_RWV)

    def _mask_array(self, num_rows: int, width: int) -> Ints:
        size = num_rows * width * self._num_words
        if len(self._words) < size:
            self._words = np.empty(size, np.int32)
        return self._words[:size].reshape(num_rows, width, self._num_words)

    def begin(self, live: LiveRequest) -> None:
        """The last prompt chunk is launched: what is forced after it is known already."""
        if live.constraint is not None:
            try:
                self._offer(live, live.constraint, len(live.tokens))
            except Exception:  # its masks are asked for next: an error is reported there
                logger.debug("request %d: no forced tokens", live.uid, exc_info=True)

    def _offer(self, live: LiveRequest, constraint: TokenConstraint, length: int) -> None:
        """Forced tokens become drafts of the host."""
        continuations = self._allocator.continuations
        if continuations.is_on:
            continuations.offer(live.slot, length, constraint.forced(), is_forced=True)

    def accept_late_rows(self, flight: Flight, result: StepResult) -> None:
        """Tell the constraints what the late rows of a step committed, and keep their drafts."""
        late_B = flight.plan.late_B
        assert late_B is not None
        assert result.draft_BK is not None, "a late step delivers its drafts"
        for row in late_B.nonzero()[0].tolist():
            if row in flight.strays:
                continue
            live = self._requests.owner(int(flight.slots[row]))
            tokens = result.token_BW[row, : result.count_B[row]].tolist()
            is_done = bool(result.done_B[row])
            if self.accept(live, tokens, is_done) and not is_done:
                drafts = result.draft_BK[row].tolist()
                live.drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts
                self._offer_forced(live)

    def _offer_forced(self, live: LiveRequest) -> None:
        assert live.constraint is not None
        try:
            self._offer(live, live.constraint, self._allocator.slots.length(live.slot))
        except Exception as error:
            self._fail(live, error)

    def accept(self, live: LiveRequest, tokens: list[int], is_done: bool) -> bool:
        """Tell a request's constraint which tokens were committed. False if it raised, which
        ends the request unless it is done already."""
        if live.constraint is not None and tokens:
            try:
                live.constraint.accept(tokens)
            except Exception as error:
                if not is_done:
                    self._fail(live, error)
                return False
        return True

    def _fail(self, live: LiveRequest, error: Exception) -> None:
        logger.warning("the constraint of request %d failed", live.uid, exc_info=error)
        self._allocator.end(live)
        reason = f"the constraint of the request failed: {type(error).__name__}: {error}"
        self._events.ended.append(Ended(live.uid, Done.ERROR, reason))
