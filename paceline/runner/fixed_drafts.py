"""What a drafter sees of a fixed-shape step: its passes laid out by kernels, nothing read back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.drafters.base import DraftPass
from paceline.kernels.attention import AttentionBatch
from paceline.kernels.draft_rows import next_rows, own_rows, shifted_tokens, store_drafts
from paceline.kernels.step_rows import (
    BatchRows,
    PacketLayout,
    Ring,
    SlotTensors,
    StepRows,
    StepShape,
)
from paceline.layers.attention import ForwardInputs, WantedEntries
from paceline.parallel.contract import Contract
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from paceline.state.step_buffers import StepBuffers


def forward_inputs(
    batch: BatchRows, pages: Pages, group_size: int, max_query_len: int
) -> ForwardInputs:
    return ForwardInputs(
        token_T=batch.token_T,
        position_T=batch.position_T,
        page_slot_T=batch.page_slot_T,
        attention=AttentionBatch(
            row_start_B=batch.row_start_B,
            length_B=batch.length_B,
            slot_B=batch.slot_B,
            table_SP=pages.table_SP,
            page_size=pages.page_size,
            group_size=group_size,
            query_len_B=batch.query_len_B,
            max_query_len=max_query_len,
        ),
    )


def wanted_entries(
    batch: BatchRows, entry_N: Tensor, is_read_N: Tensor, attention: AttentionBatch
) -> WantedEntries:
    """Entries whose outputs are read, equally many for each row of the batch, in its order.

    `attention` is the batch's own. Each entry sees KV up to its own position: what a row has behind
    it may be drafts that were rejected.
    """
    per_row = len(entry_N) // len(batch.slot_B)
    count_N = is_read_N.int()
    length_N = (batch.position_T.index_select(0, entry_N) + 1) * count_N
    return WantedEntries(
        entry_N,
        replace(
            attention,
            row_start_B=torch.arange(len(entry_N), dtype=torch.int32, device=entry_N.device),
            length_B=length_N.int(),
            slot_B=batch.slot_B[:, None].expand(-1, per_row).flatten(),
            query_len_B=count_N,
            max_query_len=1,
        ),
    )


def is_worth_it(shape: StepShape, num_wanted: int) -> bool:
    """Whether a last layer should leave out what nobody reads: the tokens of prompts."""
    return not shape.is_uniform and shape.tokens >= 4 * num_wanted


@dataclass(slots=True)
class FixedDraftStep:
    """See drafters.base.DraftStep. Every row of the shape drafts; dead ones store nothing."""

    slots: Slots
    pages: Pages
    state: SlotTensors
    buffers: StepBuffers
    ring: Ring
    layout: PacketLayout
    rows: StepRows
    feature_TD: Tensor
    contract: Contract

    is_joint = False  # shapes are the same everywhere, and no pass depends on a value

    @property
    def k(self) -> int:
        return self.rows.shape.k

    @property
    def slot_B(self) -> Tensor:
        return self.rows.batch.slot_B

    def shifted(self, group_size: int) -> DraftPass:
        self.contract.phase = "draft 1"
        rows = self.rows
        token_T = self.buffers.shifted_token_T[: rows.shape.tokens]
        shifted_tokens(rows, self.state, token_T)
        longest = rows.shape.width if rows.shape.is_uniform else rows.shape.tokens
        batch = replace(rows.batch, token_T=token_T)
        return self._first_pass(batch, rows.last_B, group_size, longest)

    def own(self, group_size: int) -> DraftPass:
        self.contract.phase = "draft 1"
        rows, page_size = self.rows, self.pages.page_size
        batch = self.buffers.own_batch(rows.shape)
        last_B = self.buffers.own_last_B[: rows.shape.rows]
        own_rows(self.ring, self.layout, rows, self.state, batch, last_B, page_size)
        longest = 2 if rows.shape.is_uniform else len(batch.token_T)
        return self._first_pass(batch, last_B, group_size, longest)

    def _first_pass(
        self, batch: BatchRows, last_B: Tensor, group_size: int, longest: int
    ) -> DraftPass:
        inputs = forward_inputs(batch, self.pages, group_size, longest)
        if is_worth_it(self.rows.shape, len(last_B)):
            drafts_B = self.rows.count_B > 0
            inputs.wanted = wanted_entries(batch, last_B, drafts_B, inputs.attention)
        return DraftPass(inputs, last_B)

    def next(self, j: int, token_B: Tensor, group_size: int, *, is_shifted: bool) -> ForwardInputs:
        self.contract.phase = f"draft {j + 1}"
        batch = self.buffers.next_batch(self.rows.shape)
        next_rows(token_B, j, self.rows, self.state, batch, self.pages.page_size, is_shifted)
        return forward_inputs(batch, self.pages, group_size, 1)

    def position_B(self, j: int) -> Tensor:
        return self.state.num_tokens_S.index_select(0, self.slot_B) + j

    def store(self, draft_BK: Tensor, *, is_onehot: bool) -> None:
        store_drafts(draft_BK, self.rows, self.state, is_onehot)
