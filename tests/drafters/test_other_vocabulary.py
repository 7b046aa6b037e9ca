"""Drafts of a model with another vocabulary, or in another file format than the target's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaForCausalLM

from paceline import SamplingParams
from paceline.checkpoint.token_bytes import shared_tokens
from paceline.errors import CheckpointError
from tests.checkpoint.gguf_writing import write_gguf
from tests.e2e.engines import run, tokens
from tests.e2e.ladder import PROMPTS, Workshop
from tests.tiny import VOCAB, make_tiny

EXTRA = 7  # tokens that only the draft has


def write_tokenizer(folder: Path, names: list[str]) -> None:
    vocabulary = {name: i for i, name in enumerate(names)}
    Tokenizer(models.WordLevel(vocabulary, unk_token=names[0])).save(str(folder / "tokenizer.json"))


def permuted_draft(workshop: Workshop, folder: Path, *, missing: int) -> tuple[str, str]:
    """The target, and the same model with its tokens in another order: what it drafts is right,
    unless the token or one before it is one of the `missing` that the draft does not have."""
    target, draft = folder / "target", folder / "draft"
    shutil.copytree(workshop.target_folder("llama"), target)
    names = [f"token{i}" for i in range(VOCAB)]
    write_tokenizer(target, names)
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))
    model: Any = LlamaForCausalLM.from_pretrained(target)
    tables = [model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data]
    rows = [torch.cat((table[order], table[:EXTRA] * 0 + 9.0)) for table in tables]
    model.resize_token_embeddings(VOCAB + EXTRA)
    model.get_input_embeddings().weight.data = rows[0]
    model.get_output_embeddings().weight.data = rows[1]
    model.save_pretrained(draft)
    own = [names[i] for i in order.tolist()] + [f"own{i}" for i in range(EXTRA)]
    own[VOCAB - missing : VOCAB] = [f"else{i}" for i in range(missing)]
    write_tokenizer(draft, own)
    return str(target), str(draft)


PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def spec_of(draft: str, **more: Any) -> dict[str, Any]:
    spec = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    return {**spec, "adaptive": False, "use_heterogeneous_vocab": True, **more}


def test_a_draft_of_the_same_tokens_under_other_ids_is_always_right(
    workshop: Workshop, tmp_path: Path
) -> None:
    target, draft = permuted_draft(workshop, tmp_path, missing=0)
    plain = tokens(run(workshop, PROMPTS[:4], PARAMS))
    outputs = run(workshop, PROMPTS[:4], PARAMS, spec_of(draft), model=target)
    assert tokens(outputs) == plain
    for output in outputs:
        assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_that_the_draft_does_not_have_change_no_token(
    workshop: Workshop, tmp_path: Path, temperature: float
) -> None:
    target, draft = permuted_draft(workshop, tmp_path, missing=VOCAB // 3)
    params = PARAMS.replace(temperature=temperature, seed=5)
    plain = tokens(run(workshop, PROMPTS[:6], params))
    outputs = run(workshop, PROMPTS[:6], params, spec_of(draft), model=target)
    assert tokens(outputs) == plain
    accepted = sum(o.metrics.num_accepted_tokens for o in outputs)
    assert 0 < accepted < sum(o.metrics.num_draft_tokens for o in outputs)


def test_another_vocabulary_is_refused_unless_it_is_asked_for_and_shares_a_token(
    workshop: Workshop, tmp_path: Path
) -> None:
    target, draft = permuted_draft(workshop, tmp_path, missing=VOCAB)
    spec = spec_of(draft, use_heterogeneous_vocab=False)
    with pytest.raises(CheckpointError, match='Give "use_heterogeneous_vocab": true if their'):
        run(workshop, PROMPTS[:1], PARAMS, spec, model=target)
    with pytest.raises(CheckpointError, match=r"has no token of the target's vocabulary; use ano"):
        run(workshop, PROMPTS[:1], PARAMS, spec_of(draft), model=target)


def test_tokens_are_the_same_if_they_stand_for_the_same_bytes() -> None:
    """Ġ and Ċ of byte-level vocabularies are ▁ and <0x0A> of SentencePiece."""
    level = Tokenizer(models.BPE({"a": 0, "Ġthe": 1, "Ċ": 2, "Ã©": 3, "x": 4}, []))
    level.decoder = decoders.ByteLevel()
    piece = Tokenizer(models.BPE({"é": 0, "a": 1, "▁the": 2, "<0x0A>": 3, "y": 4}, []))
    level.add_special_tokens(["<s>", "y"])
    piece.add_special_tokens(["<s>", "</s>"])
    assert sorted(shared_tokens(level, piece)) == [(0, 1), (1, 2), (2, 3), (3, 0), (5, 5)]


def test_a_draft_may_be_a_gguf_while_the_target_is_not(workshop: Workshop, tmp_path: Path) -> None:
    """The target is safetensors in float32. One draft is the same model in half precision, the
    other of another family and quantised."""
    same, other = tmp_path / "same.gguf", tmp_path / "other.gguf"
    write_gguf(same, workshop.target("llama"), kind="F16")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    write_gguf(other, make_tiny("qwen3", **sizes), kind="Q8_0")
    plain = tokens(run(workshop, PROMPTS[:4], PARAMS))
    for draft, is_right in ((same, True), (other, False)):
        spec = spec_of(str(draft), use_heterogeneous_vocab=False, quantization="gguf")
        outputs = run(workshop, PROMPTS[:4], PARAMS, spec)
        assert tokens(outputs) == plain
        assert all(o.metrics.num_draft_tokens > 0 for o in outputs)
        assert not is_right or sum(o.metrics.num_accepted_tokens for o in outputs) > 40
    with pytest.raises(
        CheckpointError, match=r"is 'fp8', but the files of .* say 'gguf'; leave it"
    ):
        run(workshop, PROMPTS[:1], PARAMS, {**spec, "quantization": "fp8"})
