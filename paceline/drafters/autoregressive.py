"""The loop of all drafters that are models: one pass over the new tokens, then one per draft.

A head defines the layout of the first pass and what it carries from one draft to the next. Its KV
has its own layers and uses the target's page table. No value on the device decides what the loop
does, so a CUDA graph can capture it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from paceline.drafters.base import DraftPass, DraftStep
from paceline.layers.attention import ForwardInputs
from paceline.layers.vocab import VocabShards
from paceline.models.decoder import Decoder
from paceline.models.heads.base import HeadModel
from paceline.sampling.draft import propose_tokens
from paceline.state.recurrent import LayerStorage


class DraftHead(Protocol):
    """What the loop needs of a model that drafts."""

    @property
    def is_shifted(self) -> bool:
        """Entry i holds token i + 1 and the target's feature at i."""

    @property
    def group_size(self) -> int: ...

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """See Drafter.tap_ids."""

    @property
    def draft_to_target_ids(self) -> Tensor | None:
        """For a head with a smaller vocabulary: the target's id of each draft id."""

    @property
    def vocab(self) -> VocabShards:
        """The part of the head's vocabulary that this rank's logits cover."""

    def first(self, batch: DraftPass, target_TD: Tensor) -> Tensor:
        """Hidden states of the first pass, of all entries or of `batch.inputs.wanted`."""

    def next(self, inputs: ForwardInputs, hidden_BD: Tensor) -> Tensor:
        """Hidden states of the next draft; `hidden_BD` are those of the draft before."""

    def logits(self, hidden_BD: Tensor) -> Tensor: ...


@dataclass(slots=True)
class AutoregressiveDrafter:
    """Makes drafts one by one, each from the one before."""

    head: DraftHead
    max_k: int
    sample_method: str = "greedy"  # the config's draft_sample_method

    @property
    def is_probabilistic(self) -> bool:
        return self.sample_method == "probabilistic"

    @property
    def lookahead(self) -> int:
        # The sampled token lies one past the window, and draft K is never fed to the model.
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
        if batch is None or not (len(batch.inputs.token_T) or step.is_joint):
            return
        hidden_TD = head.first(batch, step.feature_TD)
        if not step.k or not (len(step.slot_B) or step.is_joint):
            return  # the first pass still ran, so that the head's KV has no gaps
        hidden_BD, slot_B = batch.of_rows(hidden_TD), step.slot_B
        draft_BK = slot_B.new_full((len(slot_B), step.k), -1, dtype=torch.int32)
        is_drawn = self.sample_method != "greedy"
        for j in range(step.k):
            count = step.num_drafting(j)
            if not (count or step.is_joint):
                break  # rows that wanted more have ended
            if j:
                token_B = draft_BK[:count, j - 1]
                inputs = step.next(j, token_B, group_size, is_shifted=is_shifted)
                hidden_BD = head.next(inputs, hidden_BD[:count])
            draft_BK[:count, j] = propose_tokens(
                head.logits(hidden_BD),
                slot_B[:count],
                step.position_B(j) if is_drawn else None,
                j,
                step.slots,
                draft_to_target_ids=head.draft_to_target_ids,
                vocab=head.vocab,
            )
        step.store(draft_BK, is_onehot=not self.is_probabilistic)


@dataclass(slots=True)
class DraftModelHead:
    """A separate, smaller causal LM with the target's vocabulary, or a part of it."""

    model: Decoder
    layer_pages: Sequence[LayerStorage]
    # Of another vocabulary. Draft ids that the target has not are masked: 0 or -inf by draft id.
    draft_to_target_ids: Tensor | None = None
    target_to_draft_ids: Tensor | None = None
    mask_V: Tensor | None = None

    is_shifted = False
    tap_ids = ()

    @classmethod
    def of_other_vocabulary(
        cls,
        model: Decoder,
        layer_pages: Sequence[LayerStorage],
        pairs: Sequence[tuple[int, int]],
        unknown_id: int,
        sizes: tuple[int, int],
    ) -> DraftModelHead:
        """`pairs`: (target id, draft id) of shared tokens; the model reads others as `unknown_id`.
        `sizes`: of the target's and the draft's vocabulary."""
        target_P, draft_P = torch.tensor(pairs).T
        to_draft_V = torch.full((sizes[0],), unknown_id).index_copy_(0, target_P, draft_P)
        to_target_V = torch.zeros(sizes[1], dtype=torch.int64).index_copy_(0, draft_P, target_P)
        mask_V = torch.full((sizes[1],), -torch.inf).index_fill_(0, draft_P, 0.0)
        local_V = mask_V[model.vocab.start : model.vocab.stop]
        device = model.rotation.device
        tables = (t.to(device) for t in (to_target_V, to_draft_V, local_V))
        return cls(model, layer_pages, *tables)

    @property
    def vocab(self) -> VocabShards:
        return self.model.vocab

    @property
    def group_size(self) -> int:
        return self.model.spec.group_size

    def first(self, batch: DraftPass, target_TD: Tensor) -> Tensor:
        return self.next(batch.inputs, target_TD)

    def next(self, inputs: ForwardInputs, hidden_BD: Tensor) -> Tensor:
        if self.target_to_draft_ids is not None:
            token_T = self.target_to_draft_ids.index_select(0, inputs.token_T)
            inputs = replace(inputs, token_T=token_T.to(inputs.token_T.dtype))
        return self.model.forward(inputs, self.layer_pages)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        logits_BV = self.model.logits(hidden_BD)
        return logits_BV if self.mask_V is None else logits_BV + self.mask_V


@dataclass(slots=True)
class FeatureHead:
    """EAGLE and MTP: reads the target's features in the first pass, then its own."""

    model: HeadModel
    layer_pages: Sequence[LayerStorage]

    is_shifted = True

    @property
    def group_size(self) -> int:
        return self.model.stack.spec.group_size

    @property
    def tap_ids(self) -> tuple[int, ...]:
        return self.model.tap_ids

    @property
    def draft_to_target_ids(self) -> Tensor | None:
        return self.model.draft_to_target_ids

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
