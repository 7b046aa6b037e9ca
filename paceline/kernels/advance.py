"""Advance slot state by what a step emitted: the torch reference of the kernel that ends a step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def advance(
    tokens_SL: Tensor,
    num_tokens_S: Tensor,
    num_computed_S: Tensor,
    done_S: Tensor,
    slot_B: Tensor,
    token_BW: Tensor,
    count_B: Tensor,
    done_B: Tensor,
) -> None:
    """Append count tokens to each slot's history and move its lengths; in place, by slot.

    The newest token has no KV yet, so num_computed ends one short of num_tokens.
    """
    if not tokens_SL.is_cpu:
        advance_reference(
            tokens_SL, num_tokens_S, num_computed_S, done_S, slot_B, token_BW, count_B, done_B
        )
        return
    # CPU-only shortcut: at these sizes a numpy call costs a fraction of a torch call.
    slot, token, count = slot_B.numpy(), token_BW.numpy(), count_B.numpy()
    length = num_tokens_S.numpy()[slot]
    row, offset = np.nonzero(np.arange(token.shape[1]) < count[:, None])
    tokens_SL.numpy()[slot[row], length[row] + offset] = token[row, offset]
    length += count
    num_tokens_S.numpy()[slot] = length
    num_computed_S.numpy()[slot] = length - 1
    done_S.numpy()[slot] = done_B.numpy()


def advance_reference(
    tokens_SL: Tensor,
    num_tokens_S: Tensor,
    num_computed_S: Tensor,
    done_S: Tensor,
    slot_B: Tensor,
    token_BW: Tensor,
    count_B: Tensor,
    done_B: Tensor,
) -> None:
    """`advance` in torch operations on any device."""
    length_B = num_tokens_S[slot_B]
    offset_W = torch.arange(token_BW.shape[1], dtype=torch.int32, device=token_BW.device)
    is_emitted = offset_W < count_B.unsqueeze(1)
    position = (length_B.unsqueeze(1) + offset_W)[is_emitted].long()
    slot = slot_B.unsqueeze(1).expand(is_emitted.shape)[is_emitted]
    tokens_SL[slot, position] = token_BW[is_emitted]
    length_B = length_B + count_B
    num_tokens_S[slot_B] = length_B
    num_computed_S[slot_B] = length_B - 1
    done_S[slot_B] = done_B
