"""Turns a drafter's logits into draft tokens, and keeps what they were drawn from.

Writes only the slot's draft distributions; the caller stores tokens and says if they are one-hot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels import table
from paceline.kernels.rows import WindowRows
from paceline.layers.vocab import WHOLE, VocabShards
from paceline.sampling.verify import knobs_of
from paceline.state.slots import Slots


def propose_tokens(
    logits_BV: Tensor,
    slot_B: Tensor,
    position_B: Tensor | None,
    j: int,
    slots: Slots,
    *,
    draft_to_target_ids: Tensor | None = None,
    vocab: VocabShards = WHOLE,
) -> Tensor:
    """Draft j of each row, int32 [B]: the best, or drawn for sequence position `position_B`.

    Slots that keep distributions: drawn with separate noise, for rejection sampling. Other slots:
    drawn with the noise of the target's draw at this position (by the target's token ids), so that
    both draws are often equal; such drafts are verified by equality, as the best ones are.

    `logits_BV` cover `vocab`'s part of the drafter's vocabulary. If that is smaller than the
    target's, `draft_to_target_ids` maps its ids to the target's.

    Rows with a temperature are drawn by their own temperature, min_p, top_k and top_p. Slots that
    keep distributions get q in `draft_probs_SKV[slot, j]`; such rows are not one-hot.
    """
    if position_B is None:
        best_B, _ = vocab.greedy(logits_BV)
        return (
            best_B
            if draft_to_target_ids is None
            else draft_to_target_ids.index_select(0, best_B).to(torch.int32)
        )
    logits_BV = vocab.gather(logits_BV)
    if draft_to_target_ids is not None:
        # Drawn and verified at the target's width: what is not in the vocabulary has no chance.
        wide_BV = logits_BV.new_full((len(logits_BV), slots.vocab_size), -torch.inf)
        logits_BV = wide_BV.index_copy_(1, draft_to_target_ids, logits_BV)
    prob_SKV = slots.draft_probs_SKV
    if prob_SKV is None:
        first_B = torch.arange(len(slot_B), dtype=slot_B.dtype, device=slot_B.device)
        none_B0 = slot_B.new_empty((len(slot_B), 0))
        windows = WindowRows(slot_B, first_B, torch.ones_like(slot_B), position_B, none_B0)
        return table.draw(logits_BV, windows, knobs_of(slots))[0]
    return table.draft(logits_BV, slot_B, position_B, knobs_of(slots), prob_SKV, j)
