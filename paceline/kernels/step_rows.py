"""The tensors of a step whose shapes are fixed before anybody knows its lengths: CUDA's layout.

Only names and shapes, no arithmetic. All tensors are int32 and never move, so a captured graph may
hold their addresses. Shape letters: B rows, T token entries, K drafts, W = K + 1, N = B * W logits
rows, S slots, L longest sequence, P pages of a slot, E ring entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


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


class SlotTensors(NamedTuple):
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
    """The target's batch and the windows of its rows."""

    shape: StepShape
    batch: BatchRows
    row_T: Tensor  # row of each token entry, -1 where there is none
    start_B: Tensor  # first position that the row computes
    num_tokens_B: Tensor  # committed tokens before the step
    width_B: Tensor  # 1 + usable drafts; 0: the row samples nothing
    draft_BK: Tensor  # usable drafts, -1 = none; a prefix of each row
    sample_N: Tensor  # token entry of logits row b * W + j; 0 where nobody looks
    # Written when the step is finished:
    token_BW: Tensor  # emitted tokens, -1 after count
    count_B: Tensor
    last_B: Tensor  # token entry of the last committed position that was computed; else 0


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


RESULT_TOKENS = 4  # first token word of a row of result_EBR
