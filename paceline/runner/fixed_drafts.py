"""What a drafter sees of a fixed-shape step: its passes laid out by kernels, nothing read back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from paceline.drafters.base import DraftPass
from paceline.kernels.attention import AttentionBatch
from paceline.kernels.draft_rows import next_rows, own_rows, shifted_tokens, store_drafts
from paceline.kernels.step_rows import BatchRows, PacketLayout, Ring, SlotTensors, StepRows
from paceline.layers.attention import ForwardInputs
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
        return DraftPass(forward_inputs(batch, self.pages, group_size, longest), rows.last_B)

    def own(self, group_size: int) -> DraftPass:
        self.contract.phase = "draft 1"
        rows, page_size = self.rows, self.pages.page_size
        batch = self.buffers.own_batch(rows.shape)
        last_B = self.buffers.own_last_B[: rows.shape.rows]
        own_rows(self.ring, self.layout, rows, self.state, batch, last_B, page_size)
        longest = 2 if rows.shape.is_uniform else len(batch.token_T)
        return DraftPass(forward_inputs(batch, self.pages, group_size, longest), last_B)

    def next(self, j: int, token_B: Tensor, group_size: int, *, is_shifted: bool) -> ForwardInputs:
        self.contract.phase = f"draft {j + 1}"
        batch = self.buffers.next_batch(self.rows.shape)
        next_rows(token_B, j, self.rows, self.state, batch, self.pages.page_size, is_shifted)
        return forward_inputs(batch, self.pages, group_size, 1)

    def position_B(self, j: int) -> Tensor:
        return self.state.num_tokens_S.index_select(0, self.slot_B) + j

    def store(self, draft_BK: Tensor, *, is_onehot: bool) -> None:
        store_drafts(draft_BK, self.rows, self.state, is_onehot)
