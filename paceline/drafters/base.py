"""The drafter protocol: propose K tokens for each row that sampled, from device state alone.

Verification decides what is accepted; a wrong draft costs time but never changes the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.kernels.step_rows import BlockLayout
from paceline.layers.attention import BlockPass, ForwardInputs
from paceline.state.slots import Slots


@dataclass(slots=True)
class DraftPass:
    """A drafter's first pass: the varlen batch, and the last entry of each drafting row."""

    inputs: ForwardInputs
    last_B: Tensor  # the entry from whose output the first draft of each row is made
    # The target's entry that each entry of this pass belongs to; None: all of them, in order.
    target_T: Tensor | None = None
    feature_TD: Tensor | None = None  # of all entries, if earlier steps left some of them

    def of_target(self, feature_TD: Tensor) -> Tensor:
        """The target's features at the entries of this pass."""
        if self.feature_TD is not None:
            return self.feature_TD
        return feature_TD if self.target_T is None else feature_TD.index_select(0, self.target_T)

    def of_rows(self, hidden_TD: Tensor) -> Tensor:
        """The outputs from which the drafting rows continue."""
        is_selected = self.inputs.wanted is not None
        return hidden_TD if is_selected else hidden_TD.index_select(0, self.last_B)


class DraftStep(Protocol):
    """The step as a drafter sees it, after its tokens were committed. `end` is a row's length.

    Nothing here waits for the device: the host knows shapes and `k`, not values. Rows that sampled
    draft; on the CPU only those that are not done and want drafts. Rows that ended in this step
    are still in the first pass, because the prefix cache may keep their pages. `group_size` is
    the number of the drafter's query heads per KV head.
    """

    @property
    def slots(self) -> Slots: ...

    @property
    def k(self) -> int:
        """Drafts to propose, at most `Drafter.max_k`. With 0 the first pass still runs, so that the
        KV has no gaps."""

    @property
    def is_joint(self) -> bool:
        """The passes contain collectives with other replicas, so they run even without rows."""

    @property
    def slot_B(self) -> Tensor:
        """The slots that draft."""

    def num_drafting(self, j: int) -> int:
        """Rows that get a draft j: the first ones of `slot_B`."""

    @property
    def feature_TD(self) -> Tensor:
        """The target's features: hidden states after its final norm, or `Drafter.tap_ids`."""

    def shifted(self, group_size: int) -> DraftPass | None:
        """The target's rows, each token replaced by the one after it, positions as they were.
        None: a later step computes them.

        The token after a non-final chunk is the next prompt token; in other rows it is the last
        committed token. The batch may hold entries of rejected drafts, whose outputs are not used.
        """

    def own(self, group_size: int) -> DraftPass | None:
        """A draft model's rows: a prompt chunk and the sampled token, or the last two tokens.
        None: a later step computes them."""

    def next(self, j: int, token_B: Tensor, group_size: int, *, is_shifted: bool) -> ForwardInputs:
        """One entry per row that gets a draft j: draft j - 1, at position end - 1 + j, or one less
        if shifted.

        Entries past max_model_len write no KV, and their drafts are not stored.
        """

    def block(self, group_size: int, layout: BlockLayout) -> BlockPass:
        """The target's committed entries, and a block for each drafting row; with k = 0 no blocks.

        Entries at max_model_len and beyond are left out of a block; they write no KV. Rejected
        drafts write none either: their positions belong to the block.
        """

    def position_B(self, j: int) -> Tensor:
        """The position of draft j in the sequence, for the rows that get one."""

    def store(self, draft_BK: Tensor, *, is_onehot: bool) -> None:
        """Store the drafts of these slots. Cells past the width, past max_model_len or, on the CPU,
        past what the row wants become -1."""


class Drafter(Protocol):
    """`lookahead` is the number of KV positions past the window that `propose` writes."""

    @property
    def max_k(self) -> int: ...

    @property
    def lookahead(self) -> int: ...

    @property
    def is_probabilistic(self) -> bool:
        """Whether drafts are verified by rejection sampling, which needs what they were drawn from.
        Other drafts are accepted if they equal the target's own draw."""

    @property
    def reads_features(self) -> bool:
        """Whether its KV at a position depends on the next token and the target's features."""

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """Target layers whose output it reads; empty: the final hidden states."""

    def propose(self, step: DraftStep) -> None:
        """Write step.k drafts (-1 = none) into the slot of every row that drafts."""


class NoDrafter:
    """No speculation: K = 0."""

    max_k = 0
    lookahead = 0
    is_probabilistic = False
    reads_features = False
    tap_ids = ()

    def propose(self, step: DraftStep) -> None:
        pass
