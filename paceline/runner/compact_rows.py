"""The rows of a step at their true sizes: for CPUs, where the device is a thread.

Reading slot state is no wait there, so rows that are done, positions without a draft and rejected
drafts are left out of every pass and cost nothing.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.base import DraftPass
from paceline.kernels.finish.reference import running_entry
from paceline.kernels.host_drafts.reference import pack_host_drafts
from paceline.kernels.processors.reference import LateBits
from paceline.kernels.rows import WindowRows
from paceline.kernels.step_rows import PACKET_STEP, RESULT_TOKENS, BlockLayout, Ring, StepRows
from paceline.layers.attention import BlockPass, ForwardInputs
from paceline.models.layout import lay_out, lay_out_one_each
from paceline.parallel.contract import Contract
from paceline.parallel.groups import ALONE
from paceline.runner.step import Device, TargetPass
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from paceline.state.staging import StagedWrites, Staging
from paceline.step import Ints, LateMasks, Longs, StepPlan, StepSize


class CompactSource:
    """See runner.runner.RowSource. Plans are read as they are."""

    has_shapes = False

    def __init__(self, device: Device) -> None:
        self._device = device
        self._staging = Staging(device.slots, device.pages, device.recurrent)

    def stage(self, entry: int, plan: StepPlan, admissions: Any, step_size: StepSize) -> None:
        record = None if plan.host_drafts is None else pack_host_drafts(plan)
        self._staging.apply(StagedWrites(admissions, plan.page_appends, record))

    def builder(self, plan: StepPlan, step_size: StepSize) -> CompactRows:
        device = self._device
        where = (device.slots, device.pages, device.ring, device.groups.contract)
        k = min(plan.k if plan.draft_k is None else plan.draft_k, device.drafter.max_k)
        return CompactRows(plan, *where, k, is_alone=device.groups is ALONE)

    def key(self, step_size: StepSize) -> None:
        return None

    def write_masks(
        self, plan: StepPlan, step_size: StepSize, rows: StepRows | None, late: LateMasks | None
    ) -> LateBits:
        """Read where they are: host and device share memory."""
        assert rows is not None
        assert late is not None
        index_P = np.full(plan.num_rows, -1, np.int32)
        index_P[late.row_R] = np.arange(len(late.row_R))
        if rows.plan_row_B is not None:
            index_P = index_P[rows.plan_row_B.numpy()]
        return LateBits(torch.from_numpy(index_P), torch.from_numpy(late.mask_RWV))


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
        k: int,  # drafts to propose
        *,
        is_alone: bool = False,
    ) -> None:
        self._is_alone = is_alone
        self.slots = slots
        self.k = k
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

    @property
    def marks(self) -> tuple[Tensor, Tensor]:
        marks = self._plan.marks
        if marks is None:
            none_BM = torch.empty(len(self._slot_B), 0, dtype=torch.int32)
            return none_BM, none_BM
        row_B = slice(None) if self.rows.plan_row_B is None else self.rows.plan_row_B.numpy()
        length_BM, entry_BM = marks.length_BM[row_B], marks.entry_BM[row_B]
        return torch.from_numpy(length_BM), torch.from_numpy(entry_BM)

    # ---- the target

    def _begin(self, ring: Ring) -> None:
        """Rows that are done emit nothing: the entry of the ring says so from the start."""
        plan, entry, arrays = self._plan, running_entry(ring), ring.arrays
        arrays.time_E2[entry, 0] = time.perf_counter_ns()
        arrays.packet_EP[entry, PACKET_STEP] = plan.step
        result_BR = arrays.result_EBR[entry, : plan.num_rows]
        result_BR[:, :RESULT_TOKENS] = 0
        result_BR[:, RESULT_TOKENS:] = -1

    def _live(self) -> tuple[Longs, Longs, Longs, Longs]:
        plan, slots = self._plan, self.slots
        plan_slot = plan.slot_B.astype(np.int64)
        row_B = np.flatnonzero(slots.arrays.done_S[plan_slot] == 0)
        slot_B = plan_slot[row_B]
        self.samples_B = plan.samples_B[row_B]
        num_tokens_B = slots.arrays.num_tokens_S[slot_B].astype(np.int64)
        start_B = slots.arrays.num_computed_S[slot_B].astype(np.int64)
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
        draft_BK = np.full((len(slot_B), self._plan.k), -1, np.int32)
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
        # Replicas that step together run the same phases, with rows or without.
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
            end_B = slots.arrays.num_tokens_S[slot_B].astype(np.int64)
            self._is_drafting_B = self.samples_B & (slots.arrays.done_S[slot_B] == 0)
            self._drafting_slot_B = slot_B[self._is_drafting_B]
            self._end_B = end_B[self._is_drafting_B]
            self._stop_B = np.where(self.samples_B, end_B, self._start_B + self._query_len_B)

    @property
    def slot_B(self) -> Tensor:
        self._after()
        return torch.from_numpy(self._drafting_slot_B)

    def shifted(self, group_size: int) -> DraftPass:
        self._after()
        count_B, target_T = self._committed()
        batch = self._first_pass(self._start_B, count_B, group_size, shift=1)
        batch.target_T = target_T
        if self._agreed is not None:
            batch.inputs.num_rows = self._agreed.tokens
        return batch

    def _committed(self) -> tuple[Longs, Tensor | None]:
        """How many entries of each row are committed, and which of the target's they are.

        A row that sampled has no successor for its newest token, and no hidden state of it.
        """
        count_B = self._stop_B - self.samples_B - self._start_B
        if (count_B == self._query_len_B).all():
            return count_B, None
        first_B = np.cumsum(self._query_len_B) - self._query_len_B
        return count_B, torch.from_numpy(np.repeat(first_B, count_B) + _offsets(count_B))

    def block(self, group_size: int, layout: BlockLayout) -> BlockPass:
        self._after()
        self._contract.phase = "draft 1"
        count_B, target_T = self._committed()
        rows, num_committed = np.flatnonzero(count_B > 0), int(count_B.sum())
        slot_D, anchor_D = self._drafting_slot_B, self._end_B - 1
        if not self.k or not layout.width:
            slot_D, anchor_D = slot_D[:0], anchor_D[:0]
        width_D = np.minimum(layout.width, self.slots.max_model_len - anchor_D)
        inputs = lay_out(
            self.slots,
            self._pages,
            np.concatenate((self._slot_B[rows], slot_D)),
            np.concatenate((self._start_B[rows], anchor_D)),
            np.concatenate((count_B[rows], width_D)),
            group_size,
            shift=layout.shift,
        )
        offset_E = _offsets(width_D)
        is_mask_E = torch.from_numpy(offset_E >= layout.has_anchor)
        inputs.token_T[num_committed:].masked_fill_(is_mask_E, layout.mask_id)
        if self._agreed is not None:
            # At least as many as any rank has.
            inputs.num_rows = self._agreed.tokens + self._agreed.rows * layout.width
        attention = inputs.attention
        return BlockPass(
            inputs,
            num_committed,
            replace(
                attention,
                row_start_B=attention.row_start_B[len(rows) :] - num_committed,
                length_B=attention.length_B[len(rows) :],
                slot_B=attention.slot_B[len(rows) :],
            ),
            torch.from_numpy(offset_E),
            torch.from_numpy(self._outputs(layout, count_B, num_committed, width_D)),
            target_T,
        )

    def _outputs(
        self, layout: BlockLayout, count_B: Longs, num_committed: int, width_D: Longs
    ) -> Longs:
        """A block that the length limit cuts has no entry for its last drafts: any other does."""
        last_D = (np.cumsum(count_B) - 1)[self._is_drafting_B]
        entry_K = np.arange(layout.k) + layout.first_output
        if not self.k or not len(width_D):
            return np.repeat(last_D, layout.k if self.k else 0)
        first_D = num_committed + np.cumsum(width_D) - width_D
        entry_DK = first_D[:, None] + np.minimum(entry_K, width_D[:, None] - 1)
        return np.where(entry_K < 0, last_D[:, None], entry_DK).flatten()

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
        is_empty = count_B < 1  # a row with unusable logits committed nothing
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
        drafts_SK, drafts_BK = slots.arrays.drafts_SK, draft_BK.numpy()
        if self._end_B.max(initial=0) + width > slots.max_model_len:
            has_room = self._end_B[:, None] + np.arange(width) < slots.max_model_len
            drafts_BK = np.where(has_room, drafts_BK, -1)
        drafts_SK[slot_B, :width] = drafts_BK
        slots.arrays.drafts_onehot_S[slot_B] = is_onehot


def _offsets(count_B: Longs) -> Longs:
    """The number of each entry in its row."""
    return np.arange(count_B.sum()) - np.repeat(np.cumsum(count_B) - count_B, count_B)


def usable_drafts(slots: Slots, slot_B: Longs, num_tokens_B: Longs, wanted_B: Longs) -> Ints:
    """The leading real drafts of each row, -1 padded to the widest; none past the row's limit."""
    width = int(wanted_B.max(initial=0))
    if not width:
        return np.empty((len(slot_B), 0), np.int32)
    # A draft at window position j is followed by a sample at length + j + 1 < max_len.
    room_B = slots.arrays.max_len_S[slot_B] - num_tokens_B - 1
    limit_B = np.minimum(wanted_B, room_B)
    drafts_BK: Ints = slots.arrays.drafts_SK[slot_B, :width].copy()
    usable = (drafts_BK >= 0) & (np.arange(width) < limit_B[:, None])
    drafts_BK[~np.logical_and.accumulate(usable, axis=1)] = -1
    width = int((drafts_BK >= 0).sum(axis=1).max(initial=0))
    return drafts_BK[:, :width]
