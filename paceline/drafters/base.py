"""What a drafter is: it proposes K tokens for each row that sampled, from device state alone.

Never decides what is accepted; a wrong draft costs time, never a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.layers.attention import ForwardInputs
from paceline.state.slots import Slots


@dataclass(slots=True)
class DraftPass:
    """A drafter's first pass: the varlen batch, and where each drafting row ends in it."""

    inputs: ForwardInputs
    last_B: Tensor  # entry whose output begins the chain of each drafting row
    # The target's entry behind each of this pass's; None: all of them, in order.
    target_T: Tensor | None = None

    def of_target(self, feature_TD: Tensor) -> Tensor:
        """What the target computed at the entries of this pass."""
        return feature_TD if self.target_T is None else feature_TD.index_select(0, self.target_T)

    def of_rows(self, hidden_TD: Tensor) -> Tensor:
        """What each drafting row goes on with, of the outputs of this pass."""
        is_theirs = self.inputs.wanted is not None
        return hidden_TD if is_theirs else hidden_TD.index_select(0, self.last_B)


class DraftStep(Protocol):
    """The step so far, after advance, as a drafter sees it. `end` is a row's committed length.

    Nothing here waits for the device: shapes and `k` are known to the host, values are not.
    The rows that draft are those that sampled; where it is known (CPU), those not done. Rows that
    this step ended are in the first pass all the same: the prefix cache may keep their pages.
    `group_size` is the drafter's own: query heads per KV head.
    """

    @property
    def slots(self) -> Slots: ...

    @property
    def k(self) -> int:
        """Drafts to propose; 0 still wants the first pass, which keeps the drafter's KV warm."""

    @property
    def is_joint(self) -> bool:
        """Other replicas take part in the passes: all of them run, whoever has rows."""

    @property
    def slot_B(self) -> Tensor:
        """The slots that draft."""

    @property
    def feature_TD(self) -> Tensor:
        """What the target hands out: hidden states after its final norm, or `Drafter.tap_ids`."""

    def shifted(self, group_size: int) -> DraftPass:
        """The target's rows, each token replaced by the one after it, positions as they were.

        The token after a non-final chunk is the next one of the prompt; after all else it is the
        last committed one. Entries of rejected drafts may be there; nobody reads what they give.
        """

    def own(self, group_size: int) -> DraftPass:
        """A stand-alone model's rows: chunks with the token they sampled, else two tokens."""

    def next(self, j: int, token_B: Tensor, group_size: int, *, is_shifted: bool) -> ForwardInputs:
        """One entry per drafting row: draft j - 1, at position end - 1 + j, or one less if shifted.

        Past max_model_len entries write no KV, and what they give is not stored.
        """

    def position_B(self, j: int) -> Tensor:
        """Where draft j comes to lie in the sequence."""

    def store(self, draft_BK: Tensor, *, is_onehot: bool) -> None:
        """The drafts of these slots become `draft_BK`; -1 past its width and past max_model_len."""


class Drafter(Protocol):
    """`lookahead` counts KV positions past the window that `propose` writes."""

    @property
    def max_k(self) -> int: ...

    @property
    def lookahead(self) -> int: ...

    @property
    def is_probabilistic(self) -> bool: ...

    @property
    def reads_features(self) -> bool:
        """Its KV at a position depends on the token after it and on the target's hidden states."""

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """Its features are the residual stream after so many layers each; (): hidden states."""

    def propose(self, step: DraftStep) -> None:
        """Write step.k drafts (-1 = none) into the slot of every row that drafts."""


class NoDrafter:
    """K = 0 for ever."""

    max_k = 0
    lookahead = 0
    is_probabilistic = False
    reads_features = False
    tap_ids = ()

    def propose(self, step: DraftStep) -> None:
        pass
