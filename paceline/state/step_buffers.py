"""Buffers of fixed-shape steps: step rows, draft batches and the ring that crosses the bus.

Allocated once at their largest; a step of some shape works on views, whose addresses never change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.logprobs.reference import LogprobResults
from paceline.kernels.rows import WindowRows
from paceline.kernels.step_rows import (
    RESULT_TOKENS,
    BatchRows,
    PacketLayout,
    PaddedRows,
    Ring,
    SlotTensors,
    StepRows,
    StepShape,
)
from paceline.state.pages import Pages
from paceline.state.slots import Slots

RING_ENTRIES = 16  # more than any run-ahead depth needs


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest step."""

    rows: int
    tokens: int
    k: int

    @property
    def logits(self) -> int:
        return self.rows * (self.k + 1)


class StepBuffers:
    """Storage for the rows and batches of every shape up to `capacity`."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        self.capacity = capacity
        self._device = device
        rows = capacity.rows
        self._target = self._batch(capacity.tokens, rows)
        self._row_T = self._ints(capacity.tokens)
        self._of_rows = self._ints(6, rows)
        self._draft_BK = self._ints(rows * max(capacity.k, 1))
        self._sample_N = self._ints(capacity.logits)
        # A draft model's own first pass holds one token more per row than the target's.
        self._own = self._batch(capacity.tokens + rows, rows)
        self._next = self._batch(rows, rows)
        # A block drafter's pass: the target's entries and rows, then a block for each row.
        self._block = self._batch(capacity.tokens + capacity.logits, 2 * rows)
        self.shifted_token_T = self._ints(capacity.tokens)
        self.own_last_B = self._ints(rows)

    def rows(self, shape: StepShape) -> PaddedRows:
        num_rows, k = shape.rows, shape.k
        start_B, first_B, width_B, length_B, count_B, last_B = (
            row_B[:num_rows] for row_B in self._of_rows
        )
        batch = _cut(self._target, shape.tokens, num_rows)
        draft_BK = self._draft_BK[: num_rows * k].view(num_rows, k)
        return PaddedRows(
            shape=shape,
            batch=batch,
            row_T=self._row_T[: shape.tokens],
            sample_N=self._sample_N[: shape.num_logits],
            rows=StepRows(
                windows=WindowRows(batch.slot_B, first_B, width_B, length_B, draft_BK),
                start_B=start_B,
                row_start_B=batch.row_start_B,
                query_len_B=batch.query_len_B,
                count_B=count_B,
                last_B=last_B,
            ),
        )

    def own_batch(self, shape: StepShape) -> BatchRows:
        """A draft model's first pass: two tokens of a decoding row, a chunk and one more."""
        own = shape.rows * shape.own_width
        tokens = own if shape.is_uniform else shape.tokens + shape.rows
        return _cut(self._own, tokens, shape.rows)

    def block_batch(self, shape: StepShape, width: int) -> BatchRows:
        """A block drafter's pass, with blocks of `width` entries."""
        return _cut(self._block, shape.tokens + shape.rows * width, 2 * shape.rows)

    def next_batch(self, shape: StepShape) -> BatchRows:
        return _cut(self._next, shape.rows, shape.rows)

    def _ints(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    def _batch(self, tokens: int, rows: int) -> BatchRows:
        return BatchRows(
            token_T=self._ints(tokens),
            position_T=self._ints(tokens),
            page_slot_T=self._ints(tokens),
            slot_B=self._ints(rows),
            row_start_B=self._ints(rows),
            query_len_B=self._ints(rows),
            length_B=self._ints(rows),
        )


def _cut(batch: BatchRows, tokens: int, rows: int) -> BatchRows:
    return BatchRows(
        token_T=batch.token_T[:tokens],
        position_T=batch.position_T[:tokens],
        page_slot_T=batch.page_slot_T[:tokens],
        slot_B=batch.slot_B[:rows],
        row_start_B=batch.row_start_B[:rows],
        query_len_B=batch.query_len_B[:rows],
        length_B=batch.length_B[:rows],
    )


def make_ring(capacity: Capacity, layout: PacketLayout, device: torch.device) -> Ring:
    """Host memory is pinned where a GPU reads and writes it."""
    is_pinned = device.type == "cuda"

    def host(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=is_pinned)

    def on_device() -> Tensor:
        return torch.zeros(1, dtype=torch.int32, device=device)

    return Ring(
        packet_EP=host(RING_ENTRIES, layout.num_words),
        result_EBR=host(RING_ENTRIES, capacity.rows, RESULT_TOKENS + capacity.k + 1),
        stamp_E=host(RING_ENTRIES),
        time_E2=host(RING_ENTRIES, 2, dtype=torch.int64),
        turn_1=on_device(),
        ticket_1=on_device(),
        draft_EBK=host(RING_ENTRIES, capacity.rows, max(capacity.k, 1)),
        draft_stamp_E=host(RING_ENTRIES),
        late_time_E2=host(RING_ENTRIES, 2, dtype=torch.int64),
    )


def make_logprobs(capacity: Capacity, most: int, ring: Ring) -> LogprobResults:
    """Beside the ring, for the steps of requests that ask for logprobs."""
    shape = (RING_ENTRIES, capacity.rows, capacity.k + 1)
    is_pinned = ring.packet_EP.is_pinned()
    # Empty, not zeros: memory that is never asked for is never touched.
    return LogprobResults(
        ids_EBWT=torch.empty(*shape, 1 + most, dtype=torch.int32, pin_memory=is_pinned),
        values_EBWT=torch.empty(*shape, 1 + most, pin_memory=is_pinned),
        rank_EBW=torch.empty(shape, dtype=torch.int32, pin_memory=is_pinned),
        turn_1=ring.turn_1,
    )


def slot_tensors(slots: Slots, pages: Pages) -> SlotTensors:
    return SlotTensors(
        tokens_SL=slots.tokens_SL,
        num_tokens_S=slots.num_tokens_S,
        num_computed_S=slots.num_computed_S,
        done_S=slots.done_S,
        max_len_S=slots.max_len_S,
        min_len_S=slots.min_len_S,
        drafts_SK=slots.drafts_SK,
        drafts_onehot_S=slots.drafts_onehot_S,
        seed_S2=slots.seed_S2,
        eos_ids_SE=slots.eos_ids_SE,
        stop_ids_SE=slots.stop_ids_SE,
        table_SP=pages.table_SP,
    )
