"""The only way from host to device on CPU: what a plan changes in slot state and page tables.

`apply` runs in stream order, just before the step that needs it, so a slot or page may change
hands between two steps already planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.table import take_host_drafts
from paceline.state.pages import Pages
from paceline.state.recurrent import Recurrent
from paceline.state.slots import Slots
from paceline.state.step_buffers import slot_tensors
from paceline.step import Ints, PageAppends, SlotInit

# Values of one slot by the name of the Slots tensor; shorter arrays are padded with its default.
SlotRow = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StagedWrites:
    admissions: Sequence[tuple[SlotInit, SlotRow]]
    page_appends: PageAppends | None
    continuations: Ints | None = None  # a record for kernels/host_drafts


def restore_snapshots(
    recurrent: Recurrent | None, admissions: Sequence[tuple[SlotInit, SlotRow]]
) -> None:
    """Slots of prefix hits continue from their snapshots. In stream order: steps launched before
    have written the snapshots, and this step may write the same entries again afterwards."""
    for init, _ in admissions:
        if init.snapshot >= 0:
            assert recurrent is not None, "a snapshot for a model without recurrent state"
            recurrent.restore(init.slot, init.snapshot, init.num_cached)


class Staging:
    """Writes staged rows into the tensors of `slots` and `pages`."""

    def __init__(self, slots: Slots, pages: Pages, recurrent: Recurrent | None = None) -> None:
        self._recurrent = recurrent
        self._state = slot_tensors(slots, pages)
        tensors = {name: t for name, t in vars(slots).items() if isinstance(t, Tensor)}
        # A CPU tensor shares its memory with numpy, whose small writes cost a tenth of torch's.
        self._views = {name: t.numpy() for name, t in tensors.items()}
        self._defaults = {name: view.flat[0] for name, view in self._views.items()}
        self._table = pages.table_SP.numpy()

    def apply(self, writes: StagedWrites) -> None:
        for init, row in writes.admissions:
            self._admit(init, row)
        restore_snapshots(self._recurrent, writes.admissions)
        appends = writes.page_appends
        if appends is not None:
            self._table[appends.slot, appends.index] = appends.page
        if writes.continuations is not None:
            take_host_drafts(torch.from_numpy(writes.continuations), self._state)

    def _admit(self, init: SlotInit, row: SlotRow) -> None:
        views, slot = self._views, init.slot
        num_tokens = len(init.tokens)
        views["tokens_SL"][slot, :num_tokens] = init.tokens
        views["num_tokens_S"][slot] = num_tokens
        views["num_computed_S"][slot] = views["state_len_S"][slot] = init.num_cached
        views["prompt_len_S"][slot] = init.prompt_len
        views["max_len_S"][slot] = init.max_len
        # Nothing of the former owner may survive: drafts and codes are cleared, not inherited.
        views["done_S"][slot] = 0
        views["drafts_SK"][slot] = -1
        views["drafts_onehot_S"][slot] = 1
        for name, value in row.items():
            self._write(name, slot, value)
        self._table[slot] = -1
        self._table[slot, : len(init.pages)] = init.pages

    def _write(self, name: str, slot: int, value: Any) -> None:
        view = self._views[name]
        if view.ndim == 1:
            view[slot] = value
            return
        view[slot] = self._defaults[name]
        array = np.asarray(value)
        if array.size:
            view[slot, : len(array)] = array
