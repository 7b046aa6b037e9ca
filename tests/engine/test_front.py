"""What the front reads of a checkpoint without loading it: stop ids, default sampling, text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.engine.front import load_front
from paceline.errors import CheckpointError, ConfigError
from tests.engine.echo_client import byte_tokenizer


def checkpoint(folder: Path, *, with_text: bool = True, **files: Any) -> str:
    """A folder without weights; `files` are JSON files by their stem."""
    folder.mkdir(exist_ok=True)
    files.setdefault("config", {"model_type": "llama", "eos_token_id": 7})
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    if with_text:
        byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    return str(folder)


def front_of(model: str, **options: Any) -> Any:
    return load_front(EngineConfig.from_keywords(model=model, load_format="dummy", **options))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([5, 6], 7, (5, 6, 7)),
        ([7, 6], [7, 8], (7, 6, 8)),
        (None, 7, (7,)),
        (5, None, (5,)),
        (None, None, (256,)),  # the tokenizer's
    ],
)
def test_stop_ids_are_the_union_of_both_files(
    tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    model = checkpoint(
        tmp_path / "m",
        config={"model_type": "llama", "eos_token_id": config},
        generation_config={"eos_token_id": generation},
        tokenizer_config={"eos_token": "<end>"},
    )
    assert front_of(model).eos_token_ids == expected


def test_stop_ids_of_a_nested_text_config_count(tmp_path: Path) -> None:
    config = {"model_type": "x", "text_config": {"eos_token_id": 9}}
    assert front_of(checkpoint(tmp_path / "m", config=config)).eos_token_ids == (9,)


def test_default_sampling_comes_from_the_generation_config(tmp_path: Path) -> None:
    generation = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": None,
        "max_new_tokens": 99,
        "do_sample": True,
        "bos_token_id": 1,
    }
    model = checkpoint(tmp_path / "m", generation_config=generation)
    expected = {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    assert front_of(model).default_sampling == expected
    assert front_of(model, generation_config="vllm").default_sampling == {}
    other = checkpoint(tmp_path / "other", generation_config={"min_p": 0.1})
    assert front_of(model, generation_config=other).default_sampling == {"min_p": 0.1}


def test_a_generation_config_that_cannot_be_used_says_which(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m", generation_config={"temperature": -1})
    with pytest.raises(ConfigError, match="temperature is -1"):
        front_of(model)
    with pytest.raises(ConfigError, match=r"nowhere/generation_config\.json"):
        front_of(model, generation_config=str(tmp_path / "nowhere"))


def test_a_tokenizer_of_its_own_is_taken(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m", with_text=False)
    with pytest.raises(CheckpointError):
        front_of(model)
    text = checkpoint(tmp_path / "text")
    assert front_of(model, tokenizer=text).tokenizer.decode([66, 67]) == byte_tokenizer().decode(
        [66, 67]
    )


def test_skip_tokenizer_init_reads_no_tokenizer(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m", with_text=False)
    front = front_of(model, skip_tokenizer_init=True)
    assert front.tokenizer is None
    assert front.eos_token_ids == (7,)
