"""One block's winner of the exponential race, argmax(logit / T - log E): most noise is never made.

Device functions only. E is at least u, the uniform number it is made of, so logit / T - log u
bounds the score from above, and for small u, which win, it is almost the score itself. The two
precise logarithms are for the block's best bound, and for whoever else comes near it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.rng_triton import exponential, hash_word, unit_interval


@triton.jit
def race(logits_V, logit, start, threshold, temperature, key_1, key_2):
    """Score and token of the winner among the block's logits at or above the threshold."""
    step = tl.arange(0, logit.shape[0])
    bound = logit * (1.0 / temperature) - 0.6931471805599453 * tl.log2(
        unit_interval(hash_word(key_1, key_2, start + step))
    )
    is_kept = (logit >= threshold) & (logit > float("-inf"))
    bound = tl.where(is_kept, bound, float("-inf"))
    top, at = tl.max(bound, 0, return_indices=True, return_indices_tie_break_left=True)
    token = start + at
    own = tl.load(logits_V + token).to(tl.float32)
    score = _score(tl.maximum(own, -1e30), temperature, key_1, key_2, token)
    score = tl.where(top > float("-inf"), score, float("-inf"))
    # More than what rounding can do to a bound.
    reach = score - 1e-4 - 4e-7 * tl.abs(score)
    if tl.sum((is_kept & (bound >= reach)).to(tl.int32)) > 1:
        scores = _score(tl.maximum(logit, -1e30), temperature, key_1, key_2, start + step)
        scores = tl.where(is_kept & (bound >= reach), scores, float("-inf"))
        score, at = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
        token = start + at
    return score, token


@triton.jit
def _score(logit, temperature, key_1, key_2, token):
    return tl.div_rn(logit, temperature) - tl.log(exponential(key_1, key_2, token))
