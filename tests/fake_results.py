"""Parts of the results of fake runners: masks of late rows, and logprobs."""

from __future__ import annotations

import numpy as np

from paceline.step import Floats, Ints, LateMasks, TokenLogprobs


def mask_of(late: LateMasks | None, row: int) -> Ints | None:
    if late is None or row not in late.row_R:
        return None
    mask: Ints = late.mask_RWV[late.row_R.tolist().index(row)]
    return mask


def logprobs_of(row: int, tokens: list[int]) -> TokenLogprobs:
    ids = np.array(tokens, np.int32)[:, None]
    values: Floats = -ids.astype(np.float32)
    return TokenLogprobs(row, ids, values, np.ones(len(tokens), np.int32))
