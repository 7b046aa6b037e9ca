"""The noise of rng/reference inside Triton kernels: the same 32-bit words, bit for bit.

Device functions only, nothing is launched here. Seeds come as the two halves that slots keep.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.rng import reference as rng

SAMPLE = tl.constexpr(rng.SAMPLE)
DRAFT = tl.constexpr(rng.DRAFT)
ACCEPT = tl.constexpr(rng.ACCEPT)
RESAMPLE = tl.constexpr(rng.RESAMPLE)
PER_DRAFT = tl.constexpr(rng.PER_DRAFT)

_MULTIPLY_1 = tl.constexpr(rng.MULTIPLY_1)
_MULTIPLY_2 = tl.constexpr(rng.MULTIPLY_2)
_SEED_LANE_1 = tl.constexpr(rng.SEED_LANES[0])
_SEED_LANE_2 = tl.constexpr(rng.SEED_LANES[1])
_DOMAIN_STEP = tl.constexpr(rng.DOMAIN_STEP)
_TOKEN_START = tl.constexpr(rng.TOKEN_START)
_UNIT = tl.constexpr(rng.UNIT)


@triton.jit
def _mix(word):
    word = word ^ (word >> 16)
    word = word * _MULTIPLY_1
    word = word ^ (word >> 15)
    word = word * _MULTIPLY_2
    return word ^ (word >> 15)


@triton.jit
def stream_key(seed_low, seed_high, position, domain):
    """The two uint32 lanes of a stream's key. All arguments are int32 (blocks or scalars)."""
    low = seed_low.to(tl.uint32, bitcast=True)
    high = seed_high.to(tl.uint32, bitcast=True)
    step = tl.cast(domain, tl.uint32) * _DOMAIN_STEP
    key_1 = _mix((low ^ _SEED_LANE_1) + step)
    key_2 = _mix((high ^ _SEED_LANE_2) + step)
    place = tl.cast(position, tl.uint32)
    return _mix((_mix(key_1 ^ high)) + place), _mix((_mix(key_2 ^ low)) + place)


@triton.jit
def hash_word(key_1, key_2, token):
    """uint32: the hash of a key with token ids."""
    word = _mix(tl.cast(token, tl.uint32) ^ _TOKEN_START) ^ key_1
    word = word ^ (word >> 16)
    word = word * _MULTIPLY_1 + key_2
    word = word ^ (word >> 15)
    word = word * _MULTIPLY_2
    return word ^ (word >> 15)


@triton.jit
def unit_interval(word):
    """(hash + 0.5) / 2**32 in float32, in (0, 1)."""
    return (word.to(tl.float32) + 0.5) * _UNIT


@triton.jit
def uniform(seed_low, seed_high, position, domain):
    """float32 in (0, 1): one number of a stream."""
    key_1, key_2 = stream_key(seed_low, seed_high, position, domain)
    return unit_interval(hash_word(key_1, key_2, tl.zeros_like(key_1)))


@triton.jit
def exponential(key_1, key_2, token):
    """float32 with mean 1 for each token: -log(1 - u), exact to the last digits for any u."""
    unit = unit_interval(hash_word(key_1, key_2, token))
    rest = 1.0 - unit
    # What the subtraction rounded away: small u would lose all its digits to it.
    lost = (1.0 - rest) - unit
    return -(tl.log(rest) + lost * (1.0 + unit))
