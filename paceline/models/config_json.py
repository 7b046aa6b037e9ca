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
