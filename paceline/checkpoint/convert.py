"""Converts a GGUF to a Hugging Face checkpoint folder that transformers can load.

Needs no torch: numpy rounds the numbers, and tensors are written one by one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.checkpoint.gguf_names import ROPE_FACTORS
from paceline.checkpoint.gguf_weights import GgufWeights
from paceline.checkpoint.source import ModelFiles, locate
from paceline.checkpoint.tokenizer_config import TokenizerConfig
from paceline.checkpoint.tokenizer_files import load_backend
from paceline.errors import CheckpointError, ConfigError, nearest
from paceline.observe.progress import OnProgress

MAX_SHARD_BYTES = 5_000_000_000
# dtype -> (safetensors name, bytes of a number)
_DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}
_INDEX = "model.safetensors.index.json"


def convert_gguf(
    gguf: str | Path,
    folder: str | Path,
    dtype: str = "float16",
    *,
    progress: OnProgress | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Write `folder` (which must not exist or be empty) and return its files.

    `progress` gets a tensor's name and the share of the work that is done. If it fails, nothing is
    left behind: everything is written next to `folder` first and then moved.
    """
    if dtype not in _DTYPES:
        hint = nearest(dtype, _DTYPES)
        raise ConfigError(f"dtype is {dtype!r}; use one of {', '.join(_DTYPES)}.{hint}")
    source, target = Path(gguf).expanduser(), Path(folder).expanduser().absolute()
    if not source.is_file():
        raise CheckpointError(f"{source} is not a file; give the path of a GGUF file.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not an empty folder; give a new one.")
    files = locate(str(source), load_format="gguf")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as partial:
            written = Path(partial) / "whole"
            written.mkdir()
            _write_configs(files, written, dtype)
            _write_tokenizer(files, written)
            _write_weights(files, written, dtype, progress, max_shard_bytes)
            if target.exists():
                target.rmdir()
            shutil.move(written, target)
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error.strerror or error}. Free some space or give "
            "another folder. No partial output was kept."
        ) from None
    return sorted(target.iterdir())


def _write_configs(files: ModelFiles, folder: Path, dtype: str) -> None:
    config = {**files.config, "torch_dtype": dtype}
    scaling = config.get("rope_scaling")
    if scaling is not None and scaling["rope_type"] == "gguf_factors":
        # With equal tables for short and long texts, transformers' longrope is a plain table.
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": scaling["factors"],
            "long_factor": scaling["factors"],
            "attention_factor": 1.0,
            "factor": 1.0,
        }
        config["original_max_position_embeddings"] = config["max_position_embeddings"]
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", files.generation_config)


def _write_tokenizer(files: ModelFiles, folder: Path) -> None:
    tokenizer, config = load_backend(files)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(files, config))


def _tokenizer_config(files: ModelFiles, config: TokenizerConfig) -> dict[str, Any]:
    written: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": files.config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **config.named,
    }
    if set(config.templates) == {"default"}:
        written["chat_template"] = config.templates["default"]
    elif config.templates:
        written["chat_template"] = [
            {"name": name, "template": text} for name, text in sorted(config.templates.items())
        ]
    return written


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(
    files: ModelFiles,
    folder: Path,
    dtype: str,
    progress: OnProgress | None,
    max_shard_bytes: int,
) -> None:
    assert files.gguf is not None
    weights = GgufWeights(files.gguf, files.config)
    names = sorted(weights.names() - {ROPE_FACTORS})
    shards = list(_shards(weights, names, dtype, max_shard_bytes))
    weight_map = {}
    num_done = 0
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with (folder / name).open("wb") as file:
            file.write(_header(weights, shard, dtype))
            for tensor in shard:
                file.write(_rounded(files.gguf, tensor, weights.load(tensor), dtype))
                weight_map[tensor] = name
                num_done += 1
                if progress:
                    progress(tensor, num_done / len(names))
    if len(shards) > 1:
        total = sum(_num_bytes(weights, name, dtype) for name in names)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / _INDEX, index)


def _shards(
    weights: GgufWeights, names: list[str], dtype: str, max_bytes: int
) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for name in names:
        num_bytes = _num_bytes(weights, name, dtype)
        if shard and size + num_bytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += num_bytes
    yield shard


def _num_bytes(weights: GgufWeights, name: str, dtype: str) -> int:
    return int(np.prod(weights.shape(name))) * _DTYPES[dtype][1]


def _header(weights: GgufWeights, names: list[str], dtype: str) -> bytes:
    """The safetensors header: its length, then JSON with the offsets of each tensor."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        end = at + _num_bytes(weights, name, dtype)
        entries[name] = {
            "dtype": _DTYPES[dtype][0],
            "shape": list(weights.shape(name)),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data after it must be aligned to eight bytes
    return len(text).to_bytes(8, "little") + text


def _rounded(path: Path, name: str, values: npt.NDArray[Any], dtype: str) -> bytes:
    """The bytes of the numbers in `dtype`, rounded to nearest even."""
    if dtype == "float32":
        return values.astype("<f4").tobytes()
    if dtype == "float16":
        with np.errstate(over="ignore"):
            half = values.astype("<f2")
        if not np.isfinite(half).all() and np.isfinite(values).all():
            raise CheckpointError(
                f"{path}: {name} has values up to {np.abs(values).max():.3g}, beyond float16's "
                "65504; convert with --dtype bfloat16 or float32."
            )
        return half.tobytes()
    # bfloat16 is the upper half of a float32: add half a unit before cutting, ties to even.
    bits = np.ascontiguousarray(values, "<f4").view("<u4").astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = np.where(np.isnan(values).reshape(rounded.shape), 0x7FC0, rounded)
    return rounded.astype("<u2").tobytes()
