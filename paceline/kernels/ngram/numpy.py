"""n-gram proposal on the CPU, in numpy: the search ends at the first mismatch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def ngram_propose(
    tokens_SL: Tensor, num_tokens_S: Tensor, slot_B: Tensor, k: int, min_n: int, max_n: int
) -> Tensor:
    tokens, lengths = tokens_SL.numpy(), num_tokens_S.numpy()
    drafts_BK = np.full((len(slot_B), k), -1, np.int32)
    for row, slot in enumerate(slot_B.tolist()):
        history = tokens[slot, : lengths[slot]]
        source = _latest_match(history, min_n, max_n)
        if source < 0:
            continue
        period = len(history) - source
        available = history[source : source + k]
        drafts_BK[row] = available[np.arange(k) % period] if period < k else available
    return torch.from_numpy(drafts_BK)


def _latest_match(history: npt.NDArray[np.int32], min_n: int, max_n: int) -> int:
    """Where the continuation of the longest, then latest, copy of the tail begins; or -1."""
    length = len(history)
    if length <= min_n:
        return -1
    ends = np.flatnonzero(history[:-1] == history[-1])
    size = 1
    while size < max_n and len(ends):
        longer = ends[ends >= size]
        longer = longer[history[longer - size] == history[length - 1 - size]]
        if not len(longer):
            break
        ends, size = longer, size + 1
    if not len(ends) or size < min_n:
        return -1
    return int(ends[-1]) + 1
