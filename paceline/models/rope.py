"""Rotary embedding of a model: its numbers, read from config.json, and the table made from them.

The formulas of each scaling are in layers/rope.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from paceline.errors import CheckpointError
from paceline.layers.rope import (
    inverse_frequencies,
    llama3_frequencies,
    rotation_table,
    yarn_frequencies,
)
from paceline.models.config_json import Config, flag_of, value_of
from paceline.models.weight_source import WeightSource

_SUPPORTED = ("default", "linear", "llama3", "yarn")
_GGUF_FACTORS = "gguf_factors"  # the file holds a factor for each frequency


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base, kind of scaling and its numbers."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0  # yarn: frequencies with more turns than this are kept
    beta_slow: float = 1.0  # yarn: frequencies with fewer turns than this are stretched
    is_truncated: bool = True  # yarn: the ramp between the two begins and ends at whole pairs
    attention_factor: float = 1.0  # yarn: scales rotated queries and keys
    mscale_all_dim: float = 0.0  # DeepSeek: scales the softmax by mscale squared
    share: float = 1.0  # of a head that is rotated

    @property
    def softmax_factor(self) -> float:
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2

    def table(self, rope_size: int, num_positions: int, source: WeightSource) -> Tensor:
        """complex64 [positions, rope_size / 2]. `source` is read for the factors of a GGUF."""
        freq = inverse_frequencies(rope_size, self.theta)
        old = self.original_max_position
        if self.kind == "linear":
            freq = freq / self.factor
        elif self.kind == "llama3":
            ends = (self.low_freq_factor, self.high_freq_factor)
            freq = llama3_frequencies(freq, self.factor, *ends, old)
        elif self.kind == "yarn":
            turns = (self.beta_fast, self.beta_slow)
            freq = yarn_frequencies(freq, self.theta, self.factor, turns, old, self.is_truncated)
        elif self.kind == _GGUF_FACTORS:
            freq = freq / source.load("rope_freqs.weight").float()
        rotation = rotation_table(freq, num_positions)
        return rotation if self.attention_factor == 1.0 else rotation * self.attention_factor


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_rope(config: Config, max_position: int, share: float | None = None) -> RopeSpec:
    """`share` is the family's default of partial_rotary_factor; None: heads are rotated whole."""
    # transformers 5 writes rope_parameters; older files have rope_theta and rope_scaling, which
    # users also add by hand.
    news, olds = (value_of(config, x, dict, {}) for x in ("rope_parameters", "rope_scaling"))
    values = olds or news
    thetas = (value_of(x, "rope_theta", float, 0.0) for x in (values, news, config))
    theta = next(filter(None, thetas), 10000.0)
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in (*_SUPPORTED, _GGUF_FACTORS):
        raise CheckpointError(
            f"rope type {kind!r} is not supported; Paceline computes {', '.join(_SUPPORTED)}."
        )
    shares = (value_of(x, "partial_rotary_factor", float, 0.0) for x in (values, news, config))
    found = next(filter(None, shares), share or 1.0)
    if found > 1.0 or (found < 1.0 and share is None):
        raise CheckpointError(
            f"partial_rotary_factor {found} is not supported; Paceline rotates whole heads (1.0)."
        )
    original = value_of(values, "original_max_position_embeddings", int, max_position)
    if kind == "yarn":
        return replace(_read_yarn(values, theta, original, max_position), share=found)
    return RopeSpec(
        share=found,
        theta=theta,
        kind=kind,
        factor=value_of(values, "factor", float, 1.0),
        low_freq_factor=value_of(values, "low_freq_factor", float, 1.0),
        high_freq_factor=value_of(values, "high_freq_factor", float, 4.0),
        original_max_position=original,
    )


def _read_yarn(values: Config, theta: float, original: int, max_position: int) -> RopeSpec:
    factor = value_of(values, "factor", float, max_position / original)
    # 0 counts as absent, as in transformers.
    mscale, all_dim = (value_of(values, x, float, 0.0) for x in ("mscale", "mscale_all_dim"))
    length = value_of(values, "attention_factor", float, 0.0)
    if not length:
        length = yarn_mscale(factor)
        if mscale and all_dim:
            length = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=value_of(values, "beta_fast", float, 32.0),
        beta_slow=value_of(values, "beta_slow", float, 1.0),
        is_truncated=flag_of(values, "truncate", True),
        attention_factor=length,
        mscale_all_dim=all_dim,
    )
