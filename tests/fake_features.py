"""A fake runner whose drafter reads features: its KV at a position belongs to the token after it.

Checks that every position a drafter attends to was written for exactly this sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.step import LateMasks, RunnerInfo, StepPlan, StepResult
from tests.fakes import GARBAGE, FakeRunner, Slot, _Row


class FeatureRunner(FakeRunner):
    """Its drafter's KV at position p is the chain value of the tokens up to p + 1."""

    def __init__(self, info: RunnerInfo, **options: Any) -> None:
        super().__init__(info, **options)
        self.head_kv: npt.NDArray[np.int64] = np.zeros_like(self.kv)

    def run_b(self, plan: StepPlan, rows: list[_Row], late: LateMasks | None) -> StepResult:
        alive = [row for row in rows if not row.slot.done]
        result = super().run_b(plan, rows, late)
        for row in alive:  # rows that end in this step too: their pages stay in the prefix cache
            slot = row.slot
            for position in range(row.start, slot.num_computed):
                self._write_head(slot, position, slot.states[position + 1])
        for row in alive:
            self._read_head(row.slot, self.first_seen(row.start))
            if not row.slot.done:
                for ahead in range(self._info.draft_lookahead):
                    self._write_head(row.slot, row.slot.num_computed + ahead, GARBAGE)
        return result

    def _write_head(self, slot: Slot, position: int, state: int) -> None:
        if position < self._info.max_model_len:
            size = self._info.page_size
            self.head_kv[slot.table[position // size], position % size] = state

    def _read_head(self, slot: Slot, first: int) -> None:
        assert slot.init is not None
        end = slot.num_computed
        seen = self.read(self.head_kv, slot, first, end)
        uid = slot.init.request.uid
        wanted = slot.states[first + 1 : end + 1]
        assert seen == wanted, f"the drafter of request {uid} reads wrong KV"
