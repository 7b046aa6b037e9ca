"""What a drafter is: it proposes K tokens for each row that sampled, from device state alone.

Never decides what is accepted; a wrong draft costs time, never a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.state.pages import Pages
from paceline.state.slots import Slots
from paceline.step import Bools, Longs


@dataclass(slots=True)
class DraftStep:
    """The step so far, after advance: what the drafter may look at. One entry per live row."""

    slots: Slots
    pages: Pages
    k: int
    slot_B: Longs
    start_B: Longs  # first position the target computed
    query_len_B: Longs  # positions the target computed
    num_drafts_B: Longs  # drafts among them
    samples_B: Bools  # rows that sampled; the others are non-final prefill chunks
    hidden_TD: Tensor  # the target's final hidden states, for heads that read them


class Drafter(Protocol):
    """`lookahead` counts KV positions past the window that `propose` writes."""

    @property
    def max_k(self) -> int: ...

    @property
    def lookahead(self) -> int: ...

    @property
    def is_probabilistic(self) -> bool: ...

    def propose(self, step: DraftStep) -> None:
        """Write step.k drafts (-1 = none) into the slot of every row that sampled."""


class NoDrafter:
    """K = 0 for ever."""

    max_k = 0
    lookahead = 0
    is_probabilistic = False

    def propose(self, step: DraftStep) -> None:
        pass


def store_drafts(slots: Slots, slot_B: Tensor, drafts_BK: Tensor, *, is_onehot: bool) -> None:
    """Drafts of these slots become exactly `drafts_BK`, -1 beyond its width."""
    slots.drafts_SK[slot_B] = -1
    slots.drafts_SK[slot_B, : drafts_BK.shape[1]] = drafts_BK
    slots.drafts_onehot_S[slot_B] = is_onehot
