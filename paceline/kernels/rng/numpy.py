"""The noise of rng/reference in numpy: the same bits, in unsigned words and by cheaper calls."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.kernels.rng.reference import (
    DOMAIN_STEP,
    MULTIPLY_1,
    MULTIPLY_2,
    SEED_LANES,
    TOKEN_START,
    UNIT,
)

Words = npt.NDArray[np.uint32]
Singles = npt.NDArray[np.float32]


def _mix(word: Words) -> Words:
    word = word ^ (word >> np.uint32(16))
    word *= np.uint32(MULTIPLY_1)
    word ^= word >> np.uint32(15)
    word *= np.uint32(MULTIPLY_2)
    word ^= word >> np.uint32(15)
    return word


def stream_keys(
    seed_N2: npt.NDArray[np.int32], position_N: npt.NDArray[Any], domain: int | npt.NDArray[Any]
) -> Words:
    seed = seed_N2.view(np.uint32)
    step = np.asarray(domain).astype(np.uint32)[..., None] * np.uint32(DOMAIN_STEP)
    key_N2 = _mix((seed ^ np.array(SEED_LANES, np.uint32)) + step)
    key_N2 = _mix(key_N2 ^ seed[:, ::-1])
    return _mix(key_N2 + position_N.astype(np.uint32)[:, None])


@lru_cache(maxsize=4)
def token_words(num_tokens: int) -> Words:
    """The tokens' own half of the hash, for ids 0 .. num_tokens - 1."""
    words = _mix(np.arange(num_tokens, dtype=np.uint32) ^ np.uint32(TOKEN_START))
    words.flags.writeable = False
    return words


def hash_words(key_1: Any, key_2: Any, token_word: Words) -> Words:
    """From the two lanes of the key and `token_words` of the ids."""
    word: Words = token_word ^ key_1
    word ^= word >> np.uint32(16)
    word *= np.uint32(MULTIPLY_1)
    word += key_2
    word ^= word >> np.uint32(15)
    word *= np.uint32(MULTIPLY_2)
    word ^= word >> np.uint32(15)
    return word


def unit_interval(word: Words) -> Singles:
    unit = word.astype(np.float32)
    unit += np.float32(0.5)
    unit *= np.float32(UNIT)
    return unit


def uniform(seed_N2: Tensor, position_N: Tensor, domain: int | Tensor) -> Tensor:
    domains = domain if isinstance(domain, int) else domain.numpy()
    key_N2 = stream_keys(seed_N2.numpy(), position_N.numpy(), domains)
    words = hash_words(key_N2[:, :1], key_N2[:, 1:], token_words(1))
    return torch.from_numpy(unit_interval(words)[:, 0])
