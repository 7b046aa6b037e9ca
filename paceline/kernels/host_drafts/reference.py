"""Host drafts: what is left of a continuation becomes the drafts of a slot.

Owns the record's layout, its packing on the host and the reference, which runs on CPU tensors; the
rule itself is `HostDrafts.num_left`. Shape letters: R continuations, C tokens, W = 3 + C words.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from paceline.kernels.step_rows import SlotTensors
from paceline.step import HostDrafts, Ints, StepPlan

SLOT, LENGTH, LEAST, TOKENS = 0, 1, 2, 3  # words of a row; -1 after the last token


def pack_host_drafts(plan: StepPlan) -> Ints:
    """int32 [R, W]: the continuations of a plan that has some."""
    host = plan.host_drafts
    assert host is not None
    head_RW = np.stack([plan.slot_B[host.row_R], host.length_R, host.least_R], 1)
    return np.concatenate([head_RW, host.token_RC], 1, dtype="i4")


def take_host_drafts(record_RW: Tensor, state: SlotTensors) -> None:
    """Where a continuation is taken, the slot holds the rest as one-hot drafts, as many as it has
    room for. Otherwise it keeps its drafts."""
    slots, words_RW = state.arrays, record_RW.numpy()
    slot_R, length_R, least_R = words_RW[:, SLOT], words_RW[:, LENGTH], words_RW[:, LEAST]
    host = HostDrafts(slot_R, length_R, words_RW[:, TOKENS:], least_R)
    left_R = host.num_left(slot_R.astype(np.int64), slots.tokens_SL, slots.num_tokens_S)
    for slot, left, tokens in zip(slot_R.tolist(), left_R.tolist(), host.token_RC, strict=True):
        if left:
            drafts_K, end = slots.drafts_SK[slot], np.count_nonzero(tokens >= 0)
            drafts_K[:] = -1
            drafts_K[:left] = tokens[end - left : end][: len(drafts_K)]
            slots.drafts_onehot_S[slot] = 1
