"""The one loop for drafters that are models: a first pass over the new tokens, then K - 1 more.

A head says how its first pass is laid out and what it carries from one draft to the next. Its KV
lives in the same page table as the target's, in layers of its own. No value on the device decides
what the loop does, so that it can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.drafters.base import DraftPass, DraftStep
from paceline.layers.attention import ForwardInputs
from paceline.layers.vocab import VocabShards
from paceline.models.decoder import Decoder
from paceline.models.draft_heads import HeadModel
from paceline.sampling.draft import propose_tokens
from paceline.state.pages import LayerPages


class DraftHead(Protocol):
    """What the loop asks of a model that drafts."""

    @property
    def is_shifted(self) -> bool:
        """Entry i holds token i + 1 and the target's feature at i."""

    @property
    def group_size(self) -> int: ...

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """The features it reads; see Drafter.tap_ids."""

    @property
    def token_of_V(self) -> Tensor | None:
        """The target's ids of a vocabulary of its own, which its logits are of."""

    @property
    def vocab(self) -> VocabShards:
        """Which part of its vocabulary the logits of this rank are of."""

    def first(self, batch: DraftPass, target_TD: Tensor) -> Tensor:
        """Hidden states of the first pass, of `batch.inputs.wanted` if it names some."""

    def next(self, inputs: ForwardInputs, hidden_BD: Tensor) -> Tensor:
        """Hidden states one draft further; `hidden_BD` are those that the draft came from."""

    def logits(self, hidden_BD: Tensor) -> Tensor: ...


@dataclass(slots=True)
class AutoregressiveDrafter:
    """Drafts come one by one, each from the one before."""

    head: DraftHead
    max_k: int
    is_probabilistic: bool

    @property
    def lookahead(self) -> int:
        # Past the window lies the token that was just sampled; draft K is never fed.
        return self.max_k - 1 if self.head.is_shifted else self.max_k

    @property
    def reads_features(self) -> bool:
        return self.head.is_shifted

    @property
    def tap_ids(self) -> tuple[int, ...]:
        return self.head.tap_ids

    def propose(self, step: DraftStep) -> None:
        head, is_shifted, group_size = self.head, self.head.is_shifted, self.head.group_size
        batch = step.shifted(group_size) if is_shifted else step.own(group_size)
        if not len(batch.inputs.token_T) and not step.is_joint:
            return
        hidden_TD = head.first(batch, step.feature_TD)
        if not step.k or not (len(step.slot_B) or step.is_joint):
            return  # the pass still ran: the KV stays warm while nobody speculates
        hidden_BD = batch.of_rows(hidden_TD)
        drafts: list[Tensor] = []
        for j in range(step.k):
            if j:
                inputs = step.next(j, drafts[-1], group_size, is_shifted=is_shifted)
                hidden_BD = head.next(inputs, hidden_BD)
            drafts.append(
                propose_tokens(
                    head.logits(hidden_BD),
                    step.slot_B,
                    step.position_B(j) if self.is_probabilistic else None,
                    j,
                    step.slots,
                    token_of_V=head.token_of_V,
                    vocab=head.vocab,
                )
            )
        step.store(torch.stack(drafts, dim=1), is_onehot=not self.is_probabilistic)


@dataclass(slots=True)
class DraftModelHead:
    """A smaller causal LM with the target's vocabulary."""

    model: Decoder
    layer_pages: list[LayerPages]

    is_shifted = False
    tap_ids = ()
    token_of_V = None

    @property
    def vocab(self) -> VocabShards:
        return self.model.vocab

    @property
    def group_size(self) -> int:
        return self.model.spec.group_size

    def first(self, batch: DraftPass, target_TD: Tensor) -> Tensor:
        return self.model.forward(batch.inputs, self.layer_pages)

    def next(self, inputs: ForwardInputs, hidden_BD: Tensor) -> Tensor:
        return self.model.forward(inputs, self.layer_pages)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        return self.model.logits(hidden_BD)


@dataclass(slots=True)
class FeatureHead:
    """EAGLE and MTP: reads the target's features first, then its own."""

    model: HeadModel
    layer_pages: list[LayerPages]

    is_shifted = True

    @property
    def group_size(self) -> int:
        return self.model.stack.spec.group_size

    @property
    def tap_ids(self) -> tuple[int, ...]:
        return self.model.tap_ids

    @property
    def token_of_V(self) -> Tensor | None:
        return self.model.token_of_V

    @property
    def vocab(self) -> VocabShards:
        return self.model.vocab

    def first(self, batch: DraftPass, target_TD: Tensor) -> Tensor:
        feature_TD = self.model.read(batch.of_target(target_TD))
        return self.model.forward(batch.inputs, feature_TD, self.layer_pages)

    def next(self, inputs: ForwardInputs, hidden_BD: Tensor) -> Tensor:
        return self.model.forward(inputs, hidden_BD, self.layer_pages)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        return self.model.logits(hidden_BD)
