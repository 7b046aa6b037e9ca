"""Logits equal transformers' in fp32 for each family, chunked and paged; bad files are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.checkpoint.source import locate
from paceline.errors import CheckpointError
from paceline.layers.linear import dense
from paceline.layers.rope import inverse_frequencies
from paceline.models.decoder import Decoder
from paceline.models.families import read_spec
from paceline.models.layout import lay_out
from paceline.models.loading import expected_shapes, load_decoder
from paceline.models.reader import WeightFormats
from paceline.models.weight_source import DummyWeights
from paceline.models.weights import open_weights
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from tests.checkpoint.gguf_writing import write_gguf
from tests.recurrent import storage_of, with_rows
from tests.tiny import FAMILIES, VOCAB, save_tiny

CPU = torch.device("cpu")
EXACT = WeightFormats(dense(torch.float32, CPU), torch.float32, torch.float32, CPU)


def load(folder: Path) -> Decoder:
    files = locate(str(folder))
    weights = open_weights(files)
    try:
        return load_decoder(read_spec(files.config), weights, EXACT, max_model_len=256)
    finally:
        weights.close()


def paged_logits(model: Decoder, ids: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    """Logits of `ids` computed in pieces over scattered pages, with a neighbour in the batch."""
    spec = model.spec
    pages, slots = Pages(40, 16, 4, 256, CPU), Slots(4, 256, 0, VOCAB, CPU)
    layers = storage_of(spec, slots, pages)
    count = -(-len(ids) // 16)
    pages.table_SP[1, :count] = torch.randperm(20)[:count].int()
    pages.table_SP[3, :count] = torch.arange(20, 20 + count).int()
    slots.tokens_SL[1, : len(ids)] = ids.int()
    slots.tokens_SL[3, : len(ids)] = ids.flip(0).int()
    out, start = [], 0
    for piece in pieces:
        both = np.array([3, 1])
        at, size = np.array([start, start]), np.array([piece, piece])
        inputs = with_rows(lay_out(slots, pages, both, at, size, spec.group_size))
        out.append(model.logits(model.forward(inputs, layers))[piece:])
        start += piece
    return torch.cat(out)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers(tmp_path: Path, family: str) -> None:
    reference = save_tiny(tmp_path, family)
    ids = torch.randint(3, VOCAB, (90,))
    found = paged_logits(load(tmp_path), ids, [40, 1, 5, 1, 43])
    torch.testing.assert_close(found, reference(ids[None]).logits[0], rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_of_a_gguf_equal_transformers_on_the_same_weights(
    tmp_path: Path, family: str, kind: str
) -> None:
    """The reference gets the dequantised tensors, so that only our own reading is judged."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # blocks of 32
    reference = save_tiny(tmp_path / "hf", family, **sizes)
    path = tmp_path / "tiny.gguf"
    factors = rope_factors(reference) if family == "llama-tied-rope3" else None
    write_gguf(path, reference, kind=kind, rope_factors=factors)
    weights = open_weights(locate(str(path)))
    stored = {n: weights.load(n).float() for n in reference.state_dict() if n in weights.names()}
    reference.load_state_dict(stored, strict=False)
    reference.tie_weights()
    ids = torch.randint(3, VOCAB, (60,))
    found = paged_logits(load(path), ids, [40, 1, 19])
    torch.testing.assert_close(found, reference(ids[None]).logits[0], rtol=1e-5, atol=1e-4)


def rope_factors(model: Any) -> Any:
    """What llama.cpp's converter stores for llama3 scaling: plain over scaled frequencies."""
    plain = inverse_frequencies(model.config.head_dim, 10000.0)
    return (plain / model.model.rotary_emb.inv_freq).numpy()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@torch.no_grad()
def test_biases_everywhere_are_honoured(tmp_path: Path, family: str) -> None:
    extra: dict[str, Any] = {} if family == "qwen2" else {"attention_bias": True, "mlp_bias": True}
    reference = save_tiny(tmp_path, family, **extra)
    ids = torch.randint(3, VOCAB, (20,))
    found = paged_logits(load(tmp_path), ids, [20])
    torch.testing.assert_close(found, reference(ids[None]).logits[0], rtol=1e-5, atol=5e-5)


@torch.no_grad()
def test_a_head_in_the_file_wins_over_the_tie_flag(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama-tied-rope3")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(VOCAB, 32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load(tmp_path)
    hidden = torch.randn(2, 32)
    torch.testing.assert_close(model.logits(hidden), hidden @ tensors["lm_head.weight"].T)


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.k_norm.weight"
    missing = {n: t for n, t in tensors.items() if n != name}
    save_file(missing, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)
    save_file({**tensors, name: torch.ones(5)}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name}' has shape \[5\].*\[12\]"):
        load(tmp_path)


def test_dummy_weights_need_only_a_config_and_repeat_for_a_seed(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2")
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    spec = read_spec(locate(str(tmp_path), load_format="dummy").config)
    shapes = expected_shapes(spec)
    heads = [
        load_decoder(spec, DummyWeights(shapes, seed, CPU), EXACT, max_model_len=64).lm_head
        for seed in (1, 1, 2)
    ]
    x = torch.randn(3, 32)
    assert torch.equal(heads[0](x), heads[1](x))
    assert not torch.equal(heads[0](x), heads[2](x))
