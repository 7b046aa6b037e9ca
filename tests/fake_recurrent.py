"""Fake runners with a recurrent state: a value that depends on every token applied to it.

The state obeys the commit rule of ADR 21, is copied out at marks and copied in on a prefix hit.
Every hit is checked against the tokens of the request that continues from it.
"""

from __future__ import annotations

from typing import Any

from paceline.step import RunnerInfo, StepPlan
from tests.fake_features import FeatureRunner
from tests.fake_model import START, chain, mix
from tests.fakes import GARBAGE, FakeRunner, _Row


class RecurrentRunner(FakeRunner):
    def __init__(self, info: RunnerInfo, **options: Any) -> None:
        super().__init__(info, **options)
        assert info.is_recurrent
        # Length and value of each slot's state, and of each snapshot.
        self.state_S = [(0, START)] * info.num_slots
        self.saved_E = [(0, GARBAGE)] * info.num_snapshots
        self.num_hits = 0
        self.num_saved = 0
        self.num_saved_by_decoding = 0

    def _apply_admissions(self, plan: StepPlan) -> None:
        super()._apply_admissions(plan)
        for init in plan.admissions:
            state = (0, START)
            if init.snapshot >= 0:
                state = self.saved_E[init.snapshot]
                self.num_hits += 1
            self.state_S[init.slot] = state
            if not plan.unwanted[0]:  # else the step that was to write the snapshot may be left out
                assert state[0] == init.num_cached, "the state has another length than the hit"
                own = chain(init.tokens[: init.num_cached].tolist())
                assert state[1] == (own[-1] if own else START), "the state of another prefix"

    def run_a(self, plan: StepPlan) -> list[_Row]:
        rows = super().run_a(plan)
        marks = self._marks(plan)
        if plan.unwanted[0]:
            for slot, entries in zip(plan.slot_B.tolist(), marks, strict=True):
                for at, entry in entries.items():
                    if at > self.state_S[slot][0]:  # half of the step may have run
                        self.saved_E[entry] = (0, GARBAGE)
            return rows
        for row in rows:
            if not row.slot.done:
                self._apply_row(plan, row, marks[row.index])
        return rows

    def _marks(self, plan: StepPlan) -> list[dict[int, int]]:
        """By row: entry of each length."""
        if plan.marks is None:
            return [{} for _ in range(plan.num_rows)]
        length_BM, entry_BM = plan.marks.length_BM, plan.marks.entry_BM
        assert ((length_BM < 0) == (entry_BM < 0)).all()
        entries = entry_BM[entry_BM >= 0].tolist()
        assert entries, "an array of no marks"
        assert len(set(entries)) == len(entries), "two rows write one snapshot"
        assert max(entries) < self._info.num_snapshots
        lengths = length_BM[length_BM >= 0]
        assert (lengths % self._info.page_size == 0).all()
        assert lengths.min() > 0
        pairs = zip(length_BM.tolist(), entry_BM.tolist(), strict=True)
        return [{at: entry for at, entry in zip(*row, strict=True) if entry >= 0} for row in pairs]

    def _apply_row(self, plan: StepPlan, row: _Row, marks: dict[int, int]) -> None:
        index = int(plan.slot_B[row.index])
        is_prefill = row.start < row.slot.prefill_len
        num_final = row.start + (int(plan.query_len_B[row.index]) if is_prefill else 1)
        length, value = self.state_S[index]
        assert row.start - self._info.window_k <= length <= row.start, "inputs that are not kept"
        for token in row.slot.tokens[length:num_final]:
            length, value = length + 1, mix(value, token)
            if length in marks:
                self.saved_E[marks[length]] = (length, value)
                self.num_saved += 1
                self.num_saved_by_decoding += not is_prefill
        assert (length, value) == (num_final, row.slot.states[num_final - 1])
        self.state_S[index] = (length, value)


class RecurrentFeatureRunner(RecurrentRunner, FeatureRunner):
    """With a drafter that reads features."""
