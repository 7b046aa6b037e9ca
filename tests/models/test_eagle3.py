"""EAGLE-3 heads: both published forms, every flag, and what is said of those that cannot work."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from paceline.checkpoint.source import locate
from paceline.errors import CheckpointError
from paceline.layers.linear import cuda_linear, exact_linear
from paceline.models.decoder import Decoder
from paceline.models.families import read_spec
from paceline.models.heads.eagle3 import TAPS_KEY, Eagle3Model
from paceline.models.layout import lay_out
from paceline.models.loading import load_decoder
from paceline.models.reader import WeightFormats
from paceline.models.weight_source import DummyWeights
from paceline.models.weights import open_weights
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from tests.eagle import random_head, save_head
from tests.eagle3 import PlainEagle3, random_eagle3, save_eagle3
from tests.heads import read_head
from tests.tiny import VOCAB, save_tiny

CPU = torch.device("cpu")
EXACT = WeightFormats(exact_linear(CPU), torch.float32, torch.float32, CPU)
FUSED = WeightFormats(cuda_linear(torch.float32, CPU), torch.float32, torch.float32, CPU)
NUM_LAYERS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return save_tiny(folder / "target", "llama", num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def target(folder: Path, reference: Any) -> Decoder:
    files = locate(str(folder / "target"))
    return load_decoder(read_spec(files.config), open_weights(files), EXACT, max_model_len=64)


def load(path: Path, target: Decoder, formats: WeightFormats = EXACT) -> Eagle3Model:
    files = locate(str(path))
    spec = read_head("eagle3", "head", files.config, target.spec)
    weights = open_weights(files)
    try:
        model = spec.load(weights, formats, target)
        assert isinstance(model, Eagle3Model)
        return model
    finally:
        weights.close()


def outputs(model: Eagle3Model, feature_ND: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
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
        parts.append(model.forward(inputs, model.read(feature_ND[start:end]), layers))
    return torch.cat(parts)


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"num_hidden_layers": 2},
    "residual": {"norm_before_residual": True},
    "together": {"norm_before_fc": True, "norm_output": True},
    "each": {"fc_norm": True, "norm_before_residual": True},
    "all": {"fc_norm": True, "norm_before_fc": True, "norm_output": True, "rope_theta": 777.0},
    "whole vocabulary": {"draft_vocab": None},
    "hidden states": {"taps": (), "norm_before_residual": True},
    "two taps": {"taps": (0, 8)},
    "biased": {},
}


# The nested form cannot say that a head reads the last hidden states.
CASES = [(f, how) for f in FORMS for how in ("flat", "nested", "fused")]
CASES.remove(("hidden states", "nested"))


@pytest.mark.parametrize(("form", "how"), CASES)
@torch.no_grad()
def test_a_head_computes_what_its_definition_says(
    folder: Path, reference: Any, target: Decoder, form: str, how: str
) -> None:
    """Nested ones have q and k norms. The taps are listed."""
    changes = {"taps": (2, 4, 6), **FORMS[form]}
    if how == "nested":
        changes |= {"model_type": "qwen3", "head_dim": 12}
    head = random_eagle3(reference, **changes)
    if form == "biased":
        for x, rows in (("q", 4), ("k", 2), ("v", 2)):
            size = head.config.get("head_dim", 8)
            head.weights[f"layers.0.self_attn.{x}_proj.bias"] = torch.randn(rows * size)
    save_eagle3(folder / "formed", head, form="nested" if how == "nested" else "flat")
    for file in folder.glob("formed/*"):
        is_nested_file = file.suffix == ".safetensors"
        if file.name != "config.json" and is_nested_file != (how == "nested"):
            file.unlink()
    model = load(folder / "formed", target, FUSED if how == "fused" else EXACT)
    assert model.tap_ids == head.taps
    width = max(len(head.taps), 1) * 32
    feature_ND, token_N = torch.randn(20, width), torch.randint(0, VOCAB, (20,))
    found = outputs(model, feature_ND, token_N)
    expected = head.forward(head.read(feature_ND), token_N)
    torch.testing.assert_close(found, expected, atol=3e-4, rtol=1e-4)
    torch.testing.assert_close(model.logits(found), head.logits(expected), atol=2e-3, rtol=1e-3)
    if head.offset_V is None:
        assert model.draft_to_target_ids is None
    else:
        assert model.draft_to_target_ids is not None
        assert model.draft_to_target_ids.tolist() == [head.token_of(i) for i in range(60)]


@pytest.mark.parametrize(
    ("listed", "asked", "expected"),
    [
        (None, None, (2, 4, 5)),
        ([1, 3, 4], None, (2, 4, 5)),  # the same, by layer numbers
        ([1, 3, 5], None, (1, 3, 5)),
        ([0, 8], None, (0, 8)),
        ([1, 3, 4], (1, 3, 4), (1, 3, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("at_top", [True, False])
def test_taps_come_from_the_user_the_file_or_the_targets_depth(
    reference: Any,
    target: Decoder,
    listed: list[int] | None,
    asked: tuple[int, ...] | None,
    expected: tuple[int, ...],
    at_top: bool,
) -> None:
    config = {**random_eagle3(reference).config, "draft_vocab_size": 60}
    if listed is not None:
        config |= {TAPS_KEY: listed} if at_top else {"eagle_config": {TAPS_KEY: listed}}
    head = read_head("eagle3", "head", config, target.spec, **{TAPS_KEY: asked})
    assert head.tap_ids == expected


@pytest.mark.parametrize(
    ("num_layers", "listed", "message"),
    [
        (6, None, r"after layers \[2, 3, 3\] \(the usual ones\).*distinct and between 0 and the "),
        (2, None, r"\[2, 1, -1\].*target's 2; give \"eagle_aux_hidden_state_layer_ids\""),
        (8, [2, 4, 4], r"\[2, 4, 4\] \(listed in its config.json\)"),
        (8, [2, 4, 9], r"\[2, 4, 9\].*the target's 8"),
        (8, [2, 4.5, 6], r"\[2, 4.5, 6\] \(listed"),  # no layer has this index
        (8, [True, 4, 6], r"\[True, 4, 6\] \(listed"),
        (8, "2, 4, 6", r"eagle_aux_hidden_state_layer_ids is '2, 4, 6'; a list is needed"),
    ],
)
def test_colliding_or_impossible_taps_are_refused_with_the_numbers(
    reference: Any, target: Decoder, num_layers: int, listed: Any, message: str
) -> None:
    config = {**random_eagle3(reference).config, "draft_vocab_size": 60, TAPS_KEY: listed}
    deep = replace(target.spec, layers=target.spec.layers[:1] * num_layers)
    with pytest.raises(CheckpointError, match=message):
        read_head("eagle3", "head", config, deep)


def test_what_a_head_does_not_bring_is_the_targets(
    folder: Path, reference: Any, target: Decoder
) -> None:
    head = random_eagle3(reference, taps=(2, 4, 6), draft_vocab=None)
    save_eagle3(folder / "lean", head)
    model = load(folder / "lean", target)
    assert model.embedding is target.embedding
    assert model.lm_head is not target.lm_head
    del head.weights["lm_head.weight"]
    head.config["draft_vocab_size"] = VOCAB
    save_lean(folder / "leaner", head)
    assert load(folder / "leaner", target).lm_head is target.lm_head


def save_lean(path: Path, head: PlainEagle3) -> None:
    """As `save_eagle3` does, for a head without an lm_head."""
    path.mkdir(exist_ok=True)
    config = {**head.config, TAPS_KEY: list(head.taps), "architectures": ["X_Eagle3"]}
    (path / "config.json").write_text(json.dumps(config))
    save_file(head.weights, path / "model.safetensors")


def broken(head: PlainEagle3, what: str) -> str:
    """Damages a head and returns what must be said about it."""
    config, weights = head.config, head.weights
    assert head.offset_V is not None
    if what == "target":
        config["target_hidden_size"] = 48
        return "reads hidden states of 48 numbers, the target's have 32"
    if what == "outside":
        head.offset_V[-1] = 40
        return f"drafts tokens \\d+ to 99 \\(d2t\\), the target has {VOCAB}"
    if what == "below":
        head.offset_V[0] = -1
        return "drafts tokens -1 to"
    if what == "same":
        head.offset_V[1] = head.offset_V[0] - 1
        return "has 60 tokens, but d2t gives them only 59"
    if what == "fc":
        weights["fc.weight"] = weights["fc.weight"][:, :64]
        return r"'model.fc.weight' has shape \[32, 64\]; config.json asks for \[32, 96\]"
    if what == "attention":
        at = "layers.0.self_attn.q_proj.weight"
        weights[at] = weights[at][:, :32]
        return r"q_proj.weight' has shape \[32, 32\]; config.json asks for \[32, 64\]"
    if what == "norm":
        del weights["norm.weight"]
        return r"no tensor 'model.norm.weight'; config.json \(eagle3"
    if what == "flag":
        config["norm_before_fc"] = True
        return "no tensor 'model.input_norm.weight'"
    assert what == "rows"
    weights["embed_tokens.weight"] = weights["embed_tokens.weight"][:80]
    return f"embeds 80 tokens, the target has {VOCAB}"


BROKEN = ["target", "outside", "below", "same", "fc", "attention", "norm", "flag", "rows"]


@pytest.mark.parametrize("what", BROKEN)
def test_a_head_that_cannot_work_is_refused_with_the_numbers(
    folder: Path, reference: Any, target: Decoder, what: str
) -> None:
    head = random_eagle3(reference, taps=(2, 4, 6))
    message = broken(head, what)
    if what == "target":  # the nested form states it beside the layers
        config = {**head.config, "draft_vocab_size": 60}
        with pytest.raises(CheckpointError, match=message):
            read_head("eagle3", "head", config, target.spec)
        return
    save_eagle3(folder / f"broken-{what}", head, form="nested")
    with pytest.raises(CheckpointError, match=message):
        load(folder / f"broken-{what}", target)


def test_a_reduced_vocabulary_without_its_map_is_refused(
    folder: Path, reference: Any, target: Decoder
) -> None:
    head = random_eagle3(reference, taps=(2, 4, 6))
    head.offset_V = None
    save_eagle3(folder / "unmapped", head)
    with pytest.raises(CheckpointError, match=r"no tensor 'model.d2t'"):
        load(folder / "unmapped", target)


@pytest.mark.parametrize("kind", ["eagle", "other"])
def test_another_kind_of_speculators_head_is_refused_by_name(
    reference: Any, target: Decoder, kind: str
) -> None:
    config = {**random_eagle3(reference).config, "speculators_model_type": kind}
    with pytest.raises(CheckpointError, match=f"'{kind}' is not supported; 'eagle3' is"):
        read_head("eagle3", "head", config, target.spec)


def test_an_eagle_1_head_is_recognised(folder: Path, reference: Any, target: Decoder) -> None:
    save_head(folder / "first", random_head(reference))
    with pytest.raises(CheckpointError, match=r'EAGLE-1 head give "method": "eagle"'):
        load(folder / "first", target)


def test_odd_heads_run_with_a_warning(
    folder: Path, reference: Any, target: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    """Made for more tokens than the target has; and a nested one that leaves its norms open."""
    head = random_eagle3(reference, taps=(2, 4, 6))
    head.config["vocab_size"] = VOCAB + 20
    head.weights["embed_tokens.weight"] = torch.randn(VOCAB + 20, 32)
    save_eagle3(folder / "odd", head, form="nested")
    path = folder / "odd" / "config.json"
    config = json.loads(path.read_text())
    del config["norm_before_residual"]
    path.write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING):
        load(folder / "odd", target)
    assert f"vocabulary of {VOCAB + 20} tokens, the target has {VOCAB}" in caplog.text
    assert "does not say norm_before_residual" in caplog.text


def test_a_narrower_head_brings_its_own_embedding(
    folder: Path, reference: Any, target: Decoder
) -> None:
    head = random_eagle3(reference, taps=(2, 4, 6), hidden_size=24)
    head.weights["embed_tokens.weight"] = torch.randn(VOCAB, 24)
    head.config["target_hidden_size"] = 32
    save_eagle3(folder / "narrow", head, form="nested")
    path = folder / "narrow" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "target_hidden_size": 32}))
    model = load(folder / "narrow", target)
    feature_ND, token_N = torch.randn(9, 96), torch.randint(0, VOCAB, (9,))
    expected = head.forward(head.read(feature_ND), token_N)
    found = outputs(model, feature_ND, token_N)
    torch.testing.assert_close(found, expected, atol=3e-4, rtol=1e-4)
    del head.weights["embed_tokens.weight"]
    assert head.offset_V is not None
    head.weights["d2t"] = head.offset_V
    save_lean(folder / "bare", head)
    config = json.loads((folder / "narrow" / "config.json").read_text())
    (folder / "bare" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"no tensor 'model.embed_tokens.weight'"):
        load(folder / "bare", target)


def test_dummy_weights_need_only_the_config(reference: Any, target: Decoder) -> None:
    config = {**random_eagle3(reference).config, "draft_vocab_size": 60}
    spec = read_head("eagle3", "dummy", config, target.spec)
    model = spec.load(DummyWeights(spec.shapes(target.spec), 3, CPU), EXACT, target)
    found = outputs(model, torch.randn(9, 96), torch.randint(0, VOCAB, (9,)))
    assert model.logits(found).shape == (9, 60)
    assert model.logits(found).isfinite().all()
