"""Turns a drafter's logits into draft tokens, and keeps what they were drawn from.

Writes only the slot's draft distributions; the caller stores tokens and says if they are one-hot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels import rng
from paceline.kernels.sampling import Drafts, Knobs, Noise, distributions, draw_windows, greedy
from paceline.layers.vocab import WHOLE, VocabShards
from paceline.sampling.fixed import knobs_of, twins
from paceline.state.slots import Slots


def propose_tokens(
    logits_BV: Tensor,
    slot_B: Tensor,
    position_B: Tensor | None,
    j: int,
    slots: Slots,
    *,
    token_of_V: Tensor | None = None,
    vocab: VocabShards = WHOLE,
) -> Tensor:
    """Draft j of each row, int32 [B]: the best, or drawn for sequence position `position_B`.

    `token_of_V` are the target's ids of a reduced vocabulary, which the logits are of; `vocab`
    says which part of it they are.

    Rows with a temperature are drawn by their own temperature, min_p, top_k and top_p, and q goes
    to `draft_probs_SKV[slot, j]`. Such rows are not one-hot.
    """
    if position_B is None:
        best_B, _ = vocab.greedy(logits_BV)
        return best_B if token_of_V is None else token_of_V.index_select(0, best_B).to(torch.int32)
    logits_BV = vocab.gather(logits_BV)
    if token_of_V is not None:
        # Drawn and verified at the target's width: what is not in the vocabulary has no chance.
        wide_BV = logits_BV.new_full((len(logits_BV), slots.vocab_size), -torch.inf)
        logits_BV = wide_BV.index_copy_(1, token_of_V, logits_BV)
    prob_SKV = slots.draft_probs_SKV
    assert prob_SKV is not None, "probabilistic drafts need draft_vocab_size"
    if logits_BV.is_cuda:  # the same with kernels that a graph may hold
        return twins(True).draft(logits_BV, slot_B, position_B, knobs_of(slots), prob_SKV, j)
    slot_B = slot_B.to(torch.int64)
    _, bad_B = greedy(logits_BV)
    knobs = Knobs(
        slots.temperature_S[slot_B],
        slots.top_k_S[slot_B],
        slots.top_p_S[slot_B],
        slots.min_p_S[slot_B],
    )
    position_B = position_B.to(torch.int32)
    noise = Noise(slots.seed_S2[slot_B], position_B, torch.full_like(position_B, rng.DRAFT))
    none_B = torch.full_like(position_B, -1)
    alone = Drafts(none_B, torch.zeros_like(slot_B), none_B.to(torch.int8))
    token_B, _ = draw_windows(logits_BV, knobs, noise, alone)
    # A broken draft row proposes its argmax for certain: verification needs its q to say so.
    certain_BV = torch.nn.functional.one_hot(token_B.to(torch.int64), logits_BV.shape[1])
    prob_BV = distributions(logits_BV.masked_fill(bad_B[:, None], 0.0), knobs)
    prob_SKV[slot_B, j, : logits_BV.shape[1]] = torch.where(
        bad_B[:, None], certain_BV.to(torch.float32), prob_BV
    )
    return token_B
