"""The logits rows of a step as processors see them: slot, place in the window, drafts before.

Plain tensors, no logits. Shape letters: B rows of a step, N logits rows, K drafts, W = K + 1,
S slots, L sequence length.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LogitRows(NamedTuple):
    """Row n predicts the token at sequence position length + offset of its slot."""

    row_N: Tensor  # int64: row of the logits tensor
    slot_N: Tensor  # int64
    offset_N: Tensor  # int64: drafts before this row in its window
    length_N: Tensor  # int32: committed tokens of the slot
    draft_NK: Tensor  # int32: the window's drafts, -1 = none

    def having(self, features_S: Tensor, bit: int) -> LogitRows:
        """The rows whose slot asks for a feature. A kernel's programs exit early instead."""
        return self.where((features_S[self.slot_N] & bit) != 0)

    def where(self, mask_N: Tensor) -> LogitRows:
        if bool(mask_N.all()):  # CPU-only shortcut: no copies when every row qualifies
            return self
        return LogitRows(*(t[mask_N] for t in self))


class WindowRows(NamedTuple):
    """Windows at fixed shapes: position j of row b is logits row b * W + j, looked at if j < width.

    All int32. Kernels look everything else up by slot.
    """

    slot_B: Tensor
    width_B: Tensor  # 1 + drafts; 0: nobody looks at this row
    length_B: Tensor  # committed tokens
    draft_BK: Tensor  # -1 = none

    @property
    def width(self) -> int:
        return self.draft_BK.shape[1] + 1

    def logit_rows(self) -> LogitRows:
        """Every logits row, those that nobody looks at included. Reads nothing on the host."""
        step_W = torch.arange(self.width, device=self.slot_B.device)
        batch = len(self.slot_B)
        return LogitRows(
            row_N=torch.arange(batch * self.width, device=self.slot_B.device),
            slot_N=self._each(self.slot_B).to(torch.int64),
            offset_N=step_W.repeat(batch),
            length_N=self._each(self.length_B),
            draft_NK=self.draft_BK[:, None].expand(-1, self.width, -1).flatten(0, 1),
        )

    def used_N(self) -> Tensor:
        """bool: the rows that somebody looks at."""
        step_W = torch.arange(self.width, device=self.slot_B.device)
        return (step_W < self.width_B[:, None]).flatten()

    def draft_N(self) -> Tensor:
        """int32: the draft that each logits row verifies; -1 for a window's last row."""
        return torch.nn.functional.pad(self.draft_BK, (0, 1), value=-1).flatten()

    def _each(self, value_B: Tensor) -> Tensor:
        return value_B[:, None].expand(-1, self.width).flatten()


class Asking(NamedTuple):
    """Which slots want a processor: those with `bit` in their features."""

    features_S: Tensor  # int32
    bit: int

    def rows_N(self, rows: WindowRows) -> Tensor:
        """bool: logits rows that somebody looks at and whose slot asks."""
        asks_B = (self.features_S[rows.slot_B.to(torch.int64)] & self.bit) != 0
        return (asks_B[:, None].expand(-1, rows.width).flatten()) & rows.used_N()


def history(rows: LogitRows, tokens_SL: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Tokens before each row [N, longest + K] (committed, then drafts) and which of them exist.

    Entries that do not exist hold the row's first token, which is always a valid id.
    """
    committed_NL = tokens_SL[:, :longest][rows.slot_N]
    token_NH = torch.cat((committed_NL, rows.draft_NK), 1)
    step_L = torch.arange(longest, device=tokens_SL.device)
    step_K = torch.arange(rows.draft_NK.shape[1], device=tokens_SL.device)
    exists_NH = torch.cat(
        (
            step_L < rows.length_N[:, None],
            (step_K < rows.offset_N[:, None]) & (rows.draft_NK >= 0),
        ),
        1,
    )
    return torch.where(exists_NH, token_NH, token_NH[:, :1]).to(torch.int64), exists_NH


def tail_of_history(rows: LogitRows, tokens_SL: Tensor, count: int) -> Tensor:
    """The last `count` tokens before each row, int32 [N, count]; -2 where there is none."""
    step = torch.arange(-count, 0, device=tokens_SL.device)
    position_NC = rows.length_N[:, None] + rows.offset_N[:, None] + step
    index_NC = position_NC.clamp(min=0, max=tokens_SL.shape[1] - 1)
    tail_NC = tokens_SL[rows.slot_N[:, None], index_NC]
    if rows.draft_NK.shape[1] > 0:
        draft_idx_NC = position_NC - rows.length_N[:, None]
        drafted_NC = rows.draft_NK.gather(1, draft_idx_NC.clamp(0, rows.draft_NK.shape[1] - 1))
        tail_NC = torch.where(draft_idx_NC >= 0, drafted_NC, tail_NC)
    return torch.where((position_NC >= 0) & (tail_NC >= 0), tail_NC, -2)
