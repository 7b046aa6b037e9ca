"""A converted GGUF is a checkpoint that transformers loads with the same logits and token ids."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from paceline.checkpoint.convert import convert_gguf
from paceline.checkpoint.source import locate
from paceline.cli import build_parser, main
from paceline.errors import CheckpointError, ConfigError
from paceline.models.weights import open_weights
from paceline.text.tokenizer import load_tokenizer
from tests.checkpoint.gguf_writing import write_gguf
from tests.checkpoint.test_gguf_config import factors_of
from tests.checkpoint.vocabularies import TEXTS, Vocabulary, byte_level, sentencepiece
from tests.tiny import FAMILIES, save_tiny

IDS = torch.arange(50).reshape(1, 50) % 90


def written(
    folder: Path, family: str, vocabulary: Vocabulary | None = None, **options: Any
) -> tuple[Path, Any]:
    """(a GGUF, the transformers model that it was made from)"""
    vocabulary = vocabulary or byte_level("smollm")
    changes = {"vocab_size": len(vocabulary.tokens), **options.pop("changes", {})}
    model = save_tiny(folder / "hf", family, **changes)
    path = folder / "model.gguf"
    write_gguf(path, model, vocabulary=vocabulary, **options)
    return path, model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_the_same_logits_from_the_converted_folder(
    tmp_path: Path, family: str
) -> None:
    options: dict[str, Any] = {}
    if family == "llama-tied-rope3":
        model = save_tiny(tmp_path / "hf", family)
        options["rope_factors"] = factors_of(model)
    path, model = written(tmp_path, family, **options)
    convert_gguf(path, tmp_path / "out", "float32")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert again.dtype == torch.float32
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-5)
    assert again.generation_config.eos_token_id == byte_level("smollm").special["eos"]


def test_a_table_of_rope_factors_survives_as_longrope(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.25, 2.5, 3.0])
    path, model = written(tmp_path, "llama", rope_factors=factors)
    convert_gguf(path, tmp_path / "out", "float32")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    plain = model.model.rotary_emb.inv_freq
    expected = plain / torch.tensor(factors, dtype=torch.float32)
    torch.testing.assert_close(again.model.rotary_emb.inv_freq, expected)
    model.model.rotary_emb.inv_freq = expected
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["smollm", "llama-bpe", "qwen2", "spm"])
def test_transformers_reads_the_same_ids_from_the_converted_folder(
    tmp_path: Path, kind: str
) -> None:
    vocabulary = sentencepiece() if kind == "spm" else byte_level(kind)
    path, _ = written(tmp_path, "llama", vocabulary)
    convert_gguf(path, tmp_path / "out")
    ours = load_tokenizer(locate(str(path)))
    again = load_tokenizer(locate(str(tmp_path / "out")))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs.encode(text) == ids
        assert again.encode(text) == ids
        assert theirs.decode(ids) == ours.decode(ids, skip_special_tokens=False)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_token_id, ours.eos_token_id)
    assert again.special_ids == ours.special_ids


def test_the_chat_template_is_carried_over(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "llama")
    convert_gguf(path, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.chat_template == byte_level("smollm").template


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_numbers_are_rounded_as_torch_rounds_them(tmp_path: Path, kind: str, dtype: str) -> None:
    changes = {"intermediate_size": 64}
    path, _ = written(tmp_path, "llama", kind=kind, changes=changes)
    convert_gguf(path, tmp_path / "out", dtype)
    before, after = open_weights(locate(str(path))), open_weights(locate(str(tmp_path / "out")))
    assert after.names() == before.names()
    for name in before.names():
        expected = before.load(name).to(getattr(torch, dtype))
        assert torch.equal(after.load(name), expected), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype


def test_odd_numbers_round_to_bfloat16_as_in_torch(tmp_path: Path) -> None:
    from paceline.checkpoint.convert import _rounded

    values = np.frombuffer(np.random.default_rng(0).bytes(80_000), "<f4")
    values = np.append(values, np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38], "<f4"))
    got = np.frombuffer(_rounded(tmp_path, "x", values, "bfloat16"), "<i2")
    tensor = torch.from_numpy(got.copy()).view(torch.bfloat16)
    torch.testing.assert_close(
        tensor, torch.from_numpy(values).bfloat16(), rtol=0, atol=0, equal_nan=True
    )


def test_large_models_are_written_in_shards(tmp_path: Path) -> None:
    path, model = written(tmp_path, "qwen3")
    seen: list[tuple[str, float]] = []
    files = convert_gguf(
        path,
        tmp_path / "out",
        "float32",
        max_shard_bytes=70_000,
        progress=lambda name, share: seen.append((name, share)),
    )
    shards = [f.name for f in files if f.suffix == ".safetensors"]
    assert len(shards) > 2
    assert all(f.stat().st_size < 75_000 for f in files if f.suffix == ".safetensors")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-5)
    assert [name for name, _ in seen] == sorted(name for name, _ in seen)
    assert seen[-1][1] == 1.0


def test_numbers_beyond_float16_are_refused_with_what_to_do(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "llama")
    with torch.no_grad():
        model.model.norm.weight[3] = 1e6
    write_gguf(tmp_path / "model.gguf", model, vocabulary=byte_level("smollm"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*1e\+06.*bfloat16"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out", "float16")
    assert not (tmp_path / "out").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "model.gguf"]
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out", "bfloat16")


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "llama")
    (tmp_path / "empty").mkdir()
    convert_gguf(path, tmp_path / "empty")
    with pytest.raises(CheckpointError, match="not an empty folder"):
        convert_gguf(path, tmp_path / "empty")
    with pytest.raises(CheckpointError, match="is not a file"):
        convert_gguf(tmp_path / "missing.gguf", tmp_path / "new")
    with pytest.raises(ConfigError, match="Did you mean 'bfloat16'"):
        convert_gguf(path, tmp_path / "new", "bfloat")


def test_several_templates_are_carried_over_by_name(tmp_path: Path) -> None:
    vocabulary = dataclasses.replace(byte_level("smollm"), template=None)
    extra = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    path, _ = written(tmp_path, "llama", vocabulary, extra=extra)
    convert_gguf(path, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.chat_template == {"default": "plain", "tool_use": "tools"}


SCRIPT = """
import resource, sys
from paceline.checkpoint.convert import convert_gguf
from paceline.errors import CheckpointError
resource.setrlimit(resource.RLIMIT_FSIZE, (120000, 120000))
try:
    convert_gguf(sys.argv[1], sys.argv[2], "float32")
except CheckpointError as error:
    print(error)
assert "torch" not in sys.modules
"""


def test_a_full_disk_is_told_leaves_nothing_and_needs_no_torch(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "llama")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "could not be written: File too large" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "model.gguf"]


def test_convert_ends_with_the_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = written(tmp_path, "llama")
    folder = tmp_path / "a new folder"
    assert main(["convert", str(path), str(folder)]) == 0
    captured = capsys.readouterr()
    assert str(folder / "config.json") in captured.out.splitlines()
    last = captured.err.splitlines()[-1]
    program, *argv = shlex.split(last.removeprefix("Now try: "))
    asked = build_parser().parse_args(argv)
    assert (program, asked.command, asked.model) == ("paceline", "serve", str(folder))
