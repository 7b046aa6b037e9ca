"""The tensors of a step whose shapes are fixed before its lengths are known: CUDA's layout.

Only names and shapes, no arithmetic. Kernels take these tuples as they are. All tensors are int32
and never move, so a captured graph may hold their addresses. Shape letters: B rows, T token
entries, K drafts, W = K + 1, N = B * W logits rows, S slots, L longest sequence, P pages of a slot,
E ring entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.rows import WindowRows


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a step. A graph is keyed by it and by the sampling mode."""

    rows: int
    tokens: int
    k: int
    is_uniform: bool  # row b owns the token entries b * W ... b * W + K; else rows are packed
    own_width: int = 2  # entries of each row in a draft model's first pass, if uniform

    @property
    def width(self) -> int:
        return self.k + 1

    @property
    def num_logits(self) -> int:
        return self.rows * self.width


class SlotFields(NamedTuple):
    """What the step's own kernels read and write of slot state."""

    tokens_SL: Tensor
    num_tokens_S: Tensor
    num_computed_S: Tensor
    done_S: Tensor
    max_len_S: Tensor
    min_len_S: Tensor
    drafts_SK: Tensor
    drafts_onehot_S: Tensor
    seed_S2: Tensor  # strided
    eos_ids_SE: Tensor  # strided, -1 = unused
    stop_ids_SE: Tensor  # strided, -1 = unused
    table_SP: Tensor  # page ids, -1 = none


class SlotSizes(NamedTuple):
    """Widths of the tables by slot, and the steps from one slot's row to the next."""

    max_model_len: int
    num_drafts: int
    num_eos: int
    num_stop: int
    tokens_stride: int
    drafts_stride: int
    eos_stride: int
    stop_stride: int
    table_stride: int


class SlotTensors(SlotFields):
    """The same tensors, with what follows from them: computed once."""

    _fields = SlotFields._fields  # Triton looks for the names in the class itself

    @cached_property
    def arrays(self) -> SimpleNamespace:
        """The same memory as numpy arrays, by the same names. For CPU tensors."""
        named = zip(self._fields, self, strict=True)
        return SimpleNamespace(**{name: tensor.numpy() for name, tensor in named})

    @cached_property
    def sizes(self) -> SlotSizes:
        tables = (self.tokens_SL, self.drafts_SK, self.eos_ids_SE, self.stop_ids_SE)
        strides = (table.stride(0) for table in (*tables, self.table_SP))
        return SlotSizes(*(table.shape[1] for table in tables), *strides)


class BatchRows(NamedTuple):
    """A varlen batch: row b holds the token entries row_start_B[b] ... + query_len_B[b].

    Unused entries, between rows and behind them, have token 0, position 0 and page slot -1. A row
    that computes nothing (padding, done) has query_len 0 and length 0.
    """

    token_T: Tensor  # ids, all valid
    position_T: Tensor  # < max_model_len, all valid
    page_slot_T: Tensor  # flat KV slot to write; -1 writes nothing
    slot_B: Tensor  # padding slot where there is no row
    row_start_B: Tensor  # [B]
    query_len_B: Tensor  # entries that compute
    length_B: Tensor  # KV length of the row, its own queries included


class BlockLayout(NamedTuple):
    """The pass of a block drafter: the target's committed entries, then a block for each row.

    The block's entries have the positions after the committed ones. With an anchor, entry 0 holds
    the newest token; all others hold `mask_id`. Draft j comes from entry first_output + j; entry -1
    is the row's last committed one.
    """

    k: int  # drafts: the width never depends on the step
    mask_id: int
    first_output: int  # 1: an entry gives its own token; 0, -1: it gives the token after its own

    @property
    def width(self) -> int:
        return self.k + self.first_output

    @property
    def has_anchor(self) -> bool:
        return self.first_output >= 0

    @property
    def shift(self) -> int:
        """Committed entry i holds token i + shift. Without an anchor the newest one is there."""
        return 0 if self.has_anchor else 1


class StepRows(NamedTuple):
    """The rows of a step: what the target computes, their windows, and what became of them."""

    windows: WindowRows
    start_B: Tensor  # first position that the row computes
    row_start_B: Tensor  # its first token entry
    query_len_B: Tensor  # positions that it computes; 0: done, or padding
    # Written when the step is finished, at fixed shapes: tokens emitted, and the token entry of the
    # last committed position that was computed, else 0.
    count_B: Tensor | None = None
    last_B: Tensor | None = None
    plan_row_B: Tensor | None = None  # None: row b is the plan's row b


@dataclass(slots=True)
class PaddedRows:
    """The rows of a step at fixed shapes."""

    shape: StepShape
    batch: BatchRows
    row_T: Tensor  # row of each token entry, -1 where there is none
    sample_N: Tensor  # token entry of each logits row; 0 where no window is
    rows: StepRows  # its row_start_B and query_len_B are the batch's

    @property
    def device(self) -> torch.device:
        return self.row_T.device


# The header of a packet.
PACKET_STEP, PACKET_ROWS, PACKET_APPENDS = 0, 1, 2
PACKET_HAS_MARKS = 3  # 0: no row has a mark, and the words of marks are stale
_HEADER = 8


class PacketLayout(NamedTuple):
    """Where a plan's numbers lie in its packet: one row of an int32 ring that the host writes."""

    max_rows: int
    max_appends: int
    # One number for each row.
    slot: int
    planned: int  # entries that the plan gives the row
    samples: int  # 1: the row samples
    row_start: int
    draft_start: int  # row starts of a draft model's own first pass
    draft_len: int  # the most entries of the row there
    # One number for each page append.
    append_slot: int
    append_index: int
    append_page: int
    # `num_marks` numbers for each row; -1: no mark.
    num_marks: int
    mark_len: int
    mark_entry: int
    num_words: int

    @classmethod
    def of(cls, max_rows: int, max_appends: int, num_marks: int = 0) -> PacketLayout:
        of_rows = [_HEADER + i * max_rows for i in range(7)]
        of_appends = [of_rows[-1] + i * max_appends for i in range(4)]
        of_marks = [of_appends[-1] + i * max_rows * num_marks for i in range(3)]
        places = (*of_rows[:-1], *of_appends[:-1], num_marks, *of_marks)
        return cls(max_rows, max_appends, *places)


class RingFields(NamedTuple):
    """What crosses the bus each step. Entry `turn_1 % E` is the running step's.

    On CUDA `turn_1` and `ticket_1` are device memory; the others are pinned host memory that
    kernels reach directly.
    """

    packet_EP: Tensor  # int32, see PacketLayout
    result_EBR: Tensor  # int32: count, done, num_drafts, num_accepted, then W tokens of a row
    stamp_E: Tensor  # int32: number of the step whose results the entry holds
    time_E2: Tensor  # int64: device nanoseconds at the beginning and the end of the step
    turn_1: Tensor  # int32: steps begun on the device; end_step adds one
    ticket_1: Tensor  # int32: rows that a kernel has written to the ring; 0 between kernels
    draft_EBK: Tensor  # int32: drafts for the next step; only steps with late masks bring them
    draft_stamp_E: Tensor  # int32: number of the step whose drafts the entry holds
    late_time_E2: Tensor  # int64: device nanoseconds at the end of A and the beginning of B


class Ring(RingFields):
    """The same tensors, and their memory as arrays."""

    _fields = RingFields._fields  # Triton looks for the names in the class itself

    @cached_property
    def arrays(self) -> SimpleNamespace:
        """By the same names. For CPU tensors."""
        named = zip(self._fields, self, strict=True)
        return SimpleNamespace(**{name: tensor.numpy() for name, tensor in named})

    @property
    def device(self) -> torch.device:
        return self.turn_1.device


RESULT_TOKENS = 4  # first token word of a row of result_EBR
