"""Engines with fp8 weights: drafts, chunks and cached prefixes change no token of the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline import RequestOutput, SamplingParams
from paceline.config import EngineConfig
from paceline.errors import CheckpointError, ConfigError
from paceline.kernels.table import has_numba
from paceline.runner import startup
from tests.e2e.engines import NGRAM, draft_model, eagle, eagle3, head, run, tokens
from tests.e2e.ladder import PROMPTS, Workshop
from tests.e2e.loop import tiny_engine
from tests.e2e.test_fixed_steps import padded_on_cpu
from tests.fp8 import quantise_checkpoint, save_large
from tests.tiers import first_or_more

CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
SOME = PROMPTS[3:12]  # shared prefixes, and a phrase that repeats


def spec_of(workshop: Workshop, drafter: str) -> dict[str, Any] | None:
    if drafter == "ngram":
        return NGRAM
    return {
        "draft_model": draft_model(workshop, 3, quantization="fp8_per_block"),
        "draft_model, wide": draft_model(workshop, 3),
        "eagle": eagle(workshop, 3, quantization="fp8"),
        "eagle3": eagle3(workshop, 3, quantization="fp8"),
        "mtp": head(workshop, "mtp", 2),
    }[drafter]


DRAFTERS = ["ngram", "draft_model", "draft_model, wide", "eagle", "eagle3", "mtp"]
CASES = [(d, by, fixed) for d in DRAFTERS for by in ("fp8", "fp8_per_block") for fixed in (0, 1)]
FIRST = [("ngram", "fp8_per_block", 0), ("draft_model", "fp8", 0), ("eagle", "fp8", 0)]
FIRST += [("mtp", "fp8", 0), ("eagle", "fp8", 1)]


@pytest.mark.parametrize(
    ("drafter", "by", "is_fixed"), first_or_more(CASES, lambda x: x in FIRST), ids=str
)
def test_drafts_change_no_token_of_a_target_in_fp8(
    drafter: str, by: str, is_fixed: int, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_fixed:
        monkeypatch.setattr(startup, "CpuPlatform", padded_on_cpu)
    spec = spec_of(workshop, drafter)
    # Also in chunks and with cached prefixes: a row's bits are its own.
    plain = run(workshop, SOME, PARAMS, None, quantization=by, enable_prefix_caching=False)
    found = run(workshop, SOME, PARAMS, spec, quantization=by, max_num_batched_tokens=30)
    assert_same(found, plain, is_exact=not is_fixed)
    assert sum(x.metrics.num_accepted_tokens for x in found) > 0
    assert sum(x.metrics.num_cached_tokens for x in found) > 0


@pytest.mark.more
@pytest.mark.parametrize("by", ["fp8", "fp8_per_block"])
@pytest.mark.parametrize(
    "family", ["mixtral", "qwen3-moe", "deepseek-v3", "qwen3.5-moe", "qwen3-next"]
)
def test_drafts_change_no_token_of_any_family_in_fp8(
    family: str, by: str, workshop: Workshop
) -> None:
    given = {"model": workshop.target_folder(family), "quantization": by}
    plain = run(workshop, SOME, PARAMS, None, enable_prefix_caching=False, **given)
    found = run(workshop, SOME, PARAMS, NGRAM, max_num_batched_tokens=30, **given)
    # Latent attention runs in torch on the CPU.
    assert_same(found, plain, is_exact=family != "deepseek-v3")
    assert sum(x.metrics.num_draft_tokens for x in found) > 0


def assert_same(found: list[RequestOutput], wanted: list[RequestOutput], *, is_exact: bool) -> None:
    """In torch a row's last bits depend on the number of rows, and a last bit may decide between
    two neighbours in e4m3: then a few requests may differ."""
    pairs = list(zip(tokens(found), tokens(wanted), strict=True))
    num_different = sum(x != y for x, y in pairs)
    assert num_different <= (0 if is_exact and has_numba(CPU) else len(pairs) // 3)


def test_rounding_is_what_was_asked_for(workshop: Workshop) -> None:
    wide, channel, block = (
        run(workshop, SOME, PARAMS, None, quantization=x) for x in (None, "fp8", "fp8_per_block")
    )
    same = run(workshop, SOME, PARAMS, None, quantization="fp8_per_channel")
    assert tokens(wide) != tokens(channel)
    assert tokens(channel) != tokens(block)
    assert tokens(same) == tokens(channel)


@pytest.mark.parametrize("is_fixed", [False, True], ids=["compact", "fixed"])
def test_a_checkpoint_in_fp8_gives_the_tokens_of_rounding_it_at_load(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fixed: bool
) -> None:
    if is_fixed:
        monkeypatch.setattr(startup, "CpuPlatform", padded_on_cpu)
    save_large(tmp_path / "plain", "qwen2")
    save_large(tmp_path / "fp8", "qwen2")
    quantise_checkpoint(tmp_path / "fp8", "compressed channels")
    rounded = run(
        workshop, SOME, PARAMS, None, model=str(tmp_path / "plain"), quantization="fp8_per_channel"
    )
    asked = [{}, {"quantization": "fp8"}, {"quantization": "compressed-tensors"}]
    for more in asked[: 1 if is_fixed else 3]:
        stored = run(workshop, SOME, PARAMS, NGRAM, model=str(tmp_path / "fp8"), **more)
        assert_same(stored, rounded, is_exact=not is_fixed)


def test_a_gpu_counts_one_byte_for_each_weight(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "CpuPlatform", padded_on_cpu)
    infos = [tiny_engine(workshop, quantization=x)[1].info for x in (None, "fp8")]
    bytes_of = [x.weights_bytes for x in infos]
    assert infos[1].dtype == "fp8, float32"
    tensors = load_file(Path(workshop.target_folder("llama")) / "model.safetensors")
    matrices = [x for n, x in tensors.items() if "_proj" in n]
    scales = sum(4 * len(x) for x in matrices)
    assert bytes_of[0] - bytes_of[1] == sum(3 * x.numel() for x in matrices) - scales


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "fp8_per_tensor"}, "use one of fp8, fp8_per_channel, fp8_per_block"),
        ({"quantization": "awq"}, "quantization is 'awq'; use one of"),
        (
            {"speculative_config": {**NGRAM, "quantization": "int8"}},
            "quantization is 'int8'; use one of",
        ),
    ],
    ids=str,
)
def test_unknown_names_are_refused_with_the_list(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_keywords(**options)


@pytest.mark.parametrize(
    ("form", "asked", "said"),
    [
        (None, "modelopt", "None"),
        ("compressed channels", "fp8_per_block", "'compressed-tensors'"),
        ("modelopt", "compressed-tensors", "'modelopt'"),
    ],
)
def test_files_that_say_otherwise_are_refused(
    workshop: Workshop, tmp_path: Path, form: str | None, asked: str, said: str
) -> None:
    save_large(tmp_path, "qwen2")
    if form is not None:
        quantise_checkpoint(tmp_path, form)
    with pytest.raises(CheckpointError, match=f"is '{asked}', but the files of .* say {said}"):
        run(workshop, SOME, PARAMS, None, model=str(tmp_path), quantization=asked)
