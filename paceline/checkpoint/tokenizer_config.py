"""Tokenizer settings of a checkpoint: special tokens, begin and end of text, chat templates.

The same type for Hugging Face folders and GGUF files. Builds no tokenizer and renders nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.gguf_file import GgufFile
from paceline.checkpoint.source import ModelFiles, read_json
from paceline.errors import CheckpointError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_GGUF_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


@dataclass(frozen=True)
class TokenizerConfig:
    """`add_bos` and `add_eos` are None if tokenizer.json decides."""

    named: dict[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>"
    add_bos: bool | None = None
    add_eos: bool | None = None
    templates: dict[str, str] = field(default_factory=dict)  # "default" and others by name
    # How to read answers, in the form of transformers' `utils.chat_parsing`.
    response_template: dict[str, Any] | None = None
    # id -> (text, special), as in tokenizer_config.json's added_tokens_decoder
    added: dict[int, tuple[str, bool]] = field(default_factory=dict)


def read_tokenizer_config(files: ModelFiles) -> TokenizerConfig:
    if files.gguf is not None:
        return config_of_gguf(GgufFile(files.gguf))
    return config_of_folder(files.folder)


def config_of_gguf(file: GgufFile) -> TokenizerConfig:
    tokens = file.get("tokenizer.ggml.tokens") or []
    named = {}
    for hf, gguf in _GGUF_NAMES.items():
        token_id = file.get(f"tokenizer.ggml.{gguf}_token_id")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise CheckpointError(
                f"{file.path}: {gguf}_token_id is {token_id}, but there are {len(tokens)} tokens."
            )
        named[f"{hf}_token"] = tokens[token_id]
    templates = {}
    for key in file:
        if key == "tokenizer.chat_template":
            templates["default"] = str(file[key])
        elif key.startswith("tokenizer.chat_template."):
            templates[key.removeprefix("tokenizer.chat_template.")] = str(file[key])
    return TokenizerConfig(
        named=named,
        add_bos=file.get("tokenizer.ggml.add_bos_token"),
        add_eos=file.get("tokenizer.ggml.add_eos_token"),
        templates=templates,
    )


def config_of_folder(folder: Path) -> TokenizerConfig:
    config = read_json(folder / "tokenizer_config.json", optional=True)
    mapped = read_json(folder / "special_tokens_map.json", optional=True)
    named = {}
    for name in NAMED_TOKENS:
        text = _content(config.get(name)) or _content(mapped.get(name))
        if text is not None:
            named[name] = text
    added = {
        int(token_id): (str(entry["content"]), bool(entry.get("special", False)))
        for token_id, entry in (config.get("added_tokens_decoder") or {}).items()
    }
    return TokenizerConfig(
        named=named,
        add_bos=config.get("add_bos_token"),
        add_eos=config.get("add_eos_token"),
        templates=_templates(folder, config),
        response_template=_response_template(config.get("response_template")),
        added=added,
    )


def _content(token: Any) -> str | None:
    """Tokens are stored as text or as an object with a content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _response_template(value: Any) -> dict[str, Any] | None:
    fields = value.get("fields") if isinstance(value, dict) else None
    is_usable = isinstance(fields, dict) and all(isinstance(f, dict) for f in fields.values())
    return value if is_usable else None


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    stored = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(stored, str):
        templates["default"] = stored
    elif isinstance(stored, list):
        templates = {str(entry["name"]): str(entry["template"]) for entry in stored}
    # Template files win over the config: newer tools write them.
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    alone = folder / "chat_template.jinja"
    if alone.exists():
        templates["default"] = alone.read_text(encoding="utf-8")
    return templates
