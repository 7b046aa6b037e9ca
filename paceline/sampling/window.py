"""Which logits rows belong to which request's window in a step. Never holds logits or parameters.

Shape letters: B rows that sample, N logits rows, K drafts, W = K + 1 window positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Window:
    """The rows of a step that sample and are not done, each with its drafts.

    Window position j of row b is logits row `start_B[b] + j`; the token drawn there gets sequence
    position `length_B[b] + j`, which is also the position of its noise.
    """

    slot_B: Tensor  # int64
    start_B: Tensor  # int64: first logits row
    width_B: Tensor  # int64: 1 + drafts with logits, at most k + 1
    row_N: Tensor  # int64: batch row of each logits row
    slot_N: Tensor  # int64
    offset_N: Tensor  # int64: window position of each logits row
    draft_BK: Tensor  # int32, -1 = none
    length_B: Tensor  # int32: committed tokens before the step
    k: int

    @classmethod
    def packed(cls, slot_B: Tensor, width_B: Tensor, draft_BK: Tensor, length_B: Tensor) -> Window:
        """Windows whose logits rows follow each other without gaps. Reads widths on the host."""
        row_N = torch.repeat_interleave(torch.arange(len(slot_B), device=slot_B.device), width_B)
        start_B = torch.cumsum(width_B, 0) - width_B
        offset_N = torch.arange(len(row_N), device=slot_B.device) - start_B[row_N]
        return cls(
            slot_B=slot_B,
            start_B=start_B,
            width_B=width_B,
            row_N=row_N,
            slot_N=slot_B[row_N],
            offset_N=offset_N,
            draft_BK=draft_BK,
            length_B=length_B,
            k=draft_BK.shape[1],
        )
