"""Tiny checkpoints for the GPU tests, made once per session: the ladder's, and a longer one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import shared_folder
from tests.e2e.engines import NGRAM
from tests.e2e.ladder import Workshop
from tests.eagle import random_head, save_head
from tests.eagle3 import random_eagle3, save_eagle3
from tests.gpu.engines import open_llm
from tests.mtp import random_mtp, save_mtp
from tests.tiny import save_noisy_draft, save_tiny

LONG = 2048


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """The ladder's, whose engines run on the GPU."""
    made = Workshop(shared_folder(tmp_path_factory) / "workshop")
    made.open_llm = open_llm
    return made


@dataclass(frozen=True)
class LongModel:
    """A tiny llama that can go on for long, and one drafter of each kind for it."""

    folder: Path

    @property
    def target(self) -> Path:
        return self.folder / "target"

    def spec(self, drafter: str, k: int = 3) -> dict[str, Any] | None:
        if drafter == "none":
            return None
        if drafter == "ngram":
            return {**NGRAM, "num_speculative_tokens": k}
        values = {"method": drafter, "num_speculative_tokens": k, "adaptive": False}
        return values if drafter == "mtp" else {**values, "model": str(self.folder / drafter)}


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> LongModel:
    made = LongModel(tmp_path_factory.mktemp("long"))
    plain = made.folder / "plain"
    model = save_tiny(plain, "llama", seed=1, max_position_embeddings=LONG)
    save_mtp(made.target, plain, random_mtp(model))
    save_eagle3(made.folder / "eagle3", random_eagle3(model))
    save_noisy_draft(made.folder / "draft_model", model, noise=0.06)
    save_head(made.folder / "eagle", random_head(model))
    return made
