"""Finds a model: a folder, a GGUF file, a hub id or the default. Reads configs, never weights.

The result has the same form for every source: files on this disk and Hugging Face config keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.checkpoint import default_model, hub
from paceline.checkpoint.gguf_config import config_from_gguf, generation_config_from_gguf
from paceline.checkpoint.gguf_file import GgufFile
from paceline.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# Load format -> (single file, index of shards), in the order of preference.
_LAYOUTS = {
    "safetensors": ("model.safetensors", "model.safetensors.index.json"),
    "pt": ("pytorch_model.bin", "pytorch_model.bin.index.json"),
}


@dataclass(frozen=True)
class ModelFiles:
    """A model on this disk. `config` has the keys of config.json, for a GGUF too."""

    name: str
    kind: Literal["hf", "gguf"]
    folder: Path
    gguf: Path | None
    weight_files: list[Path]
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)


def locate(
    model: str,
    *,
    revision: str | None = None,
    load_format: str = "auto",
    with_weights: bool = True,
) -> ModelFiles:
    """Find `model` ("" is the default model), and fetch it if it is not on this disk.

    Without weights only the small files are fetched; tokenizers and dummy weights need no more.
    """
    with_weights = with_weights and load_format != "dummy"
    if not model:
        path = default_model.fetch_default_model()
        found = _from_gguf(default_model.NAME, path, load_format)
        return replace(found, generation_config=found.generation_config | default_model.SAMPLING)
    path = Path(model).expanduser()
    if path.is_file() or path.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"revision {revision!r} was given for {model}, which is on this disk; --revision "
                "is for hub ids."
            )
        if path.is_file():
            return _from_gguf(model, path, load_format)
        return _from_folder(model, path, load_format, with_weights)
    if not _HUB_ID.fullmatch(model) or model.endswith(".gguf"):
        raise CheckpointError(
            f"{model} is not a file or folder, and not a hub id (owner/name) either."
        )
    if "/" not in model:
        raise CheckpointError(
            f"{model!r} is not a file or folder. A hub id has the form owner/name, as in "
            "HuggingFaceTB/SmolLM2-135M-Instruct."
        )
    return _from_hub(model, revision, load_format, with_weights)


def _from_hub(
    repo_id: str, revision: str | None, load_format: str, with_weights: bool
) -> ModelFiles:
    got = hub.fetch(repo_id, revision, lambda names: _wanted(names, load_format, with_weights))
    try:
        return _from_folder(repo_id, got.folder, load_format, with_weights)
    except CheckpointError as error:
        if got.offline is None:
            raise
        raise CheckpointError(
            f"{repo_id} is only partly in the cache and the hub cannot be asked: {got.offline}. "
            f"{error} {hub.remedy(repo_id)}"
        ) from None


def _from_gguf(name: str, path: Path, load_format: str) -> ModelFiles:
    if load_format not in ("auto", "gguf", "dummy"):
        raise CheckpointError(
            f"{path} cannot be loaded as {load_format}; leave --load-format out for a GGUF."
        )
    file = GgufFile(path)
    return ModelFiles(
        name=name,
        kind="gguf",
        folder=path.parent,
        gguf=path,
        weight_files=[] if load_format == "dummy" else [path],
        config=config_from_gguf(file),
        generation_config=generation_config_from_gguf(file),
    )


def _from_folder(name: str, folder: Path, load_format: str, with_weights: bool) -> ModelFiles:
    names = [p.name for p in folder.iterdir()]
    if load_format == "gguf" or ("config.json" not in names and _ggufs(names)):
        return _from_gguf(name, folder / _only_gguf(str(folder), names), load_format)
    tokenizer_only = not with_weights and load_format != "dummy" and "tokenizer.json" in names
    if "config.json" not in names and not tokenizer_only:
        raise CheckpointError(
            f"{folder} holds no config.json and no .gguf file, so it is not a model. It holds: "
            f"{_shown(names)}."
        )
    return ModelFiles(
        name=name,
        kind="hf",
        folder=folder,
        gguf=None,
        weight_files=_weight_files(folder, names, load_format) if with_weights else [],
        config=_flat(_config(folder, optional=tokenizer_only)),
        generation_config=read_json(folder / "generation_config.json", optional=True),
    )


def _config(folder: Path, *, optional: bool) -> dict[str, Any]:
    """config.json. modelopt may say in a second file how it has quantised the checkpoint."""
    config = read_json(folder / "config.json", optional=optional)
    quantised = read_json(folder / "hf_quant_config.json", optional=True).get("quantization")
    if not isinstance(quantised, dict) or config.get("quantization_config"):
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt", **quantised}}


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the text part of a model that also reads images, with the names of a model
    for text alone. What describes the whole checkpoint stays, such as its architecture."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    whole = {k: config[k] for k in ("architectures", "quantization_config") if config.get(k)}
    return {**config, **{k: v for k, v in text.items() if v is not None}, **whole}


def _ggufs(names: Iterable[str]) -> list[str]:
    return sorted(n for n in names if n.endswith(".gguf"))


def _only_gguf(where: str, names: Iterable[str]) -> str:
    found = _ggufs(names)
    if len(found) == 1:
        return found[0]
    if not found:
        raise CheckpointError(f"{where} holds no .gguf file. It holds: {_shown(names)}.")
    raise CheckpointError(
        f"{where} holds {len(found)} GGUF files ({', '.join(found[:4])}"
        f"{' ...' if len(found) > 4 else ''}); give the path of one of them."
    )


def _weight_files(folder: Path, names: list[str], load_format: str) -> list[Path]:
    for layout in _layouts(load_format):
        single, index = _LAYOUTS[layout]
        if index in names:
            return [folder / shard for shard in _shards(folder / index)]
        if single in names:
            return [folder / single]
    tried = ", ".join(n for layout in _layouts(load_format) for n in _LAYOUTS[layout])
    raise CheckpointError(
        f"{folder} holds no weights that load format {load_format!r} can read (looked for "
        f"{tried}). It holds: {_shown(names)}."
    )


def _layouts(load_format: str) -> list[str]:
    return list(_LAYOUTS) if load_format == "auto" else [load_format]


def _shards(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map, so its shards are unknown.")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        # The index is untrusted: it must not point outside of its folder.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index} names the shard {shard!r}, which is not a file name.")
    missing = [s for s in shards if not (index.parent / s).exists()]
    if missing:
        raise CheckpointError(
            f"{index} lists {len(shards)} shards, {len(missing)} of which are missing: "
            f"{_shown(missing)}. Fetch them again."
        )
    return shards


def _wanted(names: list[str], load_format: str, with_weights: bool) -> list[str]:
    """The files of a hub repository to fetch: the small ones, and one set of weights."""
    top = [n for n in names if "/" not in n]
    small = [n for n in top if n.endswith((".json", ".jinja", ".txt", ".model"))]
    if load_format == "gguf" or ("config.json" not in top and _ggufs(top)):
        # Config and tokenizer are inside the GGUF, so it is needed even without weights.
        return [*small, _only_gguf("the repository", top)]
    if not with_weights:
        return small
    for layout in _layouts(load_format):
        suffix = Path(_LAYOUTS[layout][0]).suffix
        weights = [n for n in top if n.endswith(suffix)]
        if weights:
            stem = _LAYOUTS[layout][0].removesuffix(suffix)
            # Other files with this suffix are second copies (consolidated.*) or optimizer states.
            return small + [n for n in weights if n.startswith(stem)]
    return small


def _shown(names: Iterable[str]) -> str:
    ordered = sorted(names)
    text = ", ".join(ordered[:8]) or "nothing"
    return f"{text} and {len(ordered) - 8} more" if len(ordered) > 8 else text


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """A JSON object from a checkpoint; {} if it is optional and missing."""
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=_plain_float)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object.")
    return value


def _plain_float(value: dict[str, Any]) -> Any:
    # transformers 5 writes infinities as {"__float__": "Infinity"}.
    return float(value["__float__"]) if set(value) == {"__float__"} else value
