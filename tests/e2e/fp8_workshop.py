"""Tiny checkpoints with scales of keys and values, run with fp8 pages, and what they must emit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import LLM
from tests.e2e.fp8_reference import MOST_OTHERS, num_others, rounded_pages
from tests.e2e.ladder import PROMPTS, Rung, Workshop, run_rung
from tests.tiny import make_tiny

# Names and scales of keys, then of values. Some keys of llama's first head are beyond the range.
SCALES: dict[str, tuple[tuple[str, list[float]], ...]] = {
    "llama": (("k_scale", [0.004, 0.031]), ("v_scale", [0.02, 0.007])),
    "deepseek-v3": (("k_scale", [0.0125]),),
    "qwen3.5": (("k_proj.k_scale", [0.05]), ("v_proj.v_scale", [0.03])),
}
# What experts do depends on which of them is chosen, and a hair decides that: all layers are dense.
CHANGES = {"deepseek-v3": {"first_k_dense_replace": 3}}
# Keys and values have the same bits in every batch; elsewhere torch's products do not.
IS_BITWISE = ("llama", "qwen3")


class Fp8Workshop(Workshop):
    """`expected` is what Paceline emits in the simplest way; `check_tokens` judges that."""

    open_llm = partial(LLM, kv_cache_dtype="fp8")

    def _target(self, family: str) -> Any:
        model = make_tiny(family, seed=1, **CHANGES.get(family, {}))
        self._once(family, lambda: self._save(model, self._folder / family, family))
        return model

    @staticmethod
    def _save(model: Any, folder: Path, family: str) -> None:
        model.save_pretrained(folder)
        path = folder / "model.safetensors"
        tensors = load_file(path)
        layers = {n.partition("self_attn.")[0] for n in tensors if ".self_attn." in n}
        for name, values in SCALES.get(family, ()):
            scale = torch.tensor(values if len(values) > 1 else values[0])
            tensors |= {f"{at}self_attn.{name}": scale.clone() for at in layers}
        save_file(tensors, path, {"format": "pt"})

    def _expected(self, family: str) -> list[list[int]]:
        tokens: list[list[int]] = self._once(
            f"{family}-expected", lambda: run_rung(plain_rung(family), self)[0]
        )
        return tokens

    def scales(self, family: str) -> tuple[Tensor, Tensor]:
        found = [torch.tensor(values) for _, values in SCALES.get(family, ())] or [torch.ones(1)]
        return found[0], found[-1]

    def check_tokens(self, family: str, outputs: Sequence[list[int]]) -> None:
        """They are what the model with rounded keys and values would emit."""
        model = self.target(family)
        with rounded_pages(model, *self.scales(family)):
            assert num_others(model, PROMPTS, outputs) <= MOST_OTHERS


def plain_rung(family: str) -> Rung:
    """No drafts, whole prompts, nothing shared, room for all."""
    return Rung(family, 0, "none", 1, "all", 2048, False, "roomy", 16)
