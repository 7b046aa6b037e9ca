"""A target's own MTP layer: it computes what its definition says, and is named where it is not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.checkpoint.source import locate
from paceline.errors import CheckpointError
from paceline.layers.linear import exact_linear
from paceline.models.decoder import Decoder
from paceline.models.families import read_spec
from paceline.models.heads.mtp import MtpModel
from paceline.models.layout import add_storage, lay_out
from paceline.models.loading import load_decoder
from paceline.models.reader import WeightFormats
from paceline.models.weight_source import DummyWeights
from paceline.models.weights import open_weights
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from tests.heads import read_head
from tests.mtp import random_mtp, save_mtp
from tests.tiny import HYBRID_FAMILIES, VOCAB, save_tiny

CPU = torch.device("cpu")
EXACT = WeightFormats(exact_linear(CPU), torch.float32, torch.float32, CPU)
FAMILIES = ("llama", "qwen3", "deepseek-v3", "glm4-moe-lite", *HYBRID_FAMILIES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp")


def load(path: Path) -> tuple[Decoder, MtpModel]:
    files = locate(str(path))
    spec = read_spec(files.config)
    head = read_head("mtp", str(path), files.config, spec)
    weights = open_weights(files)
    try:
        target = load_decoder(spec, weights, EXACT, max_model_len=64)
        return target, head.load(weights, EXACT, target)
    finally:
        weights.close()


def outputs(model: MtpModel, feature_ND: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
    """Rows 0...N - 1 in two pieces over pages."""
    spec, count = model.stack.spec, len(token_N)
    pages, slots = Pages(8, 8, 2, 64, CPU), Slots(2, 64, 0, VOCAB, CPU)
    layers = add_storage(pages, spec, torch.float32)
    pages.table_SP[1] = torch.tensor([3, 1, 7, 2, 0, 4, 5, 6])
    slots.tokens_SL[1, 1 : count + 1] = token_N.int()
    parts = []
    for start, end in ((0, 5), (5, count)):
        at, size = np.array([start]), np.array([end - start])
        inputs = lay_out(slots, pages, np.array([1]), at, size, spec.group_size, shift=1)
        parts.append(model.forward(inputs, feature_ND[start:end], layers))
    return torch.cat(parts)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_an_mtp_layer_computes_what_its_definition_says(folder: Path, family: str) -> None:
    reference = save_tiny(folder / family, family)
    head = random_mtp(reference)
    save_mtp(folder / f"{family}-mtp", folder / family, head)
    target, model = load(folder / f"{family}-mtp")
    assert model.embedding is target.embedding
    assert model.lm_head is target.lm_head
    feature_ND, token_N = torch.randn(20, 32), torch.randint(0, VOCAB, (20,))
    found, expected = outputs(model, feature_ND, token_N), head.forward(feature_ND, token_N)
    torch.testing.assert_close(found, expected, atol=3e-4, rtol=1e-4)
    torch.testing.assert_close(model.logits(found), head.logits(expected), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_definition_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    """The reference of these tests against the module that transformers drafts with."""
    from transformers.modeling_layers import MtpLayer

    target = save_tiny(tmp_path, family)
    head = random_mtp(target)
    layer, index = target.model.layers[-1], len(target.model.layers) - 1
    theirs = MtpLayer(target.config, type(layer), type(layer.input_layernorm), index).eval()
    theirs.mtp_block.load_state_dict(head.layer.state_dict())
    for name, module in (
        ("enorm", theirs.enorm),
        ("hnorm", theirs.hnorm),
        ("eh_proj", theirs.eh_proj),
        ("shared_head.norm", theirs.post_norm),
    ):
        module.weight.copy_(head.weights[f"{name}.weight"])
    feature_ND, token_N = torch.randn(20, 32), torch.randint(0, VOCAB, (20,))
    position = torch.arange(20)[None]
    found = theirs(
        inputs_embeds=target.get_input_embeddings()(token_N)[None],
        previous_hidden_state=feature_ND[None],
        position_embeddings=target.model.rotary_emb(feature_ND[None], position_ids=position),
        attention_mask=None,
        position_ids=position,
        past_key_values=None,
    )
    torch.testing.assert_close(found[0], head.forward(feature_ND, token_N), atol=1e-4, rtol=1e-4)


@pytest.fixture
def saved(folder: Path) -> Path:
    path = folder / "plain"
    if not path.exists():
        save_mtp(path, folder / "llama", random_mtp(save_tiny(folder / "llama", "llama")))
    return path


def changed(saved: Path, path: Path, **config: Any) -> dict[str, torch.Tensor]:
    """A copy of the checkpoint's config; its tensors, for the test to write."""
    path.mkdir()
    values = {**json.loads((saved / "config.json").read_text()), **config}
    (path / "config.json").write_text(json.dumps(values))
    return load_file(saved / "model.safetensors")


def test_an_embedding_and_a_head_of_its_own_are_used(saved: Path, tmp_path: Path) -> None:
    tensors = changed(saved, tmp_path / "own")
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"model.layers.2.{name}.weight"] = torch.randn(VOCAB, 32)
    save_file(tensors, tmp_path / "own" / "model.safetensors")
    _, model = load(tmp_path / "own")
    hidden_BD = torch.randn(3, 32)
    expected = hidden_BD @ tensors["model.layers.2.shared_head.head.weight"].T
    torch.testing.assert_close(model.logits(hidden_BD), expected)
    assert torch.equal(model.embedding.table_VD, tensors["model.layers.2.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (0, "has no MTP layer: its config.json says num_nextn_predict_layers 0"),
        (None, "num_nextn_predict_layers None"),
        (3, r"has 3 MTP layers \(num_nextn_predict_layers\), one for each draft; only"),
        ("one", "num_nextn_predict_layers is 'one'; a positive integer"),
    ],
)
def test_no_layer_and_several_layers_are_refused_by_name(
    saved: Path, tmp_path: Path, count: Any, message: str
) -> None:
    tensors = changed(saved, tmp_path / "x", num_nextn_predict_layers=count)
    save_file(tensors, tmp_path / "x" / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "x")


def test_a_second_layer_in_the_files_is_refused_whatever_the_config_says(
    saved: Path, tmp_path: Path
) -> None:
    tensors = changed(saved, tmp_path / "x", num_nextn_predict_layers=None, num_mtp_layers=1)
    save_file(tensors, tmp_path / "x" / "model.safetensors")
    load(tmp_path / "x")  # the other name counts where this one says nothing
    at, behind = "model.layers.2.", "model.layers.3."
    tensors |= {n.replace(at, behind): t.clone() for n, t in tensors.items() if n.startswith(at)}
    save_file(tensors, tmp_path / "x" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"several MTP layers \('.*2.' and '.*3.'\)"):
        load(tmp_path / "x")


def test_a_dropped_or_damaged_layer_is_named(saved: Path, tmp_path: Path) -> None:
    tensors = changed(saved, tmp_path / "x")
    path, at = tmp_path / "x" / "model.safetensors", "model.layers.2."
    save_file({n: t for n, t in tensors.items() if not n.startswith(at)}, path)
    with pytest.raises(CheckpointError, match=r"no tensor under 'model.layers.2.'.*dropped it"):
        load(tmp_path / "x")
    save_file({n: t for n, t in tensors.items() if n != f"{at}eh_proj.weight"}, path)
    with pytest.raises(CheckpointError, match=r"14 tensors under.*no 'model.layers.2.eh_proj"):
        load(tmp_path / "x")
    save_file({n: t for n, t in tensors.items() if n != f"{at}mlp.up_proj.weight"}, path)
    with pytest.raises(CheckpointError, match=r"no tensor 'model.layers.2.mlp.up_proj.weight'"):
        load(tmp_path / "x")
    save_file({**tensors, f"{at}eh_proj.weight": torch.randn(32, 32)}, path)
    with pytest.raises(CheckpointError, match=r"eh_proj.weight' has shape \[32, 32\].*\[32, 64\]"):
        load(tmp_path / "x")


def test_an_mtp_layer_that_is_not_used_causes_no_warning(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = locate(str(saved))
    with caplog.at_level(logging.WARNING):
        load_decoder(read_spec(files.config), open_weights(files), EXACT, max_model_len=64)
    assert "not used" not in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_need_only_the_config(tmp_path: Path, family: str) -> None:
    target = save_tiny(tmp_path, family)
    spec = read_spec(locate(str(tmp_path)).config)
    head = read_head("mtp", "dummy", {"num_mtp_layers": 1}, spec)
    assert (head.layers.num_layers, len(target.model.layers)) == (1, spec.num_layers)
    weights = open_weights(locate(str(tmp_path)))
    decoder = load_decoder(spec, weights, EXACT, max_model_len=64)
    model = head.load(DummyWeights(head.shapes(spec), 3, CPU), EXACT, decoder)
    found = outputs(model, torch.randn(9, 32), torch.randint(0, VOCAB, (9,)))
    assert model.logits(found).isfinite().all()
