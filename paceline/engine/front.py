"""What the front needs of a model: tokenizer, end-of-sequence ids, default sampling.

Reads small files only. Never imports torch and never talks to the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.source import ModelFiles, locate, read_json
from paceline.config import EngineConfig
from paceline.errors import ConfigError, InvalidRequest
from paceline.request import SamplingParams
from paceline.text.tokenizer import Tokenizer, load_tokenizer

# generation_config.json -> SamplingParams. Other fields of that file are for transformers.
_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class Front:
    """The text side of a model. `tokenizer` is None under skip_tokenizer_init."""

    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    text_files: ModelFiles | None = None  # the files of the tokenizer and the chat template


def load_front(config: EngineConfig) -> Front:
    """Find the model's files and read them."""
    model = config.model
    files = locate(
        model.model, revision=model.revision, load_format=model.load_format, with_weights=False
    )
    text_files = files if model.tokenizer is None else locate(model.tokenizer, with_weights=False)
    tokenizer = None if model.skip_tokenizer_init else load_tokenizer(text_files)
    return Front(
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids(files, tokenizer),
        default_sampling=default_sampling(config, files),
        text_files=text_files,
    )


def eos_token_ids(files: ModelFiles, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids of generation_config.json and config.json; the tokenizer's if neither has any.

    The two files often differ: an instruct model adds its end-of-turn token to the first only. Each
    of their tokens ends a text.
    """
    text_config = files.config.get("text_config") or {}
    sources = (
        files.generation_config.get("eos_token_id"),
        files.config.get("eos_token_id"),
        text_config.get("eos_token_id"),
    )
    ids = dict.fromkeys(i for source in sources for i in _as_ids(source))
    if not ids and tokenizer is not None and tokenizer.eos_token_id is not None:
        return (tokenizer.eos_token_id,)
    return tuple(ids)


def default_sampling(config: EngineConfig, files: ModelFiles) -> dict[str, Any]:
    """Defaults for requests: `generation_config` is auto, vllm (no defaults) or a folder."""
    source = config.model.generation_config
    if source in ("vllm", "none"):
        return {}
    if source == "auto":
        values, where = files.generation_config, f"the generation config of {files.name}"
    else:
        path = Path(source).expanduser() / "generation_config.json"
        if not path.is_file():
            raise ConfigError(
                f"generation_config is {source!r}, but {path} is not a file. "
                "Use auto, vllm or a folder that holds one."
            )
        values, where = read_json(path), str(path)
    chosen = {
        ours: values[theirs] for theirs, ours in _DEFAULTS.items() if values.get(theirs) is not None
    }
    try:
        SamplingParams(**chosen)
    except InvalidRequest as error:
        raise ConfigError(
            f"{where} has a default that cannot be used: {error} Use --generation-config vllm "
            "to ignore it."
        ) from None
    return chosen


def _as_ids(value: Any) -> Iterable[int]:
    if value is None:
        return ()
    return [int(i) for i in value] if isinstance(value, list) else [int(value)]
