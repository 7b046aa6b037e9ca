"""The default model's own file: ids equal a tokenizer put together here from its raw metadata."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from paceline.checkpoint.gguf_file import GgufFile
from paceline.checkpoint.source import ModelFiles, locate
from paceline.errors import CheckpointError
from paceline.text.chat import load_chat_template
from paceline.text.detokenizer import Detokenizer
from paceline.text.tokenizer import load_tokenizer
from tests.checkpoint.vocabularies import CORPUS, TEXTS


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    try:
        return locate("")
    except CheckpointError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")


@pytest.fixture(scope="module")
def reference(files: ModelFiles) -> Any:
    """The vocabulary with the pre-tokenizer of SmolLM2's tokenizer.json."""
    assert files.gguf is not None
    raw = GgufFile(files.gguf)
    tokens = raw["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in raw["tokenizer.ggml.merges"]]
    kinds = raw["tokenizer.ggml.token_type"]
    made = Backend(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([t for t, kind in zip(tokens, kinds, strict=True) if kind == 3])
    return made


def test_ids_and_text_equal_the_reference(files: ModelFiles, reference: Any) -> None:
    ours = load_tokenizer(files)
    for text in [*TEXTS, *CORPUS]:
        ids = reference.encode(text).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == reference.decode(ids)
        shown = Detokenizer(ours, prompt_ids=[]).push(ids, True).text
        assert shown == ours.decode(ids)


def test_what_the_model_card_says(files: ModelFiles) -> None:
    tokenizer = load_tokenizer(files)
    assert files.name == "SmolLM2-135M-Instruct"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert len(tokenizer.special_ids) == 17
    assert tokenizer.vocab_size == files.config["vocab_size"] == 49152
    assert files.config["num_hidden_layers"] == 30
    assert files.config["rope_theta"] == 100000.0
    assert files.config["tie_word_embeddings"] is True
    assert tokenizer.encode("year 2024")[-4:] == tokenizer.encode("2024")


def test_the_chat_template_puts_its_system_turn_in_front(files: ModelFiles) -> None:
    prompt = load_chat_template(files).render([{"role": "user", "content": "hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
