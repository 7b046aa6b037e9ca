"""Reads prompts: a text file with one prompt per line, or JSONL."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.request import SamplingParams

# Key in a line of JSONL -> field of PromptRecord.
SOURCES = {"prompt": "text", "prompt_token_ids": "token_ids", "messages": "messages"}


@dataclass(frozen=True)
class PromptRecord:
    """One of text, token_ids and messages is set. `sampling` has the parameters of its line."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    id: str | int | None = None

    def as_message(self) -> PromptRecord:
        """Text as a message of the user, for the chat template."""
        if self.text is None:
            return self
        return replace(self, text=None, messages=[{"role": "user", "content": self.text}])


def read_prompts(path: str | None) -> list[PromptRecord]:
    """All prompts of a file; None or "-" is standard input. Errors give the line number."""
    name = "stdin" if path in (None, "-") else str(path)
    text = sys.stdin.read() if path in (None, "-") else read_text(str(path))
    lines = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"{name} holds no prompts; write one per line, or JSONL.")
    if _is_object(lines[0][1]):
        found = [(f"{name}:{i}", line) for i, line in lines]
        return [prompt_from(where, json_object(where, line)) for where, line in found]
    return [PromptRecord(text=line.rstrip("\r")) for _, line in lines]


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error.reason}).") from None


def _is_object(line: str) -> bool:
    """Whether the line is a JSON object with one of the keys of a prompt."""
    try:
        value = json.loads(line)
    except ValueError:
        return False
    return isinstance(value, dict) and any(key in value for key in SOURCES)


def json_object(where: str, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: each line must be a JSON object.")
    return value


def prompt_from(where: str, value: Mapping[str, Any]) -> PromptRecord:
    """A prompt from its JSON object. Keys that are no prompt are sampling parameters."""
    given = [key for key in SOURCES if value.get(key) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise ConfigError(f"{where}: give one of {', '.join(SOURCES)}; found {found}.")
    source = given[0]
    content = value[source]
    _check_content(where, source, content)
    sampling = {k: v for k, v in value.items() if k not in (*SOURCES, "id")}
    try:
        SamplingParams(**sampling)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from None
    source_field: Any = {SOURCES[source]: content}
    return PromptRecord(**source_field, sampling=sampling, id=value.get("id"))


def _check_content(where: str, source: str, content: Any) -> None:
    if source == "prompt" and not isinstance(content, str):
        raise ConfigError(f"{where}: prompt must be a string, got {content!r}.")
    if source == "messages" and not (
        isinstance(content, list) and content and all(isinstance(m, dict) for m in content)
    ):
        raise ConfigError(f'{where}: messages must be a list like [{{"role": "user", ...}}].')
    if source == "prompt_token_ids" and not (
        isinstance(content, list) and all(type(t) is int for t in content)
    ):
        raise ConfigError(f"{where}: prompt_token_ids must be a list of integers.")
