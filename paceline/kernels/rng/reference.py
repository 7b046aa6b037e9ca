"""Counter-based noise f(seed, position, domain, token): no generator state, the same bits anywhere.

Integers are 32 bits wide and wrap around, so that torch (int32, logical shifts by masking), numpy
and Triton (uint32) agree bit for bit; only the logarithm may differ in its last digit. Never
decides what the noise is used for, beyond keeping the domains apart.

Shape letters: N rows, M tokens of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Disjoint streams: one draw may never share its noise with another at the same position.
SAMPLE = 0  # the target's own token
DRAFT = 1  # a sampled draft
ACCEPT = 2  # the coin of rejection sampling
RESAMPLE = 3  # the replacement of a rejected draft
# DRAFT and ACCEPT of draft j of a window are at the window's first position, in domain + j * this.
# Block verification rejects by all drafts of a window, so a later window may not draw with their
# noise again, although it has some of their positions.
PER_DRAFT = 4

MULTIPLY_1 = 0x21F0AAAD
MULTIPLY_2 = 0xD35A2D97
SEED_LANES = (0x6A09E667, 0xBB67AE85)
DOMAIN_STEP = 0x9E3779B1
TOKEN_START = 0x3C6EF372
# Just under 2**-32, so that the largest hash still gives a number below 1.
UNIT = float(np.nextafter(np.float32(2.0**-32), np.float32(0)))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _mix(word: Tensor) -> Tensor:
    word = word ^ ((word >> 16) & 0xFFFF)
    word = word * _signed(MULTIPLY_1)
    word = word ^ ((word >> 15) & 0x1FFFF)
    word = word * _signed(MULTIPLY_2)
    return word ^ ((word >> 15) & 0x1FFFF)


def stream_keys(seed_N2: Tensor, position_N: Tensor, domain: int | Tensor) -> Tensor:
    """One 64-bit key per row as two int32 lanes. `domain` is one number or int32 per row."""
    # By column: a tensor of the two lanes would come from the host, which no captured step may do.
    lanes = (seed_N2[:, i] ^ _signed(lane) for i, lane in enumerate(SEED_LANES))
    shift = domain * _signed(DOMAIN_STEP)
    if isinstance(shift, Tensor):
        shift = shift.to(torch.int32)[:, None]
    else:
        shift = _signed(shift & 0xFFFFFFFF)
    key_N2 = _mix(torch.stack(tuple(lanes), 1) + shift)
    key_N2 = _mix(key_N2 ^ seed_N2.flip(1))
    return _mix(key_N2 + position_N.to(torch.int32)[:, None])


def hash_words(key_N2: Tensor, token_M: Tensor) -> Tensor:
    """int32 [N, M]: the hash of each row's key with each token; `token_M` may also be [N, M]."""
    word = _mix(token_M.to(torch.int32) ^ _signed(TOKEN_START)) ^ key_N2[:, :1]
    word = word ^ ((word >> 16) & 0xFFFF)
    word = word * _signed(MULTIPLY_1) + key_N2[:, 1:]
    word = word ^ ((word >> 15) & 0x1FFFF)
    word = word * _signed(MULTIPLY_2)
    return word ^ ((word >> 15) & 0x1FFFF)


def unit_interval(word: Tensor) -> Tensor:
    """(hash + 0.5) / 2**32 in float32: small values keep all their digits, and none reaches 1."""
    # Two exact halves and one rounding: what an unsigned conversion gives.
    high = ((word >> 16) & 0xFFFF).to(torch.float32) * 65536.0
    return (high + (word & 0xFFFF).to(torch.float32) + 0.5) * UNIT


def uniform(seed_N2: Tensor, position_N: Tensor, domain: int | Tensor) -> Tensor:
    """float32 [N] in (0, 1)."""
    zero = torch.zeros(1, dtype=torch.int32, device=seed_N2.device)
    return unit_interval(hash_words(stream_keys(seed_N2, position_N, domain), zero))[:, 0]


def exponential(
    seed_N2: Tensor, position_N: Tensor, domain: int | Tensor, tokens: int | Tensor
) -> Tensor:
    """float32 [N, M] with mean 1, for tokens 0..M-1 or for the given ids ([M] or [N, M]).

    Small values decide the draw, and they keep full relative precision.
    """
    if isinstance(tokens, int):
        tokens = torch.arange(tokens, dtype=torch.int32, device=seed_N2.device)
    words = hash_words(stream_keys(seed_N2, position_N, domain), tokens)
    return -torch.log1p(-unit_interval(words))
