"""Families and draft heads are found by name, and the names that users give are all there."""

from __future__ import annotations

from typing import get_args, get_type_hints

from paceline.models.heads.registry import HEADS
from paceline.speculation import SpeculativeConfig


def test_every_speculative_method_is_a_head_or_needs_none() -> None:
    methods = get_args(get_type_hints(SpeculativeConfig)["method"])
    assert set(methods) == {*HEADS, "ngram", "suffix", "draft_model"}
