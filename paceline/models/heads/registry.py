"""The draft heads that Paceline knows, by the speculative method that selects them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paceline.config import SpeculativeConfig
from paceline.errors import CheckpointError
from paceline.models.config_json import Config
from paceline.models.heads.base import HeadSpec
from paceline.models.heads.eagle import read_eagle
from paceline.models.heads.eagle3 import is_eagle3, read_eagle3
from paceline.models.heads.mtp import read_mtp
from paceline.models.spec import ModelSpec


class HeadMethod(NamedTuple):
    """How a kind of head is read, and recognised by its config.json."""

    title: str
    read: Callable[[str, Config, ModelSpec, SpeculativeConfig], HeadSpec]
    # Whether a config.json is surely of this kind; None: its configs have no mark.
    is_marked: Callable[[Config], bool] | None = None
    is_in_target: bool = False  # it is part of the target's checkpoint


HEADS: dict[str, HeadMethod] = {
    "eagle": HeadMethod("EAGLE-1", read_eagle),
    "eagle3": HeadMethod("EAGLE-3", read_eagle3, is_eagle3),
    "mtp": HeadMethod("MTP", read_mtp, is_in_target=True),
}


def pick_method(name: str, config: Config, options: SpeculativeConfig) -> str:
    """The method of a draft checkpoint: the one asked for, or if that was guessed from the name,
    the one that its config.json is marked with."""
    kinds = HEADS.items()
    marked = next((m for m, kind in kinds if kind.is_marked and kind.is_marked(config)), None)
    if marked is None or marked == options.method:
        return options.method
    if options.method_is_guessed:
        return marked
    raise CheckpointError(f'{name!r} is an {HEADS[marked].title} head: give "method": "{marked}".')
