"""Prompt lookup: drafts from n-grams of the sequence itself. No model, no KV, no host read."""

from __future__ import annotations

from paceline.drafters.base import DraftStep
from paceline.kernels.table import ngram_propose


class NgramDrafter:
    """Copies what followed the latest earlier occurrence of the sequence's tail."""

    lookahead = 0
    is_probabilistic = False
    reads_features = False
    tap_ids = ()

    def __init__(self, max_k: int, min_n: int, max_n: int) -> None:
        self.max_k = max_k
        self._min_n = min_n
        self._max_n = max_n

    def propose(self, step: DraftStep) -> None:
        if not step.k:
            return
        slots = step.slots
        drafts_BK = ngram_propose(
            slots.tokens_SL, slots.num_tokens_S, step.slot_B, step.k, self._min_n, self._max_n
        )
        step.store(drafts_BK, is_onehot=True)
