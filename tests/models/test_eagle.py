"""EAGLE-1 heads: every published form loads and computes the same; odd pairs are named."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.checkpoint.source import locate
from paceline.errors import CheckpointError
from paceline.layers.attention import GroupedAttention
from paceline.layers.linear import exact_linear
from paceline.models.decoder import Decoder
from paceline.models.families import read_spec
from paceline.models.heads.eagle import EagleModel
from paceline.models.layout import lay_out
from paceline.models.loading import load_decoder
from paceline.models.reader import WeightFormats
from paceline.models.weight_source import DummyWeights
from paceline.models.weights import open_weights
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from tests.eagle import PlainEagle, random_head, save_head
from tests.heads import read_head
from tests.tiny import VOCAB, save_tiny

CPU = torch.device("cpu")
EXACT = WeightFormats(exact_linear(CPU), torch.float32, torch.float32, CPU)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return save_tiny(folder / "target", "llama")


@pytest.fixture(scope="module")
def target(folder: Path, reference: Any) -> Decoder:
    files = locate(str(folder / "target"))
    return load_decoder(read_spec(files.config), open_weights(files), EXACT, max_model_len=64)


def load(path: Path, target: Decoder) -> EagleModel:
    files = locate(str(path))
    spec = read_head("eagle", str(path), files.config, target.spec)
    weights = open_weights(files)
    try:
        model = spec.load(weights, EXACT, target)
        assert isinstance(model, EagleModel)
        return model
    finally:
        weights.close()


def outputs(model: EagleModel, feature_ND: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
    """Rows 0...N - 1 in two pieces over pages."""
    spec, count = model.stack.spec, len(token_N)
    pages, slots = Pages(8, 8, 2, 64, CPU), Slots(2, 64, 0, VOCAB, CPU)
    layers = pages.add_layers(spec.num_layers, spec.num_kv_heads, spec.head_size, torch.float32)
    pages.table_SP[1] = torch.tensor([3, 1, 7, 2, 0, 4, 5, 6])
    slots.tokens_SL[1, 1 : count + 1] = token_N.int()
    parts = []
    for start, end in ((0, 5), (5, count)):
        at, size = np.array([start]), np.array([end - start])
        inputs = lay_out(slots, pages, np.array([1]), at, size, spec.group_size, shift=1)
        parts.append(model.forward(inputs, feature_ND[start:end], layers))
    return torch.cat(parts)


FORMS: dict[str, dict[str, Any]] = {
    "published": {},
    "safetensors-with-prefix": {"prefix": "model.", "as_safetensors": True},
    "bin-with-prefix": {"prefix": "model."},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 2}, {"rope_theta": None}], ids=str)
def test_a_head_computes_what_its_definition_says(
    folder: Path, reference: Any, target: Decoder, form: str, changes: dict[str, Any]
) -> None:
    head = random_head(reference, **changes)
    if head.config["rope_theta"] is None:
        del head.config["rope_theta"]  # 10000 then
    if form != "published":
        head.weights["fc.bias"] = torch.randn(32)
    save_head(folder / form, head, **FORMS[form])
    model = load(folder / form, target)
    feature_ND, token_N = torch.randn(20, 32), torch.randint(0, VOCAB, (20,))
    found = outputs(model, feature_ND, token_N)
    assert torch.allclose(found, head.forward(feature_ND, token_N), atol=2e-4, rtol=1e-4)
    assert torch.allclose(model.logits(found), found @ head.lm_head_VD.T, atol=1e-3)


def test_an_equal_or_missing_embedding_is_the_targets_own(
    folder: Path, reference: Any, target: Decoder
) -> None:
    head = random_head(reference)
    save_head(folder / "equal", head)
    assert load(folder / "equal", target).embedding is target.embedding
    del head.weights["embed_tokens.weight"]
    save_head(folder / "missing", head)
    assert load(folder / "missing", target).embedding is target.embedding
    head.weights["embed_tokens.weight"] = torch.randn(VOCAB + 8, 32)
    save_head(folder / "other", head)
    assert load(folder / "other", target).embedding.table_VD.shape == (VOCAB + 8, 32)


def test_biases_and_head_norms_are_taken_where_the_file_has_them(
    folder: Path, reference: Any, target: Decoder
) -> None:
    head = random_head(reference)
    save_head(folder / "plain", head)
    at = "layers.0.self_attn."
    for name, rows in (("q_proj", 32), ("k_proj", 8), ("v_proj", 8)):
        head.weights[f"{at}{name}.bias"] = torch.randn(rows)
    head.weights[at + "q_norm.weight"] = head.weights[at + "k_norm.weight"] = torch.ones(8)
    save_head(folder / "more", head)
    model = load(folder / "more", target)
    attention = model.stack.layers[0].attention
    assert isinstance(attention, GroupedAttention)
    assert attention.head_norms is not None
    feature_ND, token_N = torch.randn(9, 32), torch.randint(0, VOCAB, (9,))
    plain = outputs(load(folder / "plain", target), feature_ND, token_N)
    assert not torch.allclose(outputs(model, feature_ND, token_N), plain, atol=1e-2)


def broken(head: PlainEagle, what: str) -> str:
    """Damages a head and returns what must be said about it."""
    config, weights = head.config, head.weights
    if what == "hidden":
        config["hidden_size"] = 48
        return "hidden size of 48, the target has 32"
    if what == "vocabulary":
        config["vocab_size"] = VOCAB - 6
        return f"embeds {VOCAB - 6} tokens, the target has {VOCAB}"
    if what == "rows":
        weights["embed_tokens.weight"] = weights["embed_tokens.weight"][:80]
        return f"embeds 80 tokens, the target has {VOCAB}"
    if what == "tensor":
        del weights["layers.0.mlp.up_proj.weight"]
        return r"no tensor 'model.layers.0.mlp.up_proj.weight'; config.json \(eagle"
    if what == "shape":
        weights["fc.weight"] = weights["fc.weight"][:, :40]
        return r"'model.fc.weight' has shape \[32, 40\]; config.json asks for \[32, 64\]"
    if what == "eagle3":
        config["draft_vocab_size"] = 32
        return 'EAGLE-3 head: give "method": "eagle3"'
    if what == "nested":
        config |= {"speculators_model_type": "eagle", "transformer_layer_config": {}}
        return "EAGLE-1 head in the form of speculators"
    assert what == "eagle3 tensors"
    weights["d2t"] = torch.zeros(32, dtype=torch.int64)
    return 'EAGLE-3 head: give "method": "eagle3"'


@pytest.mark.parametrize(
    "what",
    ["hidden", "vocabulary", "rows", "tensor", "shape", "eagle3", "nested", "eagle3 tensors"],
)
def test_a_head_that_cannot_work_is_refused_with_the_numbers(
    folder: Path, reference: Any, target: Decoder, what: str
) -> None:
    head = random_head(reference)
    message = broken(head, what)
    save_head(folder / "broken", head)
    with pytest.raises(CheckpointError, match=message):
        load(folder / "broken", target)


def test_a_whole_model_is_no_head_and_a_head_no_model(
    folder: Path, reference: Any, target: Decoder
) -> None:
    with pytest.raises(
        CheckpointError, match=r"no tensor 'fc.weight'.*\"method\": \"draft_model\""
    ):
        load(folder / "target", target)
    save_head(folder / "first", random_head(reference))
    files = locate(str(folder / "first"))
    with pytest.raises(CheckpointError, match=r"It is an EAGLE head.*\"method\": \"eagle\""):
        load_decoder(read_spec(files.config), open_weights(files), EXACT, max_model_len=64)


def test_a_head_for_another_vocabulary_runs_with_a_warning(
    folder: Path, reference: Any, target: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    head = random_head(reference, vocab_size=VOCAB + 20)
    head.weights["embed_tokens.weight"] = torch.randn(VOCAB + 20, 32)
    save_head(folder / "wide", head)
    with caplog.at_level(logging.WARNING):
        load(folder / "wide", target)
    assert f"vocabulary of {VOCAB + 20} tokens, the target has {VOCAB}" in caplog.text
    assert "few of its drafts will be accepted" in caplog.text


def test_dummy_weights_need_only_the_config(folder: Path, reference: Any, target: Decoder) -> None:
    path = folder / "dummy"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(random_head(reference).config))
    config = locate(str(path), load_format="dummy").config
    spec = read_head("eagle", "dummy", config, target.spec)
    model = spec.load(DummyWeights(spec.shapes(target.spec), 3, CPU), EXACT, target)
    assert model.embedding is target.embedding
    assert outputs(model, torch.randn(9, 32), torch.randint(0, VOCAB, (9,))).isfinite().all()
