"""Contexts up to 131,072 tokens: greedy tokens equal transformers', with n-gram drafts."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from tests.tiny import VOCAB, save_tiny

MAX_LEN = 131_072
OUTPUT = 24
SIZES = {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": MAX_LEN,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
}


def long_prompt(length: int) -> list[int]:
    """Tokens that repeat from far away, so that n-grams are found."""
    rng = random.Random(length)
    piece = [rng.randrange(3, VOCAB) for _ in range(997)]
    return [t if rng.random() < 0.9 else rng.randrange(3, VOCAB) for t in piece * 132][:length]


def reference(model: Any, prompt: list[int]) -> list[int]:
    """In chunks: a whole prompt would take memory for the logits of all its tokens."""
    cache, tokens, margins = None, list(prompt), []
    bounds = [*range(0, len(prompt), 8192), len(prompt)]
    with torch.no_grad():
        for start, end in pairwise(bounds):
            out = model(torch.tensor([tokens[start:end]]), past_key_values=cache, logits_to_keep=1)
            cache = out.past_key_values
        for _ in range(OUTPUT):
            best = out.logits[0, -1].topk(2)
            margins.append(float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
            out = model(torch.tensor([tokens[-1:]]), past_key_values=cache, logits_to_keep=1)
    assert min(margins) > 1e-3, "choose another seed: two tokens are too close to tell apart"
    return tokens[len(prompt) :]


def check_long_contexts(
    folder: Path, lengths: list[int], open_llm: Callable[..., LLM] = LLM, **options: Any
) -> None:
    model = save_tiny(folder, "llama", seed=4, **SIZES)
    prompts = [long_prompt(length) for length in lengths]
    expected = [reference(model, prompt) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, detokenize=False)
    with open_llm(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        max_num_seqs=len(lengths),
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
        **options,
    ) as llm:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        assert llm.get_metrics().num_drafts > 0
    assert [o.outputs[0].token_ids for o in outputs] == expected


@pytest.mark.more
def test_tokens_equal_the_reference_at_16384_tokens(tmp_path: Path) -> None:
    """A short and a long context side by side in one batch."""
    check_long_contexts(tmp_path, [100, 16_384 - OUTPUT], max_num_batched_tokens=4096)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tokens_equal_the_reference_up_to_131072_tokens(tmp_path: Path) -> None:
    lengths = [100, 32_000, MAX_LEN - OUTPUT]
    check_long_contexts(tmp_path, lengths, max_num_batched_tokens=4096)
