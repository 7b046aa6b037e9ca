"""Models are found in folders of every layout, and what is missing is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.checkpoint.source import locate
from paceline.errors import CheckpointError
from tests.checkpoint.gguf_writing import write_gguf
from tests.tiny import save_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config and empty weight files: what `locate` sees, without any weights."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def test_a_folder_with_one_safetensors_file(folder: Path) -> None:
    (folder / "model.safetensors").touch()
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    files = locate(str(folder))
    assert files.kind == "hf"
    assert files.weight_files == [folder / "model.safetensors"]
    assert files.config == {"model_type": "llama"}
    assert files.generation_config == {"eos_token_id": [1, 2]}
    assert files.name == str(folder)


def test_safetensors_are_preferred_and_the_load_format_decides(folder: Path) -> None:
    (folder / "model.safetensors").touch()
    (folder / "pytorch_model.bin").touch()
    assert locate(str(folder)).weight_files[0].name == "model.safetensors"
    assert locate(str(folder), load_format="pt").weight_files[0].name == "pytorch_model.bin"


def test_a_format_that_is_not_there_is_refused_with_what_is(folder: Path) -> None:
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"'safetensors'.*It holds: config.json, pytorch_mo"):
        locate(str(folder), load_format="safetensors")


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"lists 2 shards, 1 of which.*model-2\.safetensors"):
        locate(str(folder))


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors"])
def test_an_index_cannot_point_out_of_its_folder(folder: Path, shard: str) -> None:
    index = {"weight_map": {"a": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a file name"):
        locate(str(folder))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_a_broken_index_is_named(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        locate(str(folder))


def test_a_broken_config_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{'single': quotes}")
    (folder / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        locate(str(folder))


def test_infinities_in_a_config_are_numbers(folder: Path) -> None:
    (folder / "config.json").write_text('{"time_step_limit": [0, {"__float__": "Infinity"}]}')
    files = locate(str(folder), with_weights=False)
    assert files.config["time_step_limit"] == [0, float("inf")]


def test_dummy_weights_need_a_config_alone(folder: Path) -> None:
    assert locate(str(folder), load_format="dummy").weight_files == []
    with pytest.raises(CheckpointError, match="no weights"):
        locate(str(folder))


def test_a_folder_that_is_no_model_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    with pytest.raises(CheckpointError, match=r"no config\.json.*It holds: README\.md"):
        locate(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="It holds: nothing"):
        locate(str(tmp_path / "empty"))


def test_a_folder_with_only_a_tokenizer_serves_text(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert locate(str(tmp_path), with_weights=False).config == {}
    for load_format in ("auto", "dummy"):
        with pytest.raises(CheckpointError, match=r"no config\.json"):
            locate(str(tmp_path), load_format=load_format)


def test_a_gguf_is_found_by_its_path_or_alone_in_its_folder(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "llama")
    folder = tmp_path / "gguf"
    folder.mkdir()
    write_gguf(folder / "a.gguf", model)
    for source in (folder / "a.gguf", folder):
        files = locate(str(source))
        assert files.kind == "gguf"
        assert files.gguf == folder / "a.gguf"
        assert files.weight_files == [folder / "a.gguf"]
    write_gguf(folder / "b.gguf", model)
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(a\.gguf, b\.gguf\)"):
        locate(str(folder))


def test_a_gguf_beside_a_checkpoint_is_taken_only_when_asked_for(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "llama")
    write_gguf(tmp_path / "a.gguf", model)
    assert locate(str(tmp_path)).kind == "hf"
    assert locate(str(tmp_path), load_format="gguf").kind == "gguf"
    with pytest.raises(CheckpointError, match="cannot be loaded as pt"):
        locate(str(tmp_path / "a.gguf"), load_format="pt")


@pytest.mark.parametrize("name", ["no/such/folder/here", "./missing", "missing.gguf", "a b/c"])
def test_a_path_that_is_not_there_is_not_taken_for_a_hub_id(name: str) -> None:
    with pytest.raises(CheckpointError, match="is not a file or folder"):
        locate(name)


def test_a_name_without_an_owner_gets_the_form_of_a_hub_id() -> None:
    with pytest.raises(CheckpointError, match="owner/name"):
        locate("gpt2-that-is-not-here")


def test_a_revision_is_for_hub_ids_only(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="--revision is for hub ids"):
        locate(str(folder), revision="main")
