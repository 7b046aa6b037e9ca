"""The rows of a step at their true sizes: for CPUs, where the device is a thread.

Reading slot state is no wait there, so rows that are done, positions without a draft and rejected
drafts are left out of every pass and cost nothing.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.base import DraftPass
from paceline.kernels.rows import WindowRows
from paceline.kernels.step_rows import RESULT_TOKENS, PacketLayout, Ring, StepRows
from paceline.layers.attention import ForwardInputs
from paceline.models.layout import lay_out, lay_out_one_each
from paceline.parallel.contract import Contract
from paceline.parallel.groups import ALONE
from paceline.runner.step import Device, TargetPass
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from paceline.state.staging import StagedWrites, Staging
from paceline.step import Ints, Longs, StepPlan, StepSize


class CompactSource:
    """See runner.runner.RowSource. Plans are read as they are."""

    has_shapes = False

    def __init__(self, device: Device) -> None:
        self._device = device
        self._staging = Staging(device.slots, device.pages)

    def stage(self, entry: int, plan: StepPlan, admissions: Any, step_size: StepSize) -> None:
        self._staging.apply(StagedWrites(admissions, plan.page_appends))

    def builder(self, plan: StepPlan, step_size: StepSize) -> CompactRows:
        device = self._device
        where = (device.slots, device.pages, device.ring, device.groups.contract)
        return CompactRows(plan, *where, is_alone=device.groups is ALONE)

    def key(self, step_size: StepSize) -> None:
        return None


class CompactRows:
    """See runner.step.RowBuilder. The drafter's passes come after advance: lengths are new then."""

    feature_TD: Tensor

    def __init__(
        self,
        plan: StepPlan,
        slots: Slots,
        pages: Pages,
        ring: Ring,
        contract: Contract,
        *,
        is_alone: bool = False,
    ) -> None:
        self._is_alone = is_alone
        self.slots = slots
        self.k = plan.k
        self._plan = plan
        self._agreed = plan.agreed
        self._contract = contract
        self._pages = pages
        self._begin(ring)
        self._slot_B, self._start_B, self._query_len_B, self._num_drafts_B = self._live()
        self._is_drafting_B: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None

    @property
    def is_joint(self) -> bool:
        return self._agreed is not None

    # ---- the target

    def _begin(self, ring: Ring) -> None:
        """Rows that are done emit nothing: the entry of the ring says so from the start."""
        plan, entry = self._plan, int(ring.turn_1) % len(ring.stamp_E)
        ring.time_E2.numpy()[entry, 0] = time.perf_counter_ns()
        ring.packet_EP.numpy()[entry, PacketLayout.STEP] = plan.step
        result_BR = ring.result_EBR.numpy()[entry, : plan.num_rows]
        result_BR[:, :RESULT_TOKENS] = 0
        result_BR[:, RESULT_TOKENS:] = -1

    def _live(self) -> tuple[Longs, Longs, Longs, Longs]:
        plan, slots = self._plan, self.slots
        plan_slot = plan.slot_B.astype(np.int64)
        row_B = np.flatnonzero(slots.done_S.numpy()[plan_slot] == 0)
        slot_B = plan_slot[row_B]
        self.samples_B = plan.samples_B[row_B]
        num_tokens_B = slots.num_tokens_S.numpy()[slot_B].astype(np.int64)
        start_B = slots.num_computed_S.numpy()[slot_B].astype(np.int64)
        # Committed tokens first; what the plan asks beyond them are drafts.
        asked_B = plan.query_len_B[row_B].astype(np.int64)
        self._committed_B = np.minimum(asked_B, num_tokens_B - start_B)
        wanted_B = asked_B - self._committed_B
        self._draft_BK = usable_drafts(slots, slot_B, num_tokens_B, wanted_B)
        num_drafts_B = (self._draft_BK >= 0).sum(axis=1)
        query_len_B = self._committed_B + num_drafts_B
        self.rows = self._step_rows(row_B, slot_B, num_tokens_B, start_B, query_len_B)
        return slot_B, start_B, query_len_B, num_drafts_B

    def _step_rows(
        self, row_B: Longs, slot_B: Longs, num_tokens_B: Longs, start_B: Longs, query_len_B: Longs
    ) -> StepRows:
        width_B = np.where(self.samples_B, 1 + (self._draft_BK >= 0).sum(axis=1), 0)
        self._num_logits = int(width_B.sum())
        draft_BK = np.full((len(slot_B), self.k), -1, np.int32)
        draft_BK[:, : self._draft_BK.shape[1]] = self._draft_BK
        windows = WindowRows(
            slot_B=torch.from_numpy(slot_B),
            first_B=torch.from_numpy(np.cumsum(width_B) - width_B),
            width_B=torch.from_numpy(width_B),
            length_B=torch.from_numpy(num_tokens_B),
            draft_BK=torch.from_numpy(draft_BK),
        )
        return StepRows(
            windows=windows,
            start_B=torch.from_numpy(start_B),
            row_start_B=torch.from_numpy(np.cumsum(query_len_B) - query_len_B),
            query_len_B=torch.from_numpy(query_len_B),
            plan_row_B=None if len(row_B) == self._plan.num_rows else torch.from_numpy(row_B),
        )

    def target(self, group_size: int, *, reads_all: bool) -> TargetPass | None:
        # A step of several replicas has the same phases on all of them, whoever has rows.
        if not len(self._slot_B) and self._agreed is None:
            return None
        inputs = lay_out(
            self.slots,
            self._pages,
            self._slot_B,
            self._start_B,
            self._committed_B,
            group_size,
            drafts=self._draft_BK if self._draft_BK.shape[1] else None,
        )
        if self._agreed is not None:
            inputs.num_rows = self._agreed.tokens
        if self._is_alone:  # else other ranks compute the step with this one
            inputs.unwanted = self._plan.unwanted
        if self._num_logits == len(inputs.token_T):
            return TargetPass(inputs)
        rows = self.rows.windows.logit_rows
        # A window is the last positions of its row.
        end_B = (self.rows.row_start_B + self.rows.query_len_B - self.rows.windows.width_B).long()
        return TargetPass(inputs, end_B[rows.owner_M] + rows.offset_M)

    # ---- the drafter

    def _after(self) -> None:
        """Slot state has moved: which rows draft, and how far committed tokens were computed."""
        if self._is_drafting_B is None:
            slots, slot_B = self.slots, self._slot_B
            end_B = slots.num_tokens_S.numpy()[slot_B].astype(np.int64)
            self._is_drafting_B = self.samples_B & (slots.done_S.numpy()[slot_B] == 0)
            self._drafting_slot_B = slot_B[self._is_drafting_B]
            self._end_B = end_B[self._is_drafting_B]
            self._stop_B = np.where(self.samples_B, end_B, self._start_B + self._query_len_B)

    @property
    def slot_B(self) -> Tensor:
        self._after()
        return torch.from_numpy(self._drafting_slot_B)

    def shifted(self, group_size: int) -> DraftPass:
        self._after()
        # A row that sampled has no successor for its newest token, and no hidden state of it.
        count_B = self._stop_B - self.samples_B - self._start_B
        target_T = None
        if (count_B != self._query_len_B).any():
            first_B = np.cumsum(self._query_len_B) - self._query_len_B
            offset_T = np.arange(count_B.sum()) - np.repeat(np.cumsum(count_B) - count_B, count_B)
            target_T = torch.from_numpy(np.repeat(first_B, count_B) + offset_T)
        batch = self._first_pass(self._start_B, count_B, group_size, shift=1)
        batch.target_T = target_T
        if self._agreed is not None:
            batch.inputs.num_rows = self._agreed.tokens
        return batch

    def own(self, group_size: int) -> DraftPass:
        """Two committed tokens cover full acceptance, where the last draft was never fed; after a
        rejection the first of them is computed again, to the same values."""
        self._after()
        start_B = np.where(self._num_drafts_B > 0, self._stop_B - 2, self._start_B)
        batch = self._first_pass(start_B, self._stop_B - start_B, group_size, shift=0)
        if self._agreed is not None:
            batch.inputs.num_rows = self._agreed.draft_tokens
        return batch

    def _first_pass(
        self, start_B: Longs, count_B: Longs, group_size: int, *, shift: int
    ) -> DraftPass:
        self._contract.phase = "draft 1"
        last_B = torch.from_numpy((np.cumsum(count_B) - 1)[self._is_drafting_B])
        slot_B = self._slot_B
        is_empty = count_B < 1  # a row that broke committed nothing
        if is_empty.any():
            slot_B, start_B, count_B = slot_B[~is_empty], start_B[~is_empty], count_B[~is_empty]
        inputs = lay_out(self.slots, self._pages, slot_B, start_B, count_B, group_size, shift=shift)
        return DraftPass(inputs, last_B)

    def next(self, j: int, token_B: Tensor, group_size: int, *, is_shifted: bool) -> ForwardInputs:
        self._contract.phase = f"draft {j + 1}"
        position_B = self._end_B + (j - 1 - is_shifted)
        inputs = lay_out_one_each(
            self.slots, self._pages, self._drafting_slot_B, position_B, token_B, group_size
        )
        if self._agreed is not None:
            inputs.num_rows = self._agreed.rows
        return inputs

    def position_B(self, j: int) -> Tensor:
        return torch.from_numpy(self._end_B + j)

    def store(self, draft_BK: Tensor, *, is_onehot: bool) -> None:
        slots, slot_B, width = self.slots, self._drafting_slot_B, draft_BK.shape[1]
        has_room = self._end_B[:, None] + np.arange(width) < slots.max_model_len
        drafts_SK = slots.drafts_SK.numpy()
        drafts_SK[slot_B] = -1
        drafts_SK[slot_B, :width] = np.where(has_room, draft_BK.numpy(), -1)
        slots.drafts_onehot_S.numpy()[slot_B] = is_onehot


def usable_drafts(slots: Slots, slot_B: Longs, num_tokens_B: Longs, wanted_B: Longs) -> Ints:
    """The leading real drafts of each row, -1 padded to the widest; none past the row's limit."""
    width = int(wanted_B.max(initial=0))
    if not width:
        return np.empty((len(slot_B), 0), np.int32)
    # A draft at window position j is followed by a sample at length + j + 1 < max_len.
    room_B = slots.max_len_S.numpy()[slot_B] - num_tokens_B - 1
    limit_B = np.minimum(wanted_B, room_B)
    drafts_BK = slots.drafts_SK.numpy()[slot_B, :width].copy()
    usable = (drafts_BK >= 0) & (np.arange(width) < limit_B[:, None])
    drafts_BK[~np.logical_and.accumulate(usable, axis=1)] = -1
    width = int((drafts_BK >= 0).sum(axis=1).max(initial=0))
    return drafts_BK[:, :width]
