"""Options as dataclass fields: their help texts, and the types of the values that users give."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from paceline.errors import ConfigError, nearest

# Values of --quantization: weights are rounded to e4m3 with a scale by output, or by block.
ROUNDING: dict[str, Literal["channel", "block"]] = {
    "fp8": "channel",
    "fp8_per_channel": "channel",
    "fp8_per_block": "block",
}
# Or the files must have this format.
STORED = ("compressed-tensors", "modelopt", "gguf")


def opt(default: Any, help: str) -> Any:
    """A dataclass field that becomes a flag with this help text."""
    return field(default=default, metadata={"help": help})


def coerce(name: str, hint: Any, value: Any) -> Any:
    """The value as the type `hint` has it. Refuses other types by the option's name."""
    if get_origin(hint) is Literal and value not in get_args(hint):
        choices = ", ".join(map(str, get_args(hint)))
        raise ConfigError(
            f"{name} is {value!r}; use one of {choices}.{nearest(str(value), get_args(hint))}"
        )
    wanted = get_args(hint) if get_origin(hint) is not Literal and get_args(hint) else (hint,)
    lists = [x for x in (hint, *wanted) if get_origin(x) is tuple]
    if lists:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name} must be a list, got {value!r}.")
        return tuple(coerce(name, get_args(lists[0])[0], x) for x in value)
    if int in wanted and (isinstance(value, bool) or not isinstance(value, int)):
        raise ConfigError(f"{name} must be an integer, got {value!r}.")
    if float in wanted and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{name} must be a number, got {value!r}.")
    if bool in wanted and not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}.")
    if str in wanted and not isinstance(value, str | Path):
        raise ConfigError(f"{name} must be a string, got {value!r}.")
    return str(value) if isinstance(value, Path) else value


def check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1.")


def check_quantization(asked: str | None) -> None:
    names = (*ROUNDING, *STORED)
    if asked is not None and asked not in names:
        raise ConfigError(
            f"quantization is {asked!r}; use one of {', '.join(names)}.{nearest(asked, names)}"
        )
