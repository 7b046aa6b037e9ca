"""Entries that a drafter has not computed yet: their number by slot, and the target's features.

A row that gets no drafts needs the drafter only to keep its KV complete. Such passes are put off
and computed together, by the rules of runner/compact_rows. CPU only.

Shape letters: S slots, C most entries, D feature size, N some entries.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.step import Bools, Longs


class LateRows:
    """At most `most` entries of each slot. They are the last ones before the newest token."""

    def __init__(self, num_slots: int, most: int) -> None:
        self.most = most
        self.count_S: Longs = np.zeros(num_slots, np.int64)
        self.has_sampled_S: Bools = np.zeros(num_slots, np.bool_)  # since its admission
        self._feature_SCD: Tensor | None = None  # allocated when the first entry is put off

    def begin(self, slots: list[int]) -> None:
        """New requests own these slots."""
        self.count_S[slots] = 0
        self.has_sampled_S[slots] = False

    def keep(self, slot_N: Longs, offset_N: Longs, feature_ND: Tensor) -> None:
        """Keep features of entries. `offset_N`: entries of the slot that were put off before."""
        if self._feature_SCD is None:
            shape = (len(self.count_S), self.most, feature_ND.shape[1])
            self._feature_SCD = feature_ND.new_zeros(shape)
        self._feature_SCD[torch.from_numpy(slot_N), torch.from_numpy(offset_N)] = feature_ND

    def features(self, slot_N: Longs, offset_N: Longs) -> Tensor:
        assert self._feature_SCD is not None
        return self._feature_SCD[torch.from_numpy(slot_N), torch.from_numpy(offset_N)]
