"""What drafts for a target beside plain draft models, by the speculative method that selects it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from paceline.errors import CheckpointError
from paceline.models.config_json import Config
from paceline.models.heads.base import HeadSpec
from paceline.models.heads.block_config import is_dflash, is_dspark, refuse_by_name
from paceline.models.heads.dflash import DFlashSpec, read_dflash
from paceline.models.heads.eagle import read_eagle
from paceline.models.heads.eagle3 import is_eagle3, read_eagle3
from paceline.models.heads.mtp import read_mtp
from paceline.models.heads.pard import is_pard, read_pard
from paceline.models.heads.peagle import PEagleSpec, is_peagle, read_peagle
from paceline.models.spec import ModelSpec
from paceline.speculation import SpeculativeConfig


class HeadMethod(NamedTuple):
    """How a kind of head is read, and recognised by its config.json."""

    title: str
    read: Callable[[str, Config, ModelSpec, SpeculativeConfig], HeadSpec]
    # Whether a config.json is surely of this kind; None: its configs have no mark.
    is_marked: Callable[[Config], bool] | None = None
    is_in_target: bool = False  # it is part of the target's checkpoint


# The order decides if a config.json has several marks.
HEADS: dict[str, HeadMethod] = {
    "dflash": HeadMethod("DFlash", read_dflash, is_dflash),
    "dspark": HeadMethod("DSpark", read_dflash, is_dspark),
    "peagle": HeadMethod("P-EAGLE", read_peagle, is_peagle),
    "pard": HeadMethod("PARD", read_pard, is_pard),
    "eagle": HeadMethod("EAGLE-1", read_eagle),
    "eagle3": HeadMethod("EAGLE-3", read_eagle3, is_eagle3),
    "mtp": HeadMethod("MTP", read_mtp, is_in_target=True),
}


def pick_method(name: str, config: Config, options: SpeculativeConfig) -> str:
    """The method of a draft checkpoint: the one asked for, or if that was guessed from the name,
    the one that its config.json is marked with."""
    refuse_by_name(name, config)
    kinds = HEADS.items()
    marked = next((m for m, kind in kinds if kind.is_marked and kind.is_marked(config)), None)
    if marked is None or marked == options.method:
        return options.method
    if options.method_is_guessed:
        return marked
    title = HEADS[marked].title
    article = "an" if title.startswith("E") else "a"
    raise CheckpointError(f'{name!r} is {article} {title} head: give "method": "{marked}".')


def with_layers(head: Any, layers: ModelSpec) -> HeadSpec:
    """The head with other layers, which have a window."""
    changes: dict[str, Any] = {"layers": layers}
    if isinstance(head, PEagleSpec):
        changes = {"eagle": replace(head.eagle, layers=layers)}
    elif isinstance(head, DFlashSpec):
        window = layers.sliding_window
        assert window is not None
        changes["kinds"] = tuple(
            x._replace(window=min(window, x.window or window)) for x in head.kinds
        )
    changed: HeadSpec = replace(head, **changes)
    return changed
