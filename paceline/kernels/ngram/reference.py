"""n-gram proposal: looks for the sequence's own tail earlier in the sequence. In torch.

Never reads another request's tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ngram_propose(
    tokens_SL: Tensor, num_tokens_S: Tensor, slot_B: Tensor, k: int, min_n: int, max_n: int
) -> Tensor:
    """k drafts per row, int32 [B, k]; -1 where no n-gram of min_n..max_n tokens recurs.

    The longest match wins, then the latest one. The copy may run into its own drafts, so a
    period shorter than k is continued, as in LZ77.
    """
    num_rows, longest = len(slot_B), tokens_SL.shape[1]
    token_BL = tokens_SL[slot_B.long()]
    length_B1 = num_tokens_S[slot_B.long()].long()[:, None]
    end_L = torch.arange(longest, device=tokens_SL.device)
    # How many tokens up to each position equal the sequence's last ones.
    matches_BL = torch.zeros(num_rows, longest, dtype=torch.int64, device=tokens_SL.device)
    goes_on_BL = end_L < length_B1 - 1
    for back in range(min(max_n, longest)):
        tail_B1 = token_BL.gather(1, (length_B1 - 1 - back).clamp(min=0))
        # Position end - back; the front of the row, where there is none, is masked.
        earlier_BL = token_BL.roll(back, 1)
        goes_on_BL = goes_on_BL & (end_L >= back) & (earlier_BL == tail_B1)
        matches_BL += goes_on_BL
    score_BL = (matches_BL * longest + end_L).where(matches_BL >= min_n, -1)
    best_B1 = score_BL.amax(1, keepdim=True)
    source_B1 = best_B1 % longest + 1
    step_K = torch.arange(k, device=tokens_SL.device)
    period_B1 = (length_B1 - source_B1).clamp(min=1)
    place_BK = (source_B1 + step_K % period_B1).clamp(max=longest - 1)
    return token_BL.gather(1, place_BK).where(best_B1 >= 0, -1)
