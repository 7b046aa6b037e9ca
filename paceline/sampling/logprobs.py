"""Log probabilities of emitted tokens, for the rows that asked: raw, before any processor.

Keeps copies of raw logits only within a step. Shape letters: B rows that sample, N logits rows,
R rows that asked, M their logits rows, W = K + 1 window, T = 1 + most top tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.logprobs import token_logprobs
from paceline.sampling.window import Window
from paceline.state.slots import LOGPROBS, Slots
from paceline.step import Ints, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprobs:
    """For each row that asked and each window position: the token, then the most likely ones.

    Positions past the row's count hold -1. A row's own number of top tokens is `num_top_R`.
    """

    row_R: Tensor  # int64: row of the window
    num_top_R: Tensor  # int32
    ids_RWT: Tensor  # int32
    values_RWT: Tensor  # float32
    rank_RW: Tensor  # int32

    def by_plan_row(self, count_B: Ints, plan_row_B: Sequence[int] | Ints) -> list[TokenLogprobs]:
        """Cut to what was emitted, with rows named as the plan does. For the host side."""
        ids_RWT, values_RWT = self.ids_RWT.numpy(), self.values_RWT.numpy()
        rank_RW = self.rank_RW.numpy()
        entries = []
        for r, (row, top) in enumerate(
            zip(self.row_R.tolist(), self.num_top_R.tolist(), strict=True)
        ):
            emitted = slice(0, int(count_B[row]))
            entries.append(
                TokenLogprobs(
                    row=int(plan_row_B[row]),
                    ids=ids_RWT[r, emitted, : 1 + top],
                    values=values_RWT[r, emitted, : 1 + top],
                    rank=rank_RW[r, emitted],
                )
            )
        return entries


@dataclass(frozen=True, slots=True)
class RawRows:
    """Copies of the logits that logprobs are taken from, made before processors run."""

    row_R: Tensor  # int64: row of the window
    num_top_R: Tensor  # int32
    asker_M: Tensor  # int64: which of the R rows
    offset_M: Tensor  # int64
    logits_MV: Tensor

    @classmethod
    def of(cls, logits_NV: Tensor, window: Window, slots: Slots) -> RawRows | None:
        """None when nobody asked."""
        asks_B = (slots.features_S[window.slot_B] & LOGPROBS) != 0
        row_R = asks_B.nonzero()[
            :, 0
        ]  # CPU-only shortcut: a kernel visits all rows and exits early
        if len(row_R) == 0:
            return None
        mask_N = asks_B[window.row_N]
        asker_B = torch.cumsum(asks_B, 0) - 1
        return cls(
            row_R=row_R,
            num_top_R=slots.num_logprobs_S[window.slot_B[row_R]],
            asker_M=asker_B[window.row_N[mask_N]],
            offset_M=window.offset_N[mask_N],
            logits_MV=logits_NV[mask_N],
        )

    def collect(self, token_BW: Tensor) -> Logprobs:
        """Logprobs of the emitted tokens, once they are known."""
        token_RW = token_BW[self.row_R]
        token_M = token_RW[self.asker_M, self.offset_M]
        top = int(self.num_top_R.max())
        ids_MT, values_MT, rank_M = token_logprobs(self.logits_MV, token_M, top)
        num_rows, width = token_RW.shape
        ids_RWT = ids_MT.new_full((num_rows, width, ids_MT.shape[1]), -1)
        values_RWT = values_MT.new_zeros(ids_RWT.shape)
        rank_RW = rank_M.new_zeros((num_rows, width))
        ids_RWT[self.asker_M, self.offset_M] = ids_MT
        values_RWT[self.asker_M, self.offset_M] = values_MT
        rank_RW[self.asker_M, self.offset_M] = rank_M
        num_top_R = self.num_top_R.clamp(max=ids_MT.shape[1] - 1)
        return Logprobs(self.row_R, num_top_R, ids_RWT, values_RWT, rank_RW)
