"""The only way from host to device for padded steps: packets of plans, records of admissions.

Touches host memory and queues copies; never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.admit.reference import (
    Admission,
    AdmitRecord,
    AdmitTensors,
    pack_admissions,
)
from paceline.kernels.host_drafts.reference import TOKENS, pack_host_drafts
from paceline.kernels.processors.reference import LateBits
from paceline.kernels.step_rows import PACKET_HAS_MARKS, PacketLayout, Ring, StepShape
from paceline.kernels.table import admit, take_host_drafts
from paceline.state.pages import Pages
from paceline.state.recurrent import Recurrent
from paceline.state.slots import DEFAULTS, FIELDS, FLOAT_FIELDS, INT_FIELDS, Slots
from paceline.state.staging import SlotRow, restore_snapshots
from paceline.state.step_buffers import slot_tensors
from paceline.step import LateMasks, SlotInit, StepPlan

_IDS = ("seed_S2", "eos_ids_SE", "stop_ids_SE")  # the columns of `ids_SE`
# In the record of every request. Other rows, which few requests bring, are copied one by one.
_IN_RECORD = {*FIELDS, *_IDS}


class PacketWriter:
    """Plans of fixed-shape steps: one packet each, and a record for the requests they admit.

    Everything is written to host memory first. An entry of the ring is written again only when
    the step that used it has been waited for, so no copy can read what a later step wrote.
    """

    def __init__(
        self,
        slots: Slots,
        pages: Pages,
        ring: Ring,
        layout: PacketLayout,
        recurrent: Recurrent | None = None,
    ) -> None:
        self._slots = slots
        self._pages = pages
        self._recurrent = recurrent
        self._layout = layout
        self._packet_EP = ring.packet_EP.numpy()
        self._tensors = AdmitTensors(
            slots.fields_FS, slots.ids_SE, slots.tokens_SL, slots.drafts_SK, pages.table_SP
        )
        self._is_pinned = ring.packet_EP.is_pinned()
        num_entries = len(self._packet_EP)
        self._records: list[Tensor] = [self._host(1 << 14) for _ in range(num_entries)]
        self._record_W = torch.empty(1 << 14, dtype=torch.int32, device=slots.device)
        # Continuations of host drafts: at most one for each slot, of one row of words each.
        self._state = slot_tensors(slots, pages)
        size = slots.num_slots * (TOKENS + 2 * slots.max_k + 1)
        self._continuations = [self._host(size) for _ in range(num_entries)]
        self._continuation_W = torch.empty(size, dtype=torch.int32, device=slots.device)

        # Masks of late rows. The masks of a step are read before those of the next are written.
        self._max_rows = layout.max_rows
        self._num_words = slots.allowed_bits_SV.shape[1]
        size = layout.max_rows * (1 + (slots.max_k + 1) * self._num_words)
        self._mask_host_W = self._host(size)
        self._mask_W = torch.full((size,), -1, dtype=torch.int32, device=slots.device)

    def write(self, entry: int, plan: StepPlan, row_start_B: Any, drafts: tuple[Any, Any]) -> None:
        """The packet of a step, for the kernel that begins it. `drafts`: starts and lengths of the
        rows of a draft model."""
        layout, words = self._layout, self._packet_EP[entry]
        count, appends = plan.num_rows, plan.page_appends
        num_appends = 0 if appends is None else len(appends.slot)
        assert count <= layout.max_rows, f"{count} rows in a packet for {layout.max_rows}"
        assert num_appends <= layout.max_appends, f"{num_appends} page appends in one step"
        words[: PACKET_HAS_MARKS + 1] = plan.step, count, num_appends, plan.marks is not None
        words[layout.slot : layout.slot + count] = plan.slot_B
        words[layout.planned : layout.planned + count] = plan.query_len_B
        words[layout.samples : layout.samples + count] = plan.samples_B
        words[layout.row_start : layout.row_start + count] = row_start_B
        words[layout.draft_start : layout.draft_start + count] = drafts[0]
        words[layout.draft_len : layout.draft_len + count] = drafts[1]
        if appends is not None:
            words[layout.append_slot : layout.append_slot + num_appends] = appends.slot
            words[layout.append_index : layout.append_index + num_appends] = appends.index
            words[layout.append_page : layout.append_page + num_appends] = appends.page
        if plan.marks is not None:
            num_words = plan.marks.length_BM.size
            assert num_words == count * layout.num_marks, f"{num_words} marks of {count} rows"
            words[layout.mark_len : layout.mark_len + num_words] = plan.marks.length_BM.flat
            words[layout.mark_entry : layout.mark_entry + num_words] = plan.marks.entry_BM.flat

    def write_empty(self, entry: int) -> None:
        """A step without rows: to warm up, to capture, to set the clock."""
        self._packet_EP[entry, : PACKET_HAS_MARKS + 1] = 0

    def admit(self, entry: int, admissions: Sequence[tuple[SlotInit, SlotRow]]) -> None:
        """Requests take their slots, in stream order: one copy, one kernel."""
        if not admissions:
            return
        packed = [_admission(init, row) for init, row in admissions]
        record = pack_admissions(AdmitRecord.of(self._tensors), packed)
        rare, num_words = [], len(record)
        for init, row in admissions:
            for name in (name for name in row if name not in _IN_RECORD):
                values = np.ascontiguousarray(row[name]).view(np.int32).reshape(-1)
                rare.append((name, init.slot, num_words, values))
                num_words += len(values)
        host_W = self._reserve(entry, num_words)
        view = host_W.numpy()
        view[: len(record)] = record
        for _, _, offset, values in rare:
            view[offset : offset + len(values)] = values
        record_W = self._record_W[:num_words]
        record_W.copy_(host_W[:num_words], non_blocking=True)
        admit(record_W, len(admissions), self._tensors)
        for name, slot, offset, values in rare:
            row_E = getattr(self._slots, name)[slot].view(-1)
            row_E.copy_(record_W[offset : offset + len(values)].view(row_E.dtype))
        restore_snapshots(self._recurrent, admissions)

    def take_host_drafts(self, entry: int, plan: StepPlan) -> None:
        """Continuations become drafts, in stream order before the plan's step: one copy and one
        kernel, and only for plans that have some."""
        if plan.host_drafts is None:
            return
        record_RW = pack_host_drafts(plan)
        host_W = self._continuations[entry][: record_RW.size]
        device_W = self._continuation_W[: record_RW.size]
        assert len(host_W) == record_RW.size, f"continuations of {record_RW.shape} words"
        host_W.numpy()[:] = record_RW.flat
        device_W.copy_(host_W, non_blocking=True)
        take_host_drafts(device_W.view(record_RW.shape), self._state)

    def write_masks(self, plan: StepPlan, late: LateMasks | None, width: int) -> None:
        """The masks of a plan's late rows, in stream order before B: one copy to a fixed place.

        None: no row of this replica is late. Then the masks of the step before may be on their way,
        so the host's memory is left alone.
        """
        index_W = self._mask_W[: self._max_rows]
        if late is None:
            index_W.fill_(-1)
            return
        count, _, num_words = late.mask_RWV.shape
        size = self._max_rows + count * width * num_words
        host = self._mask_host_W.numpy()[:size]
        host[: self._max_rows] = -1
        host[late.row_R] = np.arange(count)
        bits_RWX = host[self._max_rows :].reshape(count, width, num_words)
        widths = (1 + plan.k_B[late.row_R]).tolist()
        for bits_WX, mask_WV, masks in zip(bits_RWX, late.mask_RWV, widths, strict=True):
            bits_WX[:masks] = mask_WV[:masks]
        self._mask_W[:size].copy_(self._mask_host_W[:size], non_blocking=True)

    def masks(self, shape: StepShape) -> LateBits:
        """Where the masks of a step of this shape are."""
        first, size = self._max_rows, shape.num_logits * self._num_words
        bits_W = self._mask_W[first : first + size]
        return LateBits(
            self._mask_W[: shape.rows], bits_W.view(shape.rows, shape.width, self._num_words)
        )

    def _reserve(self, entry: int, num_words: int) -> Tensor:
        size = 1 << (num_words - 1).bit_length()
        if len(self._records[entry]) < num_words:
            self._records[entry] = self._host(size)
        if len(self._record_W) < num_words:
            # The old one may still be read by steps in flight: the allocator keeps stream order.
            self._record_W = torch.empty(size, dtype=torch.int32, device=self._record_W.device)
        return self._records[entry]

    def _host(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int32, pin_memory=self._is_pinned)


def _admission(init: SlotInit, row: SlotRow) -> Admission:
    """What a request brings, in the order of `FIELDS` and of the columns of `ids_SE`."""
    num_tokens = len(init.tokens)
    values = {
        **DEFAULTS,
        **row,
        "num_tokens_S": num_tokens,
        "num_computed_S": init.num_cached,
        "state_len_S": init.num_cached,
        "prompt_len_S": init.prompt_len,
        "max_len_S": init.max_len,
    }
    fields_F = np.empty(len(FIELDS), np.int32)
    num_ints = len(INT_FIELDS)
    fields_F[:num_ints] = [values.get(name, 0) for name in INT_FIELDS]
    fields_F[num_ints:].view(np.float32)[:] = [values.get(name, 0.0) for name in FLOAT_FIELDS]
    ids_E = np.concatenate([row[name] for name in _IDS])
    return Admission(init.slot, fields_F, ids_E.astype(np.int32), init.tokens, init.pages)
