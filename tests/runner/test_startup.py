"""Start-up refuses what cannot work, with the numbers, before it reads weights."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.commands.doctor import Report, _hardware
from paceline.config import EngineConfig
from paceline.errors import CheckpointError, ConfigError
from paceline.observe.memory import HostMemory
from paceline.runner.startup import build_runner
from paceline.step import Runner
from tests.eagle import random_head, save_head
from tests.eagle3 import random_eagle3, save_eagle3
from tests.mtp import random_mtp, save_mtp
from tests.tiny import VOCAB, save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("startup")
    target = save_tiny(path / "target", "llama")
    head = random_head(target)
    save_eagle3(path / "head3", random_eagle3(target))
    save_mtp(path / "target_mtp", path / "target", random_mtp(target))
    save_head(path / "head", head)
    save_head(path / "wide_head", replace(head, config={**head.config, "hidden_size": 64}))
    save_tiny(path / "other_vocabulary", "llama", vocab_size=VOCAB + 8)
    save_tiny(path / "short", "llama", max_position_embeddings=64)
    return path


def build(folder: Path, **options: Any) -> Runner:
    defaults = {"model": str(folder / "target"), "max_num_seqs": 4, "cpu_threads": 1}
    config = EngineConfig.from_keywords(**{**defaults, **options})
    runner = build_runner(config, lambda name, share: None)
    runner.close()
    return runner


def draft(folder: Path, name: str) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(folder / name), "num_speculative_tokens": 3}


def test_a_draft_model_with_another_vocabulary_is_refused_with_both_sizes(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{VOCAB + 8} tokens, the target has {VOCAB}"):
        build(folder, speculative_config=draft(folder, "other_vocabulary"))


def test_a_shorter_draft_limits_the_drafts_and_not_the_target(folder: Path) -> None:
    info = build(folder, speculative_config=draft(folder, "short")).info
    assert (info.max_model_len, info.draft_max_len) == (256, 64)
    with pytest.raises(ConfigError, match="max_model_len 300 is more than the 256 positions"):
        build(folder, speculative_config=draft(folder, "short"), max_model_len=300)


@pytest.mark.trap("I23")
def test_draft_kv_is_counted_in_the_cache_sizing(folder: Path) -> None:
    options = {"kv_cache_memory_bytes": 1 << 19, "max_num_seqs": 64}
    plain = build(folder, **options).info
    drafted = build(folder, **options, speculative_config=draft(folder, "target")).info
    assert plain.num_pages >= 2 * drafted.num_pages > 0
    assert drafted.draft_lookahead == 3
    assert drafted.kv_cache_bytes <= 1 << 19


@pytest.mark.parametrize(("method", "num_vectors"), [("eagle", 1), ("eagle3", 3)])
def test_features_of_late_rows_are_counted_in_the_cache_sizing(
    folder: Path, method: str, num_vectors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a head may put off is in the host's memory too."""
    available = 1 << 21
    monkeypatch.setattr(
        "paceline.runner.platform_cpu.host_memory", lambda: HostMemory(1 << 30, available)
    )
    head = folder / ("head" if method == "eagle" else "head3")
    speculative = {"method": method, "model": str(head), "num_speculative_tokens": 3}
    info = build(folder, max_num_seqs=256, speculative_config=speculative).info
    hidden_size = json.loads((folder / "target" / "config.json").read_text())["hidden_size"]
    late = 256 * info.max_late_drafter_rows * num_vectors * hidden_size * 4
    assert late > 0
    token_bytes = info.kv_cache_bytes // (info.num_pages * info.page_size)
    left = (available - late) // 2 - info.kv_cache_bytes
    assert 0 <= left <= 2 * info.page_size * token_bytes  # a page is padding


def eagle(folder: Path, name: str = "head") -> dict[str, Any]:
    return {"method": "eagle", "model": str(folder / name), "num_speculative_tokens": 3}


def test_an_eagle_head_adds_its_layer_and_limits_no_length(folder: Path) -> None:
    """Two layers of the target, one of the head with half the KV heads; K - 1 positions ahead."""
    options = {"kv_cache_memory_bytes": 1 << 18, "max_num_seqs": 64}
    plain = build(folder, **options).info
    drafted = build(folder, **options, speculative_config=eagle(folder)).info
    assert drafted.num_pages == (plain.num_pages + 1) * 4 // 5 - 1
    assert (drafted.draft_lookahead, drafted.draft_reads_features) == (2, True)
    assert not plain.draft_reads_features
    assert drafted.max_model_len == 256  # the head says 8


def test_every_head_adds_its_layer_to_the_cache_and_none_limits_the_length(folder: Path) -> None:
    """Two layers of the target; those of these heads are as wide as one of them."""
    options = {"kv_cache_memory_bytes": 1 << 18, "max_num_seqs": 64}
    plain = build(folder, **options).info
    model = str(folder / "target_mtp")
    own = build(folder, **options, model=model, speculative_config=mtp()).info
    spec = {**eagle(folder, "head3"), "method": "eagle3"}
    for drafted in (build(folder, **options, speculative_config=spec).info, own):
        assert drafted.num_pages == (plain.num_pages + 1) * 2 // 3 - 1
        assert (drafted.draft_lookahead, drafted.draft_reads_features) == (2, True)
        assert drafted.max_model_len == 256


def mtp() -> dict[str, Any]:
    return {"method": "deepseek_mtp", "num_speculative_tokens": 3}


def test_a_heads_own_config_tells_its_method(folder: Path) -> None:
    """Its folder's name says nothing; a method that was given is not put right in silence."""
    spec = eagle(folder, "head3")
    del spec["method"]
    assert build(folder, speculative_config=spec).info.draft_reads_features
    for method in ("eagle", "draft_model"):
        with pytest.raises(CheckpointError, match='EAGLE-3 head: give "method": "eagle3"'):
            build(folder, speculative_config={**spec, "method": method})


def test_taps_may_be_given(folder: Path) -> None:
    spec = {**eagle(folder, "head3"), "method": "eagle3"}
    spec["eagle_aux_hidden_state_layer_ids"] = [2, 1, 0]
    assert build(folder, speculative_config=spec).info.max_k == 3
    spec["eagle_aux_hidden_state_layer_ids"] = [2, 1, 1]
    with pytest.raises(CheckpointError, match=r"after layers \[2, 1, 1\] \(asked for\)"):
        build(folder, speculative_config=spec)


def test_a_target_without_an_mtp_layer_is_refused_before_weights_are_read(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no MTP layer: its config.json says"):
        build(folder, speculative_config=mtp(), load_format="dummy")
    info = build(
        folder,
        model=str(folder / "target_mtp"),
        speculative_config=mtp(),
        load_format="dummy",
    ).info
    assert info.max_k == 3


def test_an_eagle_head_of_another_size_is_refused_before_weights_are_read(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="hidden size of 64, the target has 32"):
        build(folder, speculative_config=eagle(folder, "wide_head"))


def test_an_error_says_which_of_two_checkpoints_is_meant(folder: Path, tmp_path: Path) -> None:
    """What is wrong with the draft is not looked for in the target."""
    shutil.copytree(folder / "head", tmp_path / "odd")
    config = json.loads((folder / "head" / "config.json").read_text())
    changed = {**config, "rope_scaling": {"type": "odd"}}
    (tmp_path / "odd" / "config.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=r"/odd: rope type 'odd' is not supported"):
        build(folder, speculative_config=eagle(tmp_path, "odd"))
    with pytest.raises(CheckpointError, match=r"/head: .* no tensor .* It is an EAGLE head"):
        build(folder, speculative_config=draft(folder, "head"))


def test_a_load_format_is_the_targets_own(folder: Path) -> None:
    """The target is safetensors, the head a pickle; dummy weights read neither."""
    for load_format in ("safetensors", "dummy"):
        info = build(folder, speculative_config=eagle(folder), load_format=load_format).info
        assert info.max_k == 3


def test_without_max_model_len_the_cache_decides_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        info = build(folder, kv_cache_memory_bytes=1 << 16).info
    assert 16 <= info.max_model_len < 256
    assert f"max_model_len is {info.max_model_len}" in caplog.text
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        build(folder, kv_cache_memory_bytes=1 << 16, max_model_len=256)


def test_the_cache_is_sized_by_the_memory_that_doctor_reports(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by what is free: a warm page cache leaves next to nothing of that."""
    available = 1 << 17
    memory = HostMemory(total=1 << 30, available=available)
    for module in ("runner.platform_cpu", "commands.doctor"):
        monkeypatch.setattr(f"paceline.{module}.host_memory", lambda: memory)
    info = build(folder, max_num_seqs=64).info
    assert available // 4 < info.kv_cache_bytes <= available // 2
    report = Report(is_shown=False)
    _hardware(report, {})
    text = f"1.0 GiB memory, {available / (1 << 30):.1f} GiB available"
    assert text in [finding.text for finding in report.findings]
    with pytest.raises(ConfigError, match=rf"more than the {available} bytes"):
        build(folder, kv_cache_memory_bytes=1 << 20)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu_is_an_error_that_says_what_to_do(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no usable NVIDIA GPU here; use --device cpu"):
        build(folder, device="cuda")


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_every_dtype_loads(folder: Path, dtype: str) -> None:
    is_exact = build(folder, dtype=dtype).info.dtype == "float32"
    assert is_exact == (dtype in ("auto", "float32"))  # the checkpoint itself is fp32
