"""Reads the spec of a draft head as start-up does."""

from __future__ import annotations

from typing import Any

from paceline.models.heads.registry import HEADS, pick_method
from paceline.models.spec import ModelSpec
from paceline.speculation import SpeculativeConfig


def read_head(method: Any, name: str, config: Any, target: ModelSpec, **options: Any) -> Any:
    model = None if method == "mtp" else name
    values = {"method": method, "num_speculative_tokens": 1, "model": model, **options}
    speculative = SpeculativeConfig(**values)
    return HEADS[pick_method(name, config, speculative)].read(name, config, target, speculative)
