"""The rows of a step at fixed shapes: laid out by kernels, nothing read back. What CUDA captures.

Rows of the shape that the plan does not use, and rows that are done, compute nothing. The same
functions run on CPU tensors in tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from paceline.drafters.base import DraftPass
from paceline.kernels.attention.reference import AttentionBatch
from paceline.kernels.processors.reference import LateBits
from paceline.kernels.step_rows import (
    BatchRows,
    BlockLayout,
    PacketLayout,
    PaddedRows,
    Ring,
    SlotTensors,
    StepRows,
    StepShape,
)
from paceline.kernels.table import (
    block_rows,
    next_rows,
    own_rows,
    read_marks,
    shifted_tokens,
    step_inputs,
    store_drafts,
)
from paceline.layers.attention import BlockPass, ForwardInputs, WantedEntries
from paceline.parallel.contract import Contract
from paceline.runner.graphs import GraphKey, Part
from paceline.runner.shapes import Buckets, draft_rows, row_starts
from paceline.runner.step import Device, TargetPass
from paceline.sampling.verify import SamplingMode
from paceline.state.packets import PacketWriter
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from paceline.state.step_buffers import StepBuffers
from paceline.step import LateMasks, StepPlan, StepSize


class PaddedSource:
    """See runner.runner.RowSource. Plans travel as packets of a ring."""

    has_shapes = True
    max_late = 0

    def __init__(
        self, device: Device, buffers: StepBuffers, layout: PacketLayout, buckets: Buckets
    ) -> None:
        self._device = device
        self._buffers = buffers
        self._layout = layout
        self._buckets = buckets
        self.writer = PacketWriter(
            device.slots, device.pages, device.ring, layout, device.recurrent
        )

    def stage(self, entry: int, plan: StepPlan, admissions: Any, step_size: StepSize) -> None:
        shape = self._buckets.shape_of(step_size)
        self.writer.admit(entry, admissions)
        self.writer.take_host_drafts(entry, plan)
        self.writer.write(entry, plan, row_starts(plan, shape), draft_rows(plan, shape))

    def builder(self, plan: StepPlan, step_size: StepSize) -> PaddedBuilder:
        return self.of_shape(self._buckets.shape_of(step_size))

    def key(self, step_size: StepSize) -> GraphKey | None:
        shape = self._buckets.shape_of(step_size)
        if not self._buckets.is_captured(shape):
            return None
        part = Part.A if step_size.is_late else Part.WHOLE
        return GraphKey(shape, SamplingMode(step_size.sampling_mode), part)

    def write_masks(
        self, plan: StepPlan, step_size: StepSize, rows: StepRows | None, late: LateMasks | None
    ) -> LateBits:
        shape = self._buckets.shape_of(step_size)
        self.writer.write_masks(plan, late, shape.width)
        return self.writer.masks(shape)

    def of_shape(self, shape: StepShape) -> PaddedBuilder:
        device = self._device
        return PaddedBuilder(
            slots=device.slots,
            pages=device.pages,
            state=device.state,
            buffers=self._buffers,
            ring=device.ring,
            layout=self._layout,
            contract=device.groups.contract,
            shape=shape,
            k=min(shape.k, device.drafter.max_k),
        )


@dataclass(slots=True)
class PaddedBuilder:
    """See runner.step.RowBuilder. Every row of the shape drafts; dead ones store nothing."""

    slots: Slots
    pages: Pages
    state: SlotTensors
    buffers: StepBuffers
    ring: Ring
    layout: PacketLayout
    contract: Contract
    shape: StepShape
    k: int  # drafts to propose
    feature_TD: Tensor = field(init=False)
    padded: PaddedRows = field(init=False)

    is_joint = False  # shapes are the same everywhere, and no pass depends on a value

    def __post_init__(self) -> None:
        self.padded = self.buffers.rows(self.shape)

    @property
    def rows(self) -> StepRows:
        return self.padded.rows

    @property
    def slot_B(self) -> Tensor:
        return self.padded.batch.slot_B

    def num_drafting(self, j: int) -> int:
        return self.shape.rows

    @property
    def marks(self) -> tuple[Tensor, Tensor]:
        return read_marks(self.ring, self.layout, self.shape.rows)

    def target(self, group_size: int, *, reads_all: bool) -> TargetPass:
        shape, padded = self.shape, self.padded
        sizes = (self.pages.page_size, self.slots.padding_slot)
        step_inputs(self.ring, self.layout, self.state, padded, *sizes)
        longest = shape.width if shape.is_uniform else shape.tokens
        inputs = self._inputs(padded.batch, group_size, longest)
        if shape.is_uniform:  # every token entry has its logits row, in the same order
            return TargetPass(inputs)
        if reads_all or not self._is_worth_it(shape.num_logits):
            return TargetPass(inputs, padded.sample_N)
        width_B = padded.rows.windows.width_B
        is_read_BW = torch.arange(shape.width, device=width_B.device) < width_B[:, None]
        inputs.wanted = wanted_entries(
            padded.batch, padded.sample_N, is_read_BW.flatten(), inputs.attention
        )
        return TargetPass(inputs)

    def shifted(self, group_size: int) -> DraftPass:
        self.contract.phase = "draft 1"
        shape = self.shape
        token_T = self.buffers.shifted_token_T[: shape.tokens]
        shifted_tokens(self.padded, self.state, token_T)
        longest = shape.width if shape.is_uniform else shape.tokens
        batch = self.padded.batch._replace(token_T=token_T)
        last_B = self.rows.last_B
        assert last_B is not None
        return self._first_pass(batch, last_B, group_size, longest)

    def own(self, group_size: int) -> DraftPass:
        self.contract.phase = "draft 1"
        batch = self.buffers.own_batch(self.shape)
        last_B = self.buffers.own_last_B[: self.shape.rows]
        where = (self.padded, self.state, batch, last_B, self.pages.page_size)
        own_rows(self.ring, self.layout, *where)
        longest = self.shape.own_width if self.shape.is_uniform else len(batch.token_T)
        return self._first_pass(batch, last_B, group_size, longest)

    def block(self, group_size: int, layout: BlockLayout) -> BlockPass:
        self.contract.phase = "draft 1"
        shape, num_rows = self.shape, self.shape.rows
        width = layout.width if shape.k else 0
        batch = self.buffers.block_batch(shape, width)
        where = (batch, self.pages.page_size)
        block_rows(self.padded, self.state, layout, width, *where)
        longest = shape.width if shape.is_uniform else shape.tokens
        inputs = self._inputs(batch, group_size, max(longest, width))
        block = replace(
            inputs.attention,
            row_start_B=batch.row_start_B[num_rows:] - shape.tokens,
            length_B=batch.length_B[num_rows:],
            slot_B=batch.slot_B[num_rows:],
            query_len_B=batch.query_len_B[num_rows:],
            max_query_len=width,
        )
        device = batch.token_T.device
        offset_E = torch.arange(num_rows * width, device=device) % max(width, 1)
        entry_N = self._outputs(layout, width)
        if len(entry_N) and self._is_worth_it(len(entry_N)):
            rows = batch._replace(slot_B=self.slot_B)
            count_B = self.rows.count_B
            assert count_B is not None
            is_read_N = (count_B > 0).repeat_interleave(len(entry_N) // num_rows)
            inputs.wanted = wanted_entries(rows, entry_N, is_read_N, inputs.attention)
        return BlockPass(inputs, shape.tokens, block, offset_E, entry_N)

    def _outputs(self, layout: BlockLayout, width: int) -> Tensor:
        """The entry of each draft: of a row's last committed position, then of its block."""
        shape, last_B = self.shape, self.rows.last_B
        assert last_B is not None
        if not shape.k:
            return last_B[:0]
        first_B = shape.tokens + torch.arange(shape.rows, device=last_B.device) * width
        entry_K = torch.arange(layout.k, device=last_B.device) + layout.first_output
        entry_BK = first_B[:, None] + entry_K
        return torch.where(entry_K < 0, last_B[:, None], entry_BK).flatten()

    def _first_pass(
        self, batch: BatchRows, last_B: Tensor, group_size: int, longest: int
    ) -> DraftPass:
        inputs = self._inputs(batch, group_size, longest)
        if self._is_worth_it(len(last_B)):
            count_B = self.rows.count_B
            assert count_B is not None
            drafts_B = count_B > 0
            inputs.wanted = wanted_entries(batch, last_B, drafts_B, inputs.attention)
        return DraftPass(inputs, last_B)

    def next(self, j: int, token_B: Tensor, group_size: int, *, is_shifted: bool) -> ForwardInputs:
        self.contract.phase = f"draft {j + 1}"
        batch = self.buffers.next_batch(self.shape)
        next_rows(token_B, j, self.padded, self.state, batch, self.pages.page_size, is_shifted)
        return self._inputs(batch, group_size, 1)

    def position_B(self, j: int) -> Tensor:
        return self.state.num_tokens_S.index_select(0, self.slot_B) + j

    def store(self, draft_BK: Tensor, *, is_onehot: bool) -> None:
        store_drafts(draft_BK, self.padded, self.state, is_onehot)

    def _inputs(self, batch: BatchRows, group_size: int, max_query_len: int) -> ForwardInputs:
        return ForwardInputs(
            token_T=batch.token_T,
            position_T=batch.position_T,
            page_slot_T=batch.page_slot_T,
            attention=AttentionBatch(
                row_start_B=batch.row_start_B,
                length_B=batch.length_B,
                slot_B=batch.slot_B,
                table_SP=self.pages.table_SP,
                page_size=self.pages.page_size,
                group_size=group_size,
                query_len_B=batch.query_len_B,
                max_query_len=max_query_len,
            ),
        )

    def _is_worth_it(self, num_wanted: int) -> bool:
        """Whether a last layer should leave out outputs that are not read: prompt tokens."""
        return is_worth_it(self.shape, num_wanted)


def is_worth_it(shape: StepShape, num_wanted: int) -> bool:
    return not shape.is_uniform and shape.tokens >= 4 * num_wanted


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
