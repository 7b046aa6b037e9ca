"""The one loop for drafters that are models: a first pass over the new tokens, then K - 1 more.

A head declares how its first pass is laid out; today that is the stand-alone draft model. Its KV
lives in the same page table as the target's, in layers of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paceline.drafters.base import DraftStep, store_drafts
from paceline.models.decoder import Decoder
from paceline.models.layout import lay_out
from paceline.sampling.draft import propose_tokens
from paceline.state.pages import LayerPages
from paceline.step import Longs


@dataclass(slots=True)
class DraftModel:
    """A smaller causal LM with the target's vocabulary."""

    model: Decoder
    layer_pages: list[LayerPages]
    max_k: int
    is_probabilistic: bool

    @property
    def lookahead(self) -> int:
        return self.max_k

    def propose(self, step: DraftStep) -> None:
        slots = step.slots
        end_B = slots.num_tokens_S.numpy()[step.slot_B].astype(np.int64)
        live = slots.done_S.numpy()[step.slot_B] == 0
        if not live.any():
            return
        samples_B = step.samples_B & live
        start_B, count_B = self._first_pass(step, end_B)
        hidden_BD = self._forward(step, step.slot_B[live], start_B[live], count_B[live])
        if not step.k or not samples_B.any():
            return  # the pass still ran: the draft's KV stays warm while nobody speculates
        slot_B = step.slot_B[samples_B]
        drafts = self._chain(step, slot_B, end_B[samples_B], hidden_BD[samples_B[live]])
        store_drafts(slots, torch.from_numpy(slot_B), drafts, is_onehot=not self.is_probabilistic)

    def _first_pass(self, step: DraftStep, end_B: Longs) -> tuple[Longs, Longs]:
        """Unshifted tokens: a prefill chunk with the token it sampled, else the last two.

        Two committed tokens cover full acceptance, where the last draft was never fed; after a
        rejection the first of them is computed again, to the same values.
        """
        is_window = step.num_drafts_B > 0
        chunk_end_B = np.where(step.samples_B, end_B, step.start_B + step.query_len_B)
        start_B = np.where(is_window, end_B - 2, step.start_B)
        return start_B, chunk_end_B - start_B

    def _forward(
        self, step: DraftStep, slot_B: Longs, start_B: Longs, count_B: Longs
    ) -> torch.Tensor:
        """Hidden states of the last position of each row."""
        group_size = self.model.spec.group_size
        inputs = lay_out(step.slots, step.pages, slot_B, start_B, count_B, group_size)
        hidden_TD = self.model.forward(inputs, self.layer_pages)
        return hidden_TD[torch.from_numpy(np.cumsum(count_B) - 1)]

    def _chain(
        self, step: DraftStep, slot_B: Longs, end_B: Longs, hidden_BD: torch.Tensor
    ) -> torch.Tensor:
        """K drafts, each from the one before. Drafts pass through the token rows past the end.

        Positions at the model's limit draft nothing: their rows get -1 and leave the loop.
        """
        slots = step.slots
        drafts_BK = torch.full((len(slot_B), step.k), -1, dtype=torch.int32)
        rows = np.arange(len(slot_B))
        for j in range(step.k):
            has_room = end_B[rows] + j < slots.max_model_len
            if not has_room.any():
                break
            rows, hidden_BD = rows[has_room], hidden_BD[torch.from_numpy(has_room)]
            slot = torch.from_numpy(slot_B[rows])
            position_B = torch.from_numpy(end_B[rows] + j)
            logits_BV = self.model.logits(hidden_BD)
            ids_B = propose_tokens(
                logits_BV, slot, position_B, j, slots, probabilistic=self.is_probabilistic
            ).to(torch.int32)
            drafts_BK[torch.from_numpy(rows), j] = ids_B
            if j + 1 < step.k:
                # Scratch: beyond num_tokens nothing is committed, and the next commit overwrites.
                slots.tokens_SL[slot, position_B] = ids_B
                ones = np.ones(len(rows), np.int64)
                hidden_BD = self._forward(step, slot_B[rows], end_B[rows] + j, ones)
        return drafts_BK
