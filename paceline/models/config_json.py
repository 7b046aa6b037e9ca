"""Checked values of a checkpoint's config.json: a wrong type or size is refused by name.

Knows no model family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from paceline.errors import CheckpointError

Config = Mapping[str, Any]
T = TypeVar("T")
_WANTED = {int: "a positive integer", float: "a positive number", dict: "an object", list: "a list"}


def value_of(config: Config, name: str, kind: type[T], default: T | None = None) -> T:
    """The value of a key. `default` replaces a value that is missing, null, 0 or empty."""
    value: Any = config.get(name)
    if not value and default is not None:
        return default
    kinds: Any = (int, float) if kind is float else kind
    is_right = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_right or (kind in (int, float) and not 0 < value < math.inf):
        raise CheckpointError(f"config.json: {name} is {value!r}; {_WANTED[kind]} is needed.")
    found: T = value
    return found


def flag_of(config: Config, name: str, default: bool = False) -> bool:
    return bool(config.get(name, default))


def refuse_quantised(config: Config) -> None:
    quantised = value_of(config, "quantization_config", dict, {})
    if quantised and fp8_block_size(config) is None:
        method = quantised.get("quant_method") or quantised.get("quant_algo", "unknown")
        raise CheckpointError(
            f"this checkpoint is quantised with {method!r}, which is not supported; "
            "use the original weights, fp8 with a weight_block_size of [rows, columns], or a GGUF."
        )


def fp8_block_size(config: Config) -> tuple[int, int] | None:
    """Rows and columns that share a scale (models/block_fp8); None if it is another format."""
    quantised = config.get("quantization_config") or {}
    size = quantised.get("weight_block_size")
    if quantised.get("quant_method") != "fp8" or not isinstance(size, list):
        return None
    rows, columns = (size[0], size[1]) if [type(x) for x in size] == [int, int] else (0, 0)
    return (rows, columns) if min(rows, columns) > 0 else None
