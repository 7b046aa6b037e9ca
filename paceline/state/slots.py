"""One row per live request: tokens, lengths, drafts and sampling parameters. The device's truth.

Rows never move. Row `padding_slot` belongs to nobody. Only `state/staging.py` writes rows from the
host; only the step's own functions write them on the device.

Shape letters: S slots + 1, L max_model_len, K most drafts, V vocabulary, E entries of a table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
)

# Bits of features_S: which processors a slot needs. 0 = plain sampling parameters only.
PENALTIES = 1
BIAS = 2
BAD_WORDS = 4
ALLOWED = 8
LOGPROBS = 16
CUSTOM = 32
MIN_TOKENS = 64
LATE_MASK = 128


class Slots:
    """The tensors; see the comment of each group. Every lookup is by slot, never by batch row."""

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        max_k: int,
        vocab_size: int,
        device: torch.device,
        *,
        draft_vocab_size: int = 0,  # > 0 keeps the distributions that drafts were sampled from
    ) -> None:
        self.num_slots = num_slots
        self.padding_slot = num_slots
        self.max_model_len = max_model_len
        self.max_k = max_k
        self.vocab_size = vocab_size
        self.device = device
        rows = num_slots + 1

        def full(*shape: int, value: float = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((rows, *shape), value, dtype=dtype, device=device)

        f32 = torch.float32
        # Truth about the sequence. tokens[s, :num_tokens[s]] are committed; the KV of positions
        # < num_computed is in the pages. Decoding rows have num_computed == num_tokens - 1.
        self.tokens_SL = full(max_model_len)
        self.num_tokens_S = full()
        self.num_computed_S = full()
        self.prompt_len_S = full()  # the user's prompt, also after a resume
        self.prefill_len_S = (
            full()
        )  # what must be computed before the first sample: prompt + resumed output
        self.done_S = full()  # request.Done; != 0: the row emits nothing and writes nothing
        # Drafts for positions num_tokens, num_tokens + 1, ...; -1 = none.
        self.drafts_SK = full(max(max_k, 1), value=-1)
        self.drafts_onehot_S = full(value=1, dtype=torch.bool)
        self.draft_probs_SKV = (
            full(max(max_k, 1), draft_vocab_size, dtype=f32) if draft_vocab_size else None
        )
        # Limits: committed length that ends the request, and below which no stop token may come.
        self.max_len_S = full()
        self.min_len_S = full()
        self.eos_ids_SE = full(8, value=-1)
        self.stop_ids_SE = full(MAX_STOP_TOKEN_IDS, value=-1)
        # Sampling. temperature 0 = greedy, top_k 0 = off, seed split into two 32-bit halves.
        self.temperature_S = full(dtype=f32)
        self.top_k_S = full()
        self.top_p_S = full(value=1, dtype=f32)
        self.min_p_S = full(dtype=f32)
        self.seed_S2 = full(2)
        self.presence_S = full(dtype=f32)
        self.frequency_S = full(dtype=f32)
        self.repetition_S = full(value=1, dtype=f32)
        self.features_S = full()
        # Tables of the rarer features; entries of -1 are unused.
        self.bias_ids_SE = full(MAX_LOGIT_BIAS, value=-1)
        self.bias_values_SE = full(MAX_LOGIT_BIAS, dtype=f32)
        self.bad_words_SEE = full(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS, value=-1)  # right-aligned
        self.allowed_bits_SV = full((vocab_size + 31) // 32)  # bit set = allowed; int32 words
        self.num_logprobs_S = full(value=-1)  # -1 = none; else how many top ones
        self.num_prompt_logprobs_S = full(value=-1)

    def nbytes(self) -> int:
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, Tensor))
