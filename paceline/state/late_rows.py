"""Entries that a drafter has not computed yet: their number by slot, and the target's features.

A row that gets no drafts needs the drafter only to keep its KV complete. Such passes are put off
and computed together, by the rules of runner/compact_rows. CPU only.

Shape letters: S slots, C most entries, D feature size, N some entries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.step import Bools, Longs


class LateRows:
    """At most `most` entries of each slot. They are the last ones before the newest token."""

    def __init__(self, num_slots: int, most: int) -> None:
        self.most = most
        self.count_S: Longs = np.zeros(num_slots, np.int64)
        self.has_sampled_S: Bools = np.zeros(num_slots, np.bool_)  # since its admission
        # Bytes of features, allocated when the first entry is put off. Small copies are faster in
        # numpy, which has not all types of torch.
        self._feature_SCX: npt.NDArray[np.uint8] | None = None
        self._dtype = torch.float32

    def begin(self, slots: list[int]) -> None:
        """New requests own these slots."""
        self.count_S[slots] = 0
        self.has_sampled_S[slots] = False

    def keep(self, slot_N: Longs, offset_N: Longs, feature_ND: Tensor) -> None:
        """Keep features of entries. `offset_N`: entries of the slot that were put off before."""
        feature_NX = feature_ND.view(torch.uint8).numpy()
        if self._feature_SCX is None:
            self._feature_SCX = np.zeros(
                (len(self.count_S), self.most, feature_NX.shape[1]), np.uint8
            )
            self._dtype = feature_ND.dtype
        self._feature_SCX[slot_N, offset_N] = feature_NX

    def features(self, slot_N: Longs, offset_N: Longs) -> Tensor:
        assert self._feature_SCX is not None
        return torch.from_numpy(self._feature_SCX[slot_N, offset_N]).view(self._dtype)
