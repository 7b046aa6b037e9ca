"""What a drafter sees of a step on the CPU: its passes laid out over the true lengths.

Rejected positions and rows that are done cost nothing: they are not in the batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.base import DraftPass
from paceline.layers.attention import ForwardInputs
from paceline.models.layout import lay_out, lay_out_one_each
from paceline.parallel.contract import Contract
from paceline.runner.inputs import StepInputs
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from paceline.step import Extent, Longs


class VarlenDraftStep:
    """See drafters.base.DraftStep. Made after advance: slot state is the new truth."""

    def __init__(
        self,
        slots: Slots,
        pages: Pages,
        k: int,
        inputs: StepInputs,
        feature_TD: Tensor,
        contract: Contract,
        agreed: Extent | None = None,
    ) -> None:
        self.slots = slots
        self.k = k
        self.feature_TD = feature_TD
        self._agreed = agreed
        self._contract = contract
        self._pages = pages
        self._inputs = inputs
        end_B = slots.num_tokens_S.numpy()[inputs.slot_B].astype(np.int64)
        self._drafts_B = inputs.samples_B & (slots.done_S.numpy()[inputs.slot_B] == 0)
        # Of the rows that draft; `_stop_B` is of all rows: how far committed tokens were computed.
        self._slot_B = inputs.slot_B[self._drafts_B]
        self._end_B = end_B[self._drafts_B]
        self._stop_B = np.where(inputs.samples_B, end_B, inputs.start_B + inputs.query_len_B)
        self.slot_B = torch.from_numpy(self._slot_B)

    @property
    def is_joint(self) -> bool:
        return self._agreed is not None

    def shifted(self, group_size: int) -> DraftPass:
        inputs = self._inputs
        # A row that sampled has no successor for its newest token, and no hidden state of it.
        count_B = self._stop_B - inputs.samples_B - inputs.start_B
        target_T = None
        if (count_B != inputs.query_len_B).any():
            first_B = np.cumsum(inputs.query_len_B) - inputs.query_len_B
            offset_T = np.arange(count_B.sum()) - np.repeat(np.cumsum(count_B) - count_B, count_B)
            target_T = torch.from_numpy(np.repeat(first_B, count_B) + offset_T)
        batch = self._first_pass(inputs.start_B, count_B, group_size, shift=1)
        batch.target_T = target_T
        if self._agreed is not None:
            batch.inputs.num_rows = self._agreed.tokens
        return batch

    def own(self, group_size: int) -> DraftPass:
        """Two committed tokens cover full acceptance, where the last draft was never fed; after a
        rejection the first of them is computed again, to the same values."""
        inputs = self._inputs
        start_B = np.where(inputs.num_drafts_B > 0, self._stop_B - 2, inputs.start_B)
        batch = self._first_pass(start_B, self._stop_B - start_B, group_size, shift=0)
        if self._agreed is not None:
            batch.inputs.num_rows = self._agreed.draft_tokens
        return batch

    def _first_pass(
        self, start_B: Longs, count_B: Longs, group_size: int, *, shift: int
    ) -> DraftPass:
        self._contract.phase = "draft 1"
        last_B = torch.from_numpy((np.cumsum(count_B) - 1)[self._drafts_B])
        slot_B = self._inputs.slot_B
        is_empty = count_B < 1  # a row that broke committed nothing
        if is_empty.any():
            slot_B, start_B, count_B = slot_B[~is_empty], start_B[~is_empty], count_B[~is_empty]
        inputs = lay_out(self.slots, self._pages, slot_B, start_B, count_B, group_size, shift=shift)
        return DraftPass(inputs, last_B)

    def next(self, j: int, token_B: Tensor, group_size: int, *, is_shifted: bool) -> ForwardInputs:
        self._contract.phase = f"draft {j + 1}"
        position_B = self._end_B + (j - 1 - is_shifted)
        inputs = lay_out_one_each(
            self.slots, self._pages, self._slot_B, position_B, token_B, group_size
        )
        if self._agreed is not None:
            inputs.num_rows = self._agreed.rows
        return inputs

    def position_B(self, j: int) -> Tensor:
        return torch.from_numpy(self._end_B + j)

    def store(self, draft_BK: Tensor, *, is_onehot: bool) -> None:
        slots, width = self.slots, draft_BK.shape[1]
        has_room = self._end_B[:, None] + np.arange(width) < slots.max_model_len
        drafts_SK = slots.drafts_SK.numpy()
        drafts_SK[self._slot_B] = -1
        drafts_SK[self._slot_B, :width] = np.where(has_room, draft_BK.numpy(), -1)
        slots.drafts_onehot_S.numpy()[self._slot_B] = is_onehot
