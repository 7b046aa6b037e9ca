"""Weights come out under Hugging Face names and equal what was written, whatever the file."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from paceline.checkpoint.source import ModelFiles, locate
from paceline.errors import CheckpointError
from paceline.models.weights import open_weights
from tests.checkpoint.gguf_writing import finish, permuted, write_gguf
from tests.tiny import FAMILIES, save_tiny

# What the gguf package can quantise, and how far numbers in (-1, 1) may move by it.
QUANTISED = {
    "F16": 1e-3,
    "BF16": 8e-3,
    "Q8_0": 2e-2,
    "Q5_1": 0.1,
    "Q5_0": 0.2,
    "Q4_1": 0.2,
    "Q4_0": 0.3,
}


def tiny(folder: Path, family: str, **changes: Any) -> Any:
    return save_tiny(folder, family, **changes)


def hf_tensors(model: Any) -> dict[str, torch.Tensor]:
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    return tensors


def assert_holds(files: ModelFiles, expected: dict[str, torch.Tensor]) -> None:
    weights = open_weights(files)
    assert weights.names() == set(expected)
    for name, tensor in expected.items():
        assert weights.shape(name) == tuple(tensor.shape), name
        loaded = weights.load(name)
        assert loaded.dtype == tensor.dtype, name
        assert torch.equal(loaded, tensor), name
    weights.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_safetensors_folder_holds_the_tensors_that_were_saved(
    tmp_path: Path, family: str
) -> None:
    model = tiny(tmp_path, family)
    assert_holds(locate(str(tmp_path)), hf_tensors(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_gives_back_the_tensors_of_the_model_it_was_made_from(
    tmp_path: Path, family: str
) -> None:
    model = tiny(tmp_path / "hf", family)
    write_gguf(tmp_path / "model.gguf", model)
    assert_holds(locate(str(tmp_path / "model.gguf")), hf_tensors(model))


def test_biases_of_a_llama_gguf_are_put_back_in_order_with_their_rows(tmp_path: Path) -> None:
    model = tiny(tmp_path / "hf", "llama", attention_bias=True, mlp_bias=True)
    write_gguf(tmp_path / "model.gguf", model)
    files = locate(str(tmp_path / "model.gguf"))
    assert files.config["attention_bias"] is True
    assert files.config["mlp_bias"] is True
    assert_holds(files, hf_tensors(model))


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_quantised_gguf_is_near_the_model_it_was_made_from(
    tmp_path: Path, family: str, kind: str
) -> None:
    model = tiny(tmp_path / "hf", family, intermediate_size=64, hidden_size=64, head_dim=16)
    write_gguf(tmp_path / "model.gguf", model, kind=kind)
    weights = open_weights(locate(str(tmp_path / "model.gguf")))
    half = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    for name, tensor in hf_tensors(model).items():
        loaded = weights.load(name)
        assert loaded.dtype == (half if tensor.ndim == 2 else torch.float32), name
        scale = float(tensor.abs().max())
        torch.testing.assert_close(
            loaded.float(), tensor, rtol=0, atol=QUANTISED[kind] * scale, msg=name
        )


def dequantisable_types() -> list[str]:
    found = []
    for kind in gguf.GGMLQuantizationType:
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        try:
            gguf.quants.dequantize(block, kind)
        except NotImplementedError:
            continue
        found.append(kind.name)
    return found


@pytest.mark.parametrize("kind", dequantisable_types())
def test_every_type_that_gguf_dequantises_is_loaded_with_its_rows_in_order(
    tmp_path: Path, kind: str
) -> None:
    model = tiny(tmp_path / "hf", "llama", hidden_size=256, num_hidden_layers=1)
    stored = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[stored]
    path = tmp_path / "model.gguf"
    rng = np.random.default_rng(0)
    # 4 heads of 64; random bytes are valid blocks of any type.
    hf_rows = rng.integers(0, 60, (256, 256 // block * block_bytes), np.uint8)
    write_gguf(path, model)
    _replace_tensor(path, "blk.0.attn_q.weight", permuted(hf_rows, 4), stored)
    weights = open_weights(locate(str(path)))
    expected = gguf.quants.dequantize(hf_rows, stored).astype(np.float32)
    loaded = weights.load("model.layers.0.self_attn.q_proj.weight")
    np.testing.assert_array_equal(loaded.float().numpy(), expected)
    assert np.isfinite(expected).all()
    assert np.unique(expected).size > 2


def _replace_tensor(path: Path, name: str, rows: Any, stored: Any) -> None:
    """Write the file again, with other bytes for one tensor."""
    reader = gguf.GGUFReader(path)
    again = path.with_suffix(".again")
    writer = gguf.GGUFWriter(again, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        if tensor.name == name:
            writer.add_tensor(name, rows, raw_dtype=stored)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    finish(writer)
    again.replace(path)


def test_a_tensor_type_that_cannot_be_dequantised_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny(tmp_path / "hf", "llama", num_hidden_layers=1)
    path = tmp_path / "model.gguf"
    write_gguf(path, model)
    integers = np.zeros((32, 32), np.int8)
    _replace_tensor(path, "blk.0.attn_q.weight", integers, gguf.GGMLQuantizationType.I8)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight has type I8"):
        open_weights(locate(str(path)))


def test_a_gguf_tensor_without_a_place_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny(tmp_path / "hf", "llama", num_hidden_layers=1)
    path = tmp_path / "model.gguf"
    write_gguf(path, model)
    reader_bytes = path.read_bytes()
    path.write_bytes(reader_bytes.replace(b"blk.0.ffn_down.weight", b"blk.0.ffn_dawn.weight"))
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_dawn\.weight"):
        open_weights(locate(str(path)))


def test_the_rope_factors_of_a_gguf_can_be_loaded_by_name(tmp_path: Path) -> None:
    model = tiny(tmp_path / "hf", "llama")
    factors = np.linspace(1.0, 3.0, 4, dtype=np.float32)
    write_gguf(tmp_path / "model.gguf", model, rope_factors=factors)
    files = locate(str(tmp_path / "model.gguf"))
    assert files.config["rope_scaling"]["rope_type"] == "gguf_factors"
    loaded = open_weights(files).load("rope_freqs.weight")
    np.testing.assert_array_equal(loaded.numpy(), factors)


def sharded(folder: Path, tensors: dict[str, torch.Tensor], suffix: str) -> None:
    """Two shards and their index, beside the config.json that is already there."""
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"{stem}-0000{number}-of-00002.{suffix}"
        shard = {name: tensors[name].contiguous() for name in part}
        if suffix == "safetensors":
            save_file(shard, folder / file)
        else:
            torch.save(shard, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_sharded_weights_are_read_as_one(tmp_path: Path, suffix: str) -> None:
    tensors = hf_tensors(tiny(tmp_path, "qwen2"))
    sharded(tmp_path, tensors, suffix)
    files = locate(str(tmp_path))
    assert len(files.weight_files) == 2
    assert_holds(files, tensors)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickled_checkpoint_is_read_whichever_way_torch_wrote_it(
    tmp_path: Path, is_zip: bool
) -> None:
    tensors = hf_tensors(tiny(tmp_path, "llama"))
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    assert_holds(locate(str(tmp_path)), tensors)


class _Payload:
    def __reduce__(self) -> Any:
        return (print, ("code ran",))


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    torch.save({"x": _Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="runs no code"):
        open_weights(locate(str(tmp_path)))
    assert "code ran" not in capsys.readouterr().out


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    torch.save([torch.zeros(1)], tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds a list"):
        open_weights(locate(str(tmp_path)))


@pytest.mark.parametrize("keep", [0, 4, 200, 0.5, 0.999])
@pytest.mark.parametrize("kind", ["safetensors", "bin", "gguf"])
def test_a_truncated_weight_file_is_named_with_what_is_wrong(
    tmp_path: Path, kind: str, keep: float
) -> None:
    model = tiny(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    if kind == "bin":
        path.unlink()
        path = tmp_path / "pytorch_model.bin"
        torch.save(hf_tensors(model), path)
    elif kind == "gguf":
        path = tmp_path / "model.gguf"
        write_gguf(path, model)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep if keep > 1 else keep * len(whole))])
    source = str(path if kind == "gguf" else tmp_path)
    with pytest.raises(CheckpointError) as caught:
        open_weights(locate(source))
    assert path.name in str(caught.value)
    assert "again" in str(caught.value)


def test_a_safetensors_header_of_nonsense_is_named(tmp_path: Path) -> None:
    tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 4096)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*damaged safetensors"):
        open_weights(locate(str(tmp_path)))


def test_a_pickle_of_nonsense_is_named(tmp_path: Path) -> None:
    tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1})[:-3])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        open_weights(locate(str(tmp_path)))


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_an_unknown_tensor_name_gets_the_nearest_one(tmp_path: Path, kind: str) -> None:
    model = tiny(tmp_path, "llama")
    write_gguf(tmp_path / "model.gguf", model)
    files = locate(str(tmp_path / "model.gguf" if kind == "gguf" else tmp_path))
    with pytest.raises(CheckpointError, match=r"Did you mean 'model\.norm\.weight'"):
        open_weights(files).load("model.morm.weight")


def test_weights_that_were_not_located_are_not_opened(tmp_path: Path) -> None:
    tiny(tmp_path, "llama")
    files = locate(str(tmp_path), load_format="dummy")
    assert files.weight_files == []
    with pytest.raises(CheckpointError, match="without weights"):
        open_weights(files, "dummy")


def test_tensors_outlive_the_files_they_came_from(tmp_path: Path) -> None:
    model = tiny(tmp_path, "llama")
    weights = open_weights(locate(str(tmp_path)))
    loaded = weights.load("model.norm.weight")
    weights.close()
    assert torch.equal(loaded, model.state_dict()["model.norm.weight"])
