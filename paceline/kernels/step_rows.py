"""The tensors of a step whose shapes are fixed before anybody knows its lengths: CUDA's layout.

Only names and shapes, no arithmetic. All tensors are int32 and never move, so a captured graph may
hold their addresses. Shape letters: B rows, T token entries, K drafts, W = K + 1, N = B * W logits
rows, S slots, L longest sequence, P pages of a slot, E ring entries.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.rows import WindowRows


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a graph is keyed by, beside its tail."""

    rows: int
    tokens: int
    k: int
    is_uniform: bool  # row b owns the token entries b * W ... b * W + K; else rows are packed

    @property
    def width(self) -> int:
        return self.k + 1

    @property
    def num_logits(self) -> int:
        return self.rows * self.width


@dataclass(frozen=True)
class SlotTensors:
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

    @cached_property
    def arrays(self) -> SimpleNamespace:
        """The same memory as numpy arrays, by the same names. For CPU tensors."""
        return SimpleNamespace(**{f.name: getattr(self, f.name).numpy() for f in fields(self)})


@dataclass(slots=True)
class BatchRows:
    """A varlen batch: row b holds the token entries row_start_B[b] ... + query_len_B[b].

    Entries between rows belong to nobody: token 0, position 0, page slot -1. A row of nobody
    (padding, done) has query_len 0 and length 0.
    """

    token_T: Tensor  # ids, all valid
    position_T: Tensor  # < max_model_len, all valid
    page_slot_T: Tensor  # flat KV slot to write; -1 writes nothing
    slot_B: Tensor  # padding slot where there is no row
    row_start_B: Tensor  # [B]
    query_len_B: Tensor  # entries that compute
    length_B: Tensor  # KV length of the row, its own queries included


@dataclass(slots=True)
class StepRows:
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


@dataclass(frozen=True, slots=True)
class PacketLayout:
    """Where a plan's numbers lie in its packet: one row of an int32 ring that the host writes."""

    max_rows: int
    max_appends: int

    STEP, NUM_ROWS, NUM_APPENDS = 0, 1, 2  # the header
    HEADER = 8

    @property
    def slot(self) -> int:
        return self.HEADER

    @property
    def planned(self) -> int:  # entries that the plan gives each row
        return self.slot + self.max_rows

    @property
    def samples(self) -> int:  # 1: the row samples
        return self.planned + self.max_rows

    @property
    def row_start(self) -> int:
        return self.samples + self.max_rows

    @property
    def draft_start(self) -> int:  # row starts of a draft model's own first pass
        return self.row_start + self.max_rows

    @property
    def append_slot(self) -> int:
        return self.draft_start + self.max_rows

    @property
    def append_index(self) -> int:
        return self.append_slot + self.max_appends

    @property
    def append_page(self) -> int:
        return self.append_index + self.max_appends

    @property
    def num_words(self) -> int:
        return self.append_page + self.max_appends


class Ring(NamedTuple):
    """What crosses the bus each step. Entry `turn_1 % E` is the running step's.

    On CUDA `packet_EP`, `result_EBR`, `stamp_E` and `time_E2` are pinned host memory that kernels
    reach directly; `turn_1` and `ticket_1` are device memory.
    """

    packet_EP: Tensor  # int32, see PacketLayout
    result_EBR: Tensor  # int32: count, done, num_drafts, num_accepted, then W tokens of a row
    stamp_E: Tensor  # int32: number of the step whose results the entry holds
    time_E2: Tensor  # int64: device nanoseconds at the beginning and the end of the step
    turn_1: Tensor  # int32: steps begun on the device; end_step adds one
    ticket_1: Tensor  # int32: rows whose results are written; 0 between steps

    @property
    def device(self) -> torch.device:
        return self.turn_1.device


RESULT_TOKENS = 4  # first token word of a row of result_EBR
