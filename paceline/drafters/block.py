"""Block drafters: one pass over the new entries and a block of masks gives all K drafts.

The pass has the configured width whatever a step asks for, because drafts of a block may depend on
how many masks follow them. What a step or a request does not want is cut afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.drafters.base import DraftStep
from paceline.models.heads.base import BlockModel
from paceline.sampling.draft import propose_tokens
from paceline.state.recurrent import LayerStorage


@dataclass(slots=True)
class BlockDrafter:
    """See Drafter. Its KV uses the target's page table, like that of every model drafter."""

    model: BlockModel
    layer_pages: Sequence[LayerStorage]
    sample_method: str = "greedy"  # the config's draft_sample_method

    @property
    def is_probabilistic(self) -> bool:
        return self.sample_method == "probabilistic"

    @property
    def max_k(self) -> int:
        return self.model.layout.k

    @property
    def lookahead(self) -> int:
        return self.model.layout.width

    @property
    def reads_features(self) -> bool:
        # Without a shift, KV depends on no later token: pages of the prefix cache are valid as is.
        return self.model.layout.shift > 0

    @property
    def tap_ids(self) -> tuple[int, ...]:
        return self.model.tap_ids

    def propose(self, step: DraftStep) -> None:
        model = self.model
        batch = step.block(model.stack.spec.group_size, model.layout)
        if not len(batch.inputs.token_T) and not step.is_joint:
            return
        hidden_ND = model.forward(batch, step.feature_TD, self.layer_pages)
        if not step.k or not (len(step.slot_B) or step.is_joint):
            return  # the committed entries still ran, so that the drafter's KV has no gaps
        hidden_BKD = hidden_ND.unflatten(0, (-1, model.layout.k))[:, : step.k]
        logits_NV = model.logits(hidden_BKD.flatten(0, 1))
        if self.sample_method != "greedy" or model.chain is not None:
            logits_BKV = logits_NV.unflatten(0, (-1, step.k))
            draft_BK = self._one_by_one(step, hidden_BKD, logits_BKV)
        else:
            # No draft depends on another, so one kernel takes the best of all rows.
            ids = {"draft_to_target_ids": model.draft_to_target_ids}
            draft_N = propose_tokens(
                logits_NV, step.slot_B, None, 0, step.slots, **ids, vocab=model.vocab
            )
            draft_BK = draft_N.unflatten(0, (-1, step.k))
        step.store(draft_BK, is_onehot=not self.is_probabilistic)

    def _one_by_one(self, step: DraftStep, hidden_BKD: Tensor, logits_BKV: Tensor) -> Tensor:
        """Each draft is drawn from a distribution that may depend on the one before it."""
        model, chain, slots = self.model, self.model.chain, step.slots
        is_drawn = self.sample_method != "greedy"
        slot_B = step.slot_B.long()
        newest_B = (step.position_B(0) - 1).clamp(min=0).long()
        previous_B = slots.tokens_SL[slot_B, newest_B]
        draft_BK = slot_B.new_full((len(slot_B), step.k), -1, dtype=torch.int32)
        for j in range(step.k):
            count = step.num_drafting(j)
            logits_BV = logits_BKV[:count, j].contiguous()
            if chain is not None:
                hidden_BD = hidden_BKD[:count, j].contiguous()
                logits_BV = chain(logits_BV, hidden_BD, previous_B[:count])
            previous_B = propose_tokens(
                logits_BV,
                step.slot_B[:count],
                step.position_B(j) if is_drawn else None,
                j,
                slots,
                draft_to_target_ids=model.draft_to_target_ids,
                vocab=model.vocab if chain is None else chain.vocab,
            )
            draft_BK[:count, j] = previous_B
        return draft_BK
