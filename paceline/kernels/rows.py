"""Which logits rows belong to which request's window in a step, and what a processor sees of one.

Plain tensors, no logits. Shape letters: B rows of a step, N logits rows, M some of them, K drafts,
W = K + 1 window positions, S slots, L sequence length.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Integers = npt.NDArray[np.signedinteger[Any]]


class LogitRows(NamedTuple):
    """Row m predicts the token at sequence position length + offset of its slot."""

    row_M: Tensor  # int64: row of the logits tensor
    slot_M: Tensor  # int64
    offset_M: Tensor  # int64: drafts before this row in its window
    length_M: Tensor  # int32: committed tokens of the slot
    draft_MK: Tensor  # int32: the window's drafts, -1 = none
    owner_M: Tensor  # int64: row of the step

    @property
    def position_M(self) -> Tensor:
        """int32: the sequence position of the token that each row predicts."""
        return (self.length_M + self.offset_M).to(torch.int32)

    @property
    def own_draft_M(self) -> Tensor:
        """int32: the draft that each row verifies; -1 for a window's last row."""
        none_M1 = self.draft_MK.new_full((len(self.row_M), 1), -1)
        return torch.cat((self.draft_MK, none_M1), 1).gather(1, self.offset_M[:, None])[:, 0]

    def having(self, features_S: Tensor, bit: int) -> LogitRows:
        """The rows whose slot uses a feature."""
        return self.where((features_S[self.slot_M] & bit) != 0)

    def where(self, mask_M: Tensor) -> LogitRows:
        if bool(mask_M.all()):  # no copies when every row qualifies
            return self
        return LogitRows(*(t[mask_M] for t in self))

    def spread(self, value_M: Tensor, num_logits: int) -> Tensor:
        """[N]: the values at their logits rows, 0 where no window is."""
        if len(self.row_M) == num_logits:
            return value_M
        return value_M.new_zeros(num_logits).index_copy_(0, self.row_M, value_M)


class WindowTensors(NamedTuple):
    """The window of each row of a step: one logits row for each token that it may emit.

    Window position j of row b is logits row first_B[b] + j, for j < width_B[b]. The token drawn
    there gets sequence position length_B[b] + j, which is also the position of its noise. Windows
    follow each other in the order of the rows; there may be unused logits rows between them.
    int32 on CUDA, any integers on CPU. Kernels look everything else up by slot.
    """

    slot_B: Tensor
    first_B: Tensor
    width_B: Tensor  # 1 + drafts; 0: the row samples nothing
    length_B: Tensor  # committed tokens
    draft_BK: Tensor  # contiguous; -1 = none


class WindowRows(WindowTensors):
    """The same tensors, with what the host reads of them: computed once."""

    _fields = WindowTensors._fields  # Triton looks for the names in the class itself

    @classmethod
    def packed(
        cls, slot_B: Tensor, width_B: Tensor, draft_BK: Tensor, length_B: Tensor
    ) -> WindowRows:
        """Windows whose logits rows follow each other without gaps."""
        first_B = torch.cumsum(width_B, 0, dtype=torch.int32) - width_B
        ints = (slot_B, first_B, width_B, length_B, draft_BK)
        return cls(*(t.to(torch.int32) for t in ints))

    @property
    def device(self) -> torch.device:
        return self.slot_B.device

    @property
    def width(self) -> int:
        """The widest window that fits."""
        return self.draft_BK.shape[1] + 1

    @property
    def num_positions(self) -> int:
        """Positions of windows of that width: a kernel has a program for each."""
        return len(self.slot_B) * self.width

    def on_cpu(self) -> WindowRows:
        """Itself, or a copy whose numbers the host can read."""
        if self.slot_B.is_cpu:
            return self
        return WindowRows(*(tensor.cpu() for tensor in self))

    @cached_property
    def arrays(self) -> tuple[Integers, Integers, Integers, Integers, Integers]:
        """The same memory as numpy arrays, in the order of the fields. For CPU tensors."""
        return (
            self.slot_B.numpy(),
            self.first_B.numpy(),
            self.width_B.numpy(),
            self.length_B.numpy(),
            self.draft_BK.numpy(),
        )

    @cached_property
    def logit_rows(self) -> LogitRows:
        """Every logits row of a window. Reads lengths on the host: for CPU tensors only."""
        return LogitRows(*map(torch.from_numpy, self.logit_arrays))

    @cached_property
    def logit_arrays(self) -> tuple[Integers, ...]:
        """The fields of `logit_rows` as numpy arrays."""
        slot_B, first_B, width_B, length_B, draft_BK = self.arrays
        owner_M = np.repeat(np.arange(len(slot_B)), width_B)
        before_B = np.cumsum(width_B) - width_B
        offset_M = np.arange(len(owner_M)) - before_B[owner_M]
        slot_M = slot_B[owner_M].astype(np.int64, copy=False)
        row_M, length_M = first_B[owner_M] + offset_M, length_B[owner_M]
        return row_M, slot_M, offset_M, length_M, draft_BK[owner_M], owner_M


class FeatureMask(NamedTuple):
    """The slots that use a processor: those with `bit` in their features."""

    features_S: Tensor  # int32
    bit: int

    def logit_rows(self, windows: WindowRows) -> LogitRows:
        """The logits rows of windows whose slot uses it."""
        return windows.logit_rows.having(self.features_S, self.bit)


def history(rows: LogitRows, tokens_SL: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Tokens before each row [M, longest + K] (committed, then drafts) and which of them exist.

    Entries that do not exist hold the row's first token, which is always a valid id.
    """
    committed_ML = tokens_SL[:, :longest][rows.slot_M]
    token_MH = torch.cat((committed_ML, rows.draft_MK), 1)
    step_L = torch.arange(longest)
    step_K = torch.arange(rows.draft_MK.shape[1])
    exists_MH = torch.cat(
        (
            step_L < rows.length_M[:, None],
            (step_K < rows.offset_M[:, None]) & (rows.draft_MK >= 0),
        ),
        1,
    )
    return torch.where(exists_MH, token_MH, token_MH[:, :1]).to(torch.int64), exists_MH


def tail_of_history(rows: LogitRows, tokens_SL: Tensor, count: int) -> Tensor:
    """The last `count` tokens before each row, int32 [M, count]; -2 where there is none."""
    step = torch.arange(-count, 0)
    position_MC = rows.length_M[:, None] + rows.offset_M[:, None] + step
    index_MC = position_MC.clamp(min=0, max=tokens_SL.shape[1] - 1)
    tail_MC = tokens_SL[rows.slot_M[:, None], index_MC]
    if rows.draft_MK.shape[1] > 0:
        draft_idx_MC = position_MC - rows.length_M[:, None]
        drafted_MC = rows.draft_MK.gather(1, draft_idx_MC.clamp(0, rows.draft_MK.shape[1] - 1))
        tail_MC = torch.where(draft_idx_MC >= 0, drafted_MC, tail_MC)
    return torch.where((position_MC >= 0) & (tail_MC >= 0), tail_MC, -2)
