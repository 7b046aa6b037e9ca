"""Makes flags from dataclass fields, and configuration from parsed flags.

The dataclasses check the values.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
import types
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.config import EngineConfig, option_fields, refuse_by_name
from paceline.errors import ConfigError, nearest
from paceline.request import SamplingParams
from paceline.speculation import AUTO, DEFAULT_SPECULATION, SHORT_NAMES, parse_speculative_config

_GROUP_TITLES = {
    "model": "model",
    "cache": "KV cache",
    "scheduler": "scheduling",
    "device": "device and ranks",
    "nodes": "several machines",
}
_SIZES = re.compile(r".*_bytes|max_model_len|max_num_batched_tokens")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Sampling options that have a flag. A line of JSONL input may set all sampling options.
_SAMPLING_FLAGS = {
    "max_tokens": "most tokens to generate",
    "temperature": "0 is greedy",
    "top_p": "keep the most likely tokens up to this total probability",
    "top_k": "keep this many of the most likely tokens (0: all)",
    "min_p": "drop tokens less likely than this share of the most likely one",
    "stop": "strings that end the answer",
    "ignore_eos": "generate past the end-of-sequence token",
}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_engine_arguments(parser: ArgumentParser, *, shown: bool = True) -> None:
    """MODEL, one flag per engine option, --speculative-config and --config.

    `paceline serve --help` lists them; the help of other commands refers to it.
    """
    groups: dict[str, Any] = {}
    for group, option, hint in option_fields():
        if option.name == "model":
            parser.add_argument("model", nargs="?", metavar="MODEL", help=_help_text(option))
            continue
        if group not in groups:
            groups[group] = parser.add_argument_group(_GROUP_TITLES[group])
        text = _help_text(option) if shown else argparse.SUPPRESS
        _add_flag(groups[group], option.name, hint, text)
    drafts = parser.add_argument_group("speculation")
    texts = {
        "--speculative-config": '{"method": "ngram", "num_speculative_tokens": 5} (the default '
        "without MODEL), a file of it (@FILE or FILE) or none",
        "--spec-method": "its method, without JSON",
        "--spec-model": "its model: the draft",
        "--spec-tokens": "its num_speculative_tokens, or auto",
    }
    kinds: dict[str, tuple[str, Callable[[str], Any]]] = {
        "--speculative-config": ("JSON", speculative_config),
        "--spec-tokens": ("N", lambda text: AUTO if text == AUTO else int(text)),
    }
    for name, text in texts.items():
        metavar, kind = kinds.get(name, ("TEXT", str))
        text = text if shown else argparse.SUPPRESS
        drafts.add_argument(name, metavar=metavar, type=kind, help=text)
    parser.add_argument(
        "--config", metavar="FILE", help="JSON or TOML file of these flags; flags given here win"
    )
    if not shown:
        parser.epilog = (
            "Also takes the engine flags of `paceline serve --help` (model to speculation)."
        )


def add_dataclass_arguments(parser: ArgumentParser, title: str, options: type[Any]) -> None:
    """One flag per field of `options`, in a help group with this title."""
    group = parser.add_argument_group(title)
    hints = get_type_hints(options)
    for option in fields(options):
        _add_flag(group, option.name, hints[option.name], _help_text(option))


def add_sampling_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (defaults: the model's generation config)")
    hints = get_type_hints(SamplingParams)
    for name, text in _SAMPLING_FLAGS.items():
        hint = tuple[str, ...] if name == "stop" else hints[name]
        _add_flag(group, name, hint, text)


def engine_keywords(args: Namespace) -> dict[str, Any]:
    """The engine options that were given, by flat name."""
    names = [option.name for _, option, _ in option_fields()]
    keywords = _given(args, [*names, *SHORT_NAMES])
    spec, is_short = args.speculative_config, not SHORT_NAMES.keys().isdisjoint(keywords)
    if spec is None and not keywords.get("model") and not is_short:
        spec = DEFAULT_SPECULATION
    if spec or (is_short and spec is not None):  # {} is --speculative-config none
        keywords["speculative_config"] = spec
    return keywords


def engine_config(args: Namespace) -> EngineConfig:
    return EngineConfig.from_keywords(**engine_keywords(args))


def dataclass_from(args: Namespace, options: type[Any]) -> Any:
    """An `options` from the flags that were given; other fields keep their defaults."""
    given = _given(args, (f.name for f in fields(options)))
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return options(**given)


def sampling_keywords(args: Namespace) -> dict[str, Any]:
    return _given(args, _SAMPLING_FLAGS)


def _given(args: Namespace, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def speculative_config(text: str) -> dict[str, Any]:
    try:
        return parse_speculative_config(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_config_file(path: str, parser: ArgumentParser) -> dict[str, Any]:
    """The values of a --config file by argparse dest. Each key must be a flag of `parser`."""
    values = _parse_file(Path(path))
    taken = [a for a in parser._actions if a.dest not in ("help", "config")]
    actions = {a.dest: a for a in taken}
    for action in taken:
        if not isinstance(action, BooleanOptionalAction):  # its --no-... is the value false
            names = [option.lstrip("-").replace("-", "_") for option in action.option_strings]
            actions |= dict.fromkeys(names, action)
    found = {}
    for key, value in values.items():
        name = key.removeprefix("--").replace("-", "_")
        if name not in actions:
            refuse_by_name(name)
            known = [a.replace("_", "-") for a in actions]
            hint = nearest(name.replace("_", "-"), known)
            raise ConfigError(f"{path}: {key!r} is not a flag of {parser.prog}.{hint}")
        found[actions[name].dest] = _file_value(path, key, value, actions[name])
    return found


def size(text: str) -> int:
    """`4096`, `8k` (thousands), `8K` or `8KiB` (1,024s), `2G`, `512MiB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgKMG])|([KMG])iB)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; write 4096, 8k, 8K or 2GiB")
    unit = _UNITS.get(match[2] or match[3] or "", 1)
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def one_of(choices: Iterable[str]) -> Callable[[str], str]:
    names = list(choices)

    def check(text: str) -> str:
        if text not in names:
            hint = nearest(text, names)
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}.{hint}")
        return text

    return check


def _add_flag(group: Any, name: str, hint: Any, text: str) -> None:
    hint = _without_none(hint)
    if hint is bool:
        group.add_argument(flag(name), action=BooleanOptionalAction, default=None, help=text)
    elif get_origin(hint) is Literal:
        choices = [str(c) for c in get_args(hint)]
        metavar = "{" + ",".join(choices) + "}"
        group.add_argument(flag(name), type=one_of(choices), metavar=metavar, help=text)
    elif get_origin(hint) in (tuple, list):
        kind = get_args(hint)[0]
        group.add_argument(flag(name), type=kind, nargs="+", metavar=_metavar(kind), help=text)
    elif hint is int and _SIZES.fullmatch(name):
        group.add_argument(flag(name), type=size, metavar="N", help=text)
    else:
        kind = hint if hint in (int, float, str, Path) else str
        group.add_argument(flag(name), type=kind, metavar=_metavar(kind), help=text)


def _metavar(kind: type) -> str:
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


def _without_none(hint: Any) -> Any:
    """`int` for `int | None`; `str` for a longer union."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    kinds = [a for a in get_args(hint) if a is not type(None)]
    return kinds[0] if len(kinds) == 1 else str


def _help_text(option: Field[Any]) -> str:
    """The help of a field, with its default unless that is empty or off."""
    text, default = str(option.metadata["help"]), option.default
    if default in (MISSING, None, (), "") or default is False:
        return text
    return f"{text} [{'on' if default is True else default}]"


def _parse_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path} is not a text file.") from None
    as_json = path.suffix == ".json" or text.lstrip().startswith("{")
    try:
        values = json.loads(text) if as_json else tomllib.loads(text)
    except ValueError as error:
        kind = "JSON" if as_json else "TOML"
        raise ConfigError(f"--config {path} is not {kind}: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path} must hold an object of flags and values.")
    return values


def _file_value(path: str, key: str, value: Any, action: argparse.Action) -> Any:
    """The value as the flag would parse it. A wrong type is an error."""
    if isinstance(action, BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: {key} must be true or false, got {value!r}.")
        return value
    if action.dest == "speculative_config":
        value = value if isinstance(value, str) else json.dumps(value)
    many = action.nargs == "+"
    parts = value if many and isinstance(value, list) else [value]
    checked = [_convert(path, key, part, action.type) for part in parts]
    return checked if many else checked[0]


def _convert(path: str, key: str, value: Any, kind: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{path}: {key} cannot be {value!r}.")
    if kind in (None, str, Path) and not isinstance(value, str):
        raise ConfigError(f"{path}: {key} must be a string, got {value!r}.")
    try:
        return str(value) if kind is None else kind(str(value))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ConfigError(f"{path}: {key}: {error}.") from None
