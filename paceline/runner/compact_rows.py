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
from paceline.layers.attention import BlockPass, ForwardInputs, WantedEntries
from paceline.models.layout import attention_rows, lay_out, lay_out_one_each
from paceline.parallel.contract import Contract
from paceline.parallel.groups import ALONE
from paceline.runner.step import Device, TargetPass
from paceline.state.late_rows import LateRows
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from paceline.state.staging import StagedWrites, Staging
from paceline.step import Bools, Ints, LateMasks, Longs, StepPlan, StepSize


class CompactSource:
    """See runner.runner.RowSource. Plans are read as they are."""

    has_shapes = False

    def __init__(self, device: Device, max_late: int) -> None:
        """`max_late`: entries of a row that the drafter's first pass may put off."""
        self._device = device
        self._staging = Staging(device.slots, device.pages, device.recurrent)
        self.max_late = max_late
        self._late = LateRows(device.slots.num_slots, max_late) if max_late else None

    def stage(self, entry: int, plan: StepPlan, admissions: Any, step_size: StepSize) -> None:
        if self._late is not None:
            self._late.begin([init.slot for init, _ in admissions])
        record = None if plan.host_drafts is None else pack_host_drafts(plan)
        self._staging.apply(StagedWrites(admissions, plan.page_appends, record))

    def builder(self, plan: StepPlan, step_size: StepSize) -> CompactRows:
        device = self._device
        where = (device.slots, device.pages, device.ring, device.groups.contract)
        k = min(plan.k if plan.draft_k is None else plan.draft_k, device.drafter.max_k)
        return CompactRows(plan, *where, k, is_alone=device.groups is ALONE, late=self._late)

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
        late: LateRows | None = None,
    ) -> None:
        self._is_alone = is_alone
        # Replicas in lock step run the same passes, so none is put off.
        self._late = late if plan.agreed is None else None
        self.slots = slots
        self.k = k
        self._plan = plan
        self._agreed = plan.agreed
        self._contract = contract
        self._pages = pages
        self._begin(ring)
        self._slot_B, self._start_B, self._query_len_B = self._live()
        self._row_D: Longs | None = None  # rows that draft; those with the most drafts first

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

    def _live(self) -> tuple[Longs, Longs, Longs]:
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
        query_len_B = self._committed_B + (self._draft_BK >= 0).sum(axis=1)
        self.rows = self._step_rows(row_B, slot_B, num_tokens_B, start_B, query_len_B)
        return slot_B, start_B, query_len_B

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
        if self._row_D is None:
            slots, slot_B = self.slots, self._slot_B
            end_B = slots.arrays.num_tokens_S[slot_B].astype(np.int64)
            self._row_D = self.k_D = np.empty(0, np.int64)
            if self.k:
                k_B = self._draft_k_B()
                is_drafting_B = self.samples_B & (slots.arrays.done_S[slot_B] == 0) & (k_B > 0)
                row_D = np.flatnonzero(is_drafting_B)
                self._row_D = row_D[np.argsort(-k_B[row_D], kind="stable")]
                self.k_D = k_B[self._row_D]
            self._drafting_slot_B = slot_B[self._row_D]
            self._end_B = end_B[self._row_D]
            self._stop_B = np.where(self.samples_B, end_B, self._start_B + self._query_len_B)

    def _draft_k_B(self) -> Longs:
        """Drafts that the plan asks for by row."""
        asked_P = self._plan.draft_k_B
        if asked_P is None:
            return np.full(len(self._slot_B), self.k)
        return np.minimum(asked_P[self._plan_rows()], self.k)

    def _plan_rows(self) -> Longs:
        """The plan's row of each row."""
        row_B = self.rows.plan_row_B
        return np.arange(len(self._slot_B)) if row_B is None else row_B.numpy().astype(np.int64)

    def num_drafting(self, j: int) -> int:
        return int(np.count_nonzero(self.k_D > j))

    @property
    def slot_B(self) -> Tensor:
        self._after()
        return torch.from_numpy(self._drafting_slot_B)

    def shifted(self, group_size: int) -> DraftPass | None:
        self._after()
        count_B, target_T = self._committed()
        late_B, runs_B = self._put_off(count_B)
        feature_TD = None
        if not runs_B.all() or late_B.any():
            feature_TD = self._late_features(count_B, late_B, runs_B, target_T)
            if feature_TD is None:
                return None
            count_B = (count_B + late_B) * runs_B
        batch = self._first_pass(self._start_B - late_B, count_B, group_size, shift=1)
        batch.target_T, batch.feature_TD = target_T, feature_TD
        if self._agreed is not None:
            batch.inputs.num_rows = self._agreed.tokens
        elif _is_worth_it(len(batch.inputs.token_T), len(batch.last_B)):
            batch.inputs.wanted = self._wanted(batch, group_size)
        return batch

    def _wanted(self, batch: DraftPass, group_size: int) -> WantedEntries:
        """The last entry of each row that drafts. Without one the pass writes KV and no more."""
        length_D = batch.inputs.position_T.numpy()[batch.last_B.numpy()] + 1
        row_start = np.arange(len(length_D) + 1)
        rows = (self._drafting_slot_B, row_start, length_D, group_size)
        return WantedEntries(batch.last_B, attention_rows(self._pages, *rows))

    def _put_off(self, count_B: Longs) -> tuple[Longs, Bools]:
        """The entries of each row that earlier steps have put off, and which rows are in this
        step's first pass; the others put off `count_B` more.

        A row waits if it decodes, goes on and gets no drafts. When one has no room left, none
        waits, so that later they have room for equally many steps.
        """
        late, slot_B = self._late, self._slot_B
        if late is None:
            return np.zeros_like(count_B), np.ones(len(slot_B), np.bool_)
        late_B = late.count_S[slot_B]
        # The first token of a slot comes from a prompt, whose pages others may find already.
        waits_B = self.samples_B & late.has_sampled_S[slot_B]
        late.has_sampled_S[slot_B] |= self.samples_B
        waits_B &= self.slots.arrays.done_S[slot_B] == 0
        waits_B[self._row_D] = False
        waits_B &= not (waits_B & (late_B + count_B > late.most)).any()
        late.count_S[slot_B] = (late_B + count_B) * waits_B
        return late_B, ~waits_B

    def _late_features(
        self, count_B: Longs, late_B: Longs, runs_B: Bools, target_T: Tensor | None
    ) -> Tensor | None:
        """Keep the features of rows that wait. Returns those of the first pass; None: no row is in
        it."""
        assert self._late is not None
        feature_TD = self.feature_TD if target_T is None else self.feature_TD[target_T]
        runs_T = np.repeat(runs_B, count_B)
        if not runs_B.all():
            kept_B = count_B * ~runs_B
            kept_TD = feature_TD if not runs_B.any() else feature_TD[torch.from_numpy(~runs_T)]
            at_T = np.repeat(late_B, kept_B) + _offsets(kept_B)
            self._late.keep(np.repeat(self._slot_B, kept_B), at_T, kept_TD)
            if not runs_B.any():
                return None
        old_B, new_B = late_B * runs_B, count_B * runs_B
        is_old_T = _offsets(old_B + new_B) < np.repeat(old_B, old_B + new_B)
        both_TD = feature_TD.new_empty((len(is_old_T), feature_TD.shape[1]))
        both_TD[torch.from_numpy(~is_old_T)] = feature_TD[torch.from_numpy(runs_T)]
        if is_old_T.any():
            slots = np.repeat(self._slot_B, old_B)
            both_TD[torch.from_numpy(is_old_T)] = self._late.features(slots, _offsets(old_B))
        return both_TD

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
        last_D = (np.cumsum(count_B) - 1)[self._row_D]
        entry_K = np.arange(layout.k) + layout.first_output
        if not self.k or not len(width_D):
            return np.repeat(last_D, layout.k if self.k else 0)
        first_D = num_committed + np.cumsum(width_D) - width_D
        entry_DK = first_D[:, None] + np.minimum(entry_K, width_D[:, None] - 1)
        return np.where(entry_K < 0, last_D[:, None], entry_DK).flatten()

    def own(self, group_size: int) -> DraftPass | None:
        """At most `StepPlan.draft_len_B` committed tokens: after a rejection some of them are
        computed again, to the same values."""
        self._after()
        late_B, runs_B = self._put_off(self._committed()[0])
        if not runs_B.any() and len(runs_B):
            return None
        most_B = self._plan.draft_len_B[self._plan_rows()]
        start_B = np.maximum(self._stop_B - most_B, self._start_B) - late_B
        count_B = (self._stop_B - start_B) * runs_B
        batch = self._first_pass(start_B, count_B, group_size, shift=0)
        if self._agreed is not None:
            batch.inputs.num_rows = self._agreed.draft_tokens
        return batch

    def _first_pass(
        self, start_B: Longs, count_B: Longs, group_size: int, *, shift: int
    ) -> DraftPass:
        self._contract.phase = "draft 1"
        last_B = torch.from_numpy((np.cumsum(count_B) - 1)[self._row_D])
        slot_B = self._slot_B
        is_empty = count_B < 1  # it waits, or had unusable logits and committed nothing
        if is_empty.any():
            slot_B, start_B, count_B = slot_B[~is_empty], start_B[~is_empty], count_B[~is_empty]
        inputs = lay_out(self.slots, self._pages, slot_B, start_B, count_B, group_size, shift=shift)
        return DraftPass(inputs, last_B)

    def next(self, j: int, token_B: Tensor, group_size: int, *, is_shifted: bool) -> ForwardInputs:
        self._contract.phase = f"draft {j + 1}"
        position_B = self._end_B[: len(token_B)] + (j - 1 - is_shifted)
        slot_B = self._drafting_slot_B[: len(token_B)]
        inputs = lay_out_one_each(self.slots, self._pages, slot_B, position_B, token_B, group_size)
        if self._agreed is not None:
            inputs.num_rows = self._agreed.rows
        return inputs

    def position_B(self, j: int) -> Tensor:
        return torch.from_numpy(self._end_B[: self.num_drafting(j)] + j)

    def store(self, draft_BK: Tensor, *, is_onehot: bool) -> None:
        slots, slot_B, width = self.slots, self._drafting_slot_B, draft_BK.shape[1]
        drafts_SK, drafts_BK = slots.arrays.drafts_SK, draft_BK.numpy()
        most_D = np.minimum(self.k_D, slots.max_model_len - self._end_B)
        drafts_SK[slot_B, :width] = np.where(np.arange(width) < most_D[:, None], drafts_BK, -1)
        slots.arrays.drafts_onehot_S[slot_B] = is_onehot


def _is_worth_it(num_entries: int, num_wanted: int) -> bool:
    """Whether a last layer should leave out outputs that are not read. Few entries cost as much as
    fewer, because of the weights."""
    return not num_wanted or (num_entries >= 16 and num_entries >= 2 * num_wanted)


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
