"""One row per live request: tokens, lengths, drafts and sampling parameters. The device's truth.

Rows never move. Row `padding_slot` is padding. Only `state/staging.py` writes rows from the
host; only the step's own functions write them on the device.

Shape letters: S slots + 1, L max_model_len, K most drafts, V vocabulary, E entries of a table,
F fields.
"""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_EOS_TOKEN_IDS,
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


class ProcessorNumber(NamedTuple):
    """A number of SamplingParams that a processor reads."""

    bit: int
    param: str
    neutral: float = 0.0  # the value that asks for nothing


PROCESSOR_NUMBERS = {
    "presence_S": ProcessorNumber(PENALTIES, "presence_penalty"),
    "frequency_S": ProcessorNumber(PENALTIES, "frequency_penalty"),
    "repetition_S": ProcessorNumber(PENALTIES, "repetition_penalty", 1.0),
}
# Numbers of a slot: each is one row of `fields_FS`, so that one kernel can admit a request.
INT_FIELDS = (
    # Truth about the sequence. tokens[s, :num_tokens[s]] are committed; the KV of positions
    # < num_computed is in the pages. Decoding rows have num_computed == num_tokens - 1.
    "num_tokens_S",
    "num_computed_S",
    "prompt_len_S",  # the user's prompt, also after a resume
    "state_len_S",  # positions that the recurrent state covers (state/recurrent)
    "done_S",  # request.Done; != 0: the row emits nothing and writes nothing
    "drafts_onehot_S",  # 0: the slot's drafts were sampled from draft_probs_SKV
    # Limits: committed length that ends the request, and below which no stop token may come.
    "max_len_S",
    "min_len_S",
    "top_k_S",  # 0 = off
    "features_S",
    "num_logprobs_S",  # -1 = none; else how many top ones
)
FLOAT_FIELDS = (
    "temperature_S",  # 0 = greedy
    "top_p_S",
    "min_p_S",
    *PROCESSOR_NUMBERS,
)
FIELDS = INT_FIELDS + FLOAT_FIELDS
DEFAULTS = {
    "drafts_onehot_S": 1,
    "num_logprobs_S": -1,
    "top_p_S": 1.0,
    **{name: number.neutral for name, number in PROCESSOR_NUMBERS.items()},
}
NUM_EOS_IDS = MAX_EOS_TOKEN_IDS
# Columns of `ids_SE`: the seed in two 32-bit halves, EOS ids, stop ids.
SEED_COLUMNS = slice(0, 2)
EOS_COLUMNS = slice(2, 2 + NUM_EOS_IDS)
STOP_COLUMNS = slice(2 + NUM_EOS_IDS, 2 + NUM_EOS_IDS + MAX_STOP_TOKEN_IDS)


class Slots:
    """The tensors; see the comment of each group. Every lookup is by slot, never by batch row."""

    num_tokens_S: Tensor
    num_computed_S: Tensor
    prompt_len_S: Tensor
    state_len_S: Tensor
    done_S: Tensor
    drafts_onehot_S: Tensor
    max_len_S: Tensor
    min_len_S: Tensor
    top_k_S: Tensor
    features_S: Tensor
    num_logprobs_S: Tensor
    temperature_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    presence_S: Tensor
    frequency_S: Tensor
    repetition_S: Tensor

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        max_k: int,
        vocab_size: int,
        device: torch.device,
        *,
        draft_vocab_size: int = 0,  # > 0 keeps the distributions that drafts were sampled from
        num_sampled: int | None = None,  # drafts that a drafter samples; None: all max_k
        num_rates: int = 0,  # drafts that synthetic acceptance accepts by chance
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
        self.fields_FS = torch.zeros(len(FIELDS), rows, dtype=torch.int32, device=device)
        for index, name in enumerate(FIELDS):
            row_S = self.fields_FS[index]
            setattr(self, name, row_S.view(f32) if name in FLOAT_FIELDS else row_S)
            getattr(self, name).fill_(DEFAULTS.get(name, 0))
        self.tokens_SL = full(max_model_len)
        # Drafts for positions num_tokens, num_tokens + 1, ...; -1 = none.
        self.drafts_SK = full(max(max_k, 1), value=-1)
        self.draft_probs_SKV = (
            full(max(max_k if num_sampled is None else num_sampled, 1), draft_vocab_size, dtype=f32)
            if draft_vocab_size
            else None
        )
        self.rates_SK = full(num_rates, dtype=f32) if num_rates else None
        self.ids_SE = full(STOP_COLUMNS.stop, value=-1)
        self.seed_S2 = self.ids_SE[:, SEED_COLUMNS].zero_()
        self.eos_ids_SE = self.ids_SE[:, EOS_COLUMNS]
        self.stop_ids_SE = self.ids_SE[:, STOP_COLUMNS]
        # Tables of the rarer features; entries of -1 are unused.
        self.bias_ids_SE = full(MAX_LOGIT_BIAS, value=-1)
        self.bias_values_SE = full(MAX_LOGIT_BIAS, dtype=f32)
        self.bad_words_SEE = full(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS, value=-1)  # right-aligned
        self.allowed_bits_SV = full((vocab_size + 31) // 32)  # bit set = allowed; int32 words

    @cached_property
    def arrays(self) -> SimpleNamespace:
        """The same memory as numpy arrays, by the same names. For CPU tensors."""
        tensors = ((name, t) for name, t in vars(self).items() if isinstance(t, Tensor))
        return SimpleNamespace(**{name: t.numpy() for name, t in tensors})

    def nbytes(self) -> int:
        tensors = (t for t in vars(self).values() if isinstance(t, Tensor))
        return sum(t.nbytes for t in tensors if t._base is None)
