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
def race(logits_V, vocab_size, logit, start, threshold, temperature, key_1, key_2):
    """Score and token of the winner among the block's logits at or above the threshold."""
    place = start + tl.arange(0, logit.shape[0])
    is_kept = (logit >= threshold) & (logit > float("-inf"))
    bound = tl.log2(unit_interval(hash_word(key_1, key_2, place))) * 0.6931471805599453
    bound = tl.where(is_kept, logit * (1.0 / temperature) - bound, float("-inf"))
    _, at = tl.max(bound, 0, return_indices=True, return_indices_tie_break_left=True)
    token = start + at
    own = tl.load(logits_V + token).to(tl.float32)
    score = _score(own, threshold, temperature, key_1, key_2, token)
    # Lower by more than what rounding can do to a bound.
    reach = score - 1e-4 - 4e-7 * tl.abs(score)
    if tl.sum((is_kept & (bound >= reach)).to(tl.int32)) > 1:
        # So seldom that few registers matter more than time.
        PIECE: tl.constexpr = 256 if logit.shape[0] > 256 else logit.shape[0]
        score = float("-inf")
        done = 0
        while done < logit.shape[0]:
            piece = start + done + tl.arange(0, PIECE)
            each = tl.load(logits_V + piece, piece < vocab_size, float("-inf")).to(tl.float32)
            scores = _score(each, threshold, temperature, key_1, key_2, piece)
            best, spot = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
            token = tl.where(best > score, start + done + spot, token)
            score = tl.maximum(best, score)
            done += PIECE
    return score, token


@triton.jit
def _score(logit, threshold, temperature, key_1, key_2, token):
    score = tl.div_rn(tl.maximum(logit, -1e30), temperature)
    score -= tl.log(exponential(key_1, key_2, token))
    is_kept = (logit >= threshold) & (logit > float("-inf"))
    return tl.where(is_kept, score, float("-inf"))
