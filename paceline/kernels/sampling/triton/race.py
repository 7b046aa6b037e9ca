"""The exponential race, argmax(logit / T - log E): most noise is never made.

Device functions only. E is at least u, the uniform number it is made of, so logit / T - log u
bounds the score from above, and for small u, which win, it is almost the score itself. The two
precise logarithms are for the block's best bound, and for tokens that come near it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from paceline.kernels.rng.triton import exponential, hash_word, unit_interval

# The interpreter knows tl.log2 only, which is exact to the last digit and takes much longer.
_HAS_FAST_LOG = tl.constexpr(not triton.knobs.runtime.interpret)
# Lower logits race as this one: divided by a temperature they might be infinite, and lose to none.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def race(logits_V, vocab_size, logit, start, low, above, noise):
    """Score and token of the winner among the block's logits that reach `low` and pass `above`."""
    temperature, key_1, key_2 = noise
    place = start + tl.arange(0, logit.shape[0])
    is_kept = (logit >= low) & (logit > above)
    bound = score_bound(tl.maximum(logit, LOWEST), temperature, key_1, key_2, place)
    bound = tl.where(is_kept, bound, float("-inf"))
    highest, at = tl.max(bound, 0, return_indices=True, return_indices_tie_break_left=True)
    token = start + at
    own = tl.load(logits_V + token).to(tl.float32)
    score = exact_score(own, temperature, key_1, key_2, token)
    score = tl.where(highest > float("-inf"), score, float("-inf"))
    if tl.sum((is_kept & (bound >= lower(score))).to(tl.int32)) > 1:
        # So seldom that few registers matter more than time.
        PIECE: tl.constexpr = 256 if logit.shape[0] > 256 else logit.shape[0]
        score = float("-inf")
        done = 0
        while done < logit.shape[0]:
            piece = start + done + tl.arange(0, PIECE)
            each = tl.load(logits_V + piece, piece < vocab_size, float("-inf")).to(tl.float32)
            scores = exact_score(each, temperature, key_1, key_2, piece)
            scores = tl.where((each >= low) & (each > above), scores, float("-inf"))
            best, spot = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
            token = tl.where(best > score, start + done + spot, token)
            score = tl.maximum(best, score)
            done += PIECE
    return score, token


@triton.jit
def score_bound(logit, temperature, key_1, key_2, token):
    """No less than the score, but for what `lower` allows."""
    unit = unit_interval(hash_word(key_1, key_2, token))
    log2 = libdevice.fast_log2f(unit) if _HAS_FAST_LOG else tl.log2(unit)
    return logit * (1.0 / temperature) - log2 * 0.6931471805599453


@triton.jit
def exact_score(logit, temperature, key_1, key_2, token):
    score = tl.div_rn(tl.maximum(logit, LOWEST), temperature)
    score -= tl.log(exponential(key_1, key_2, token))
    return tl.where(logit > float("-inf"), score, float("-inf"))


@triton.jit
def lower(score):
    """Less by more than what rounding can do to a bound."""
    return score - 1e-4 - 6e-7 * tl.abs(score)
