"""The prompts of the benchmark as token ids: the fixed files of bench/data, or random tokens.

The parent process tokenises with Paceline, so that every contender gets the same ids.
"""

from __future__ import annotations

import json
import random
from functools import cached_property
from pathlib import Path

from paceline.checkpoint.source import ModelFiles
from paceline.text.chat import load_chat_template
from paceline.text.tokenizer import load_tokenizer

DATA = Path(__file__).resolve().parents[1] / "data"
# Lower ids are control tokens in our models; all others are ordinary text.
_FIRST_ORDINARY_ID = 64


class Prompts:
    """Reads and tokenises on first use, so that random prompts need no tokenizer."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._vocab_size = int(files.config["vocab_size"])
        # Length of each edit or quote answer in tokens; measured once before the case.
        self.edit_lengths: list[int] = []

    @cached_property
    def chat(self) -> list[list[int]]:
        return self._read("chat_40.jsonl")

    @cached_property
    def edit(self) -> list[list[int]]:
        return self._read("edit_and_quote.jsonl")

    def random(self, length: int, *seed: int) -> list[int]:
        """Random ordinary tokens; each number gives another prompt."""
        rng = random.Random("-".join(map(str, seed)))
        low = min(_FIRST_ORDINARY_ID, self._vocab_size // 2)
        return [rng.randrange(low, self._vocab_size) for _ in range(length)]

    def _read(self, name: str) -> list[list[int]]:
        tokenizer = load_tokenizer(self._files)
        template = load_chat_template(self._files, None)
        lines = (DATA / name).read_text(encoding="utf-8").splitlines()
        texts = [template.render(json.loads(line)["messages"]) for line in lines]
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]
