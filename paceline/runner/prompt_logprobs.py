"""Log probabilities of prompt tokens, for requests that asked: logits in slices, never whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.logprobs import token_logprobs
from paceline.models.decoder import Decoder
from paceline.runner.inputs import StepInputs
from paceline.state.slots import Slots
from paceline.step import Ints, SlotInit, StepPlan, TokenLogprobs

_SLICE_ROWS = 64  # bounds the memory: 64 x vocabulary of fp32 logits


def prompt_logprobs(
    model: Decoder, slots: Slots, inputs: StepInputs, hidden_TD: Tensor
) -> list[TokenLogprobs]:
    """One entry per row whose chunk holds prompt positions; position p scores token p + 1."""
    wanted_B = slots.num_prompt_logprobs_S.numpy()[inputs.slot_B]
    out: list[TokenLogprobs] = []
    if not (wanted_B >= 0).any():
        return out
    offset = 0
    for i, slot in enumerate(inputs.slot_B.tolist()):
        start, count = int(inputs.start_B[i]), int(inputs.query_len_B[i])
        end = min(start + count, int(slots.prompt_len_S[slot]) - 1)
        if wanted_B[i] >= 0 and end > start:
            rows_TD = hidden_TD[offset : offset + end - start]
            target_T = slots.tokens_SL[slot, start + 1 : end + 1].long()
            row = int(inputs.row_B[i])
            out.append(_scored(model, row, rows_TD, target_T, int(wanted_B[i])))
        offset += count
    return out


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What the host keeps of a request that wants its prompt scored, with fixed shapes."""

    tokens: Ints
    last: int  # positions before this one predict a prompt token
    num_top: int

    @classmethod
    def of(cls, init: SlotInit) -> PromptScores | None:
        wanted = init.request.params.prompt_logprobs
        return None if wanted is None else cls(init.tokens, init.prompt_len - 1, wanted)


def score_prompts(
    model: Decoder,
    plan: StepPlan,
    scores_B: Sequence[PromptScores | None],
    row_start_B: Sequence[int],
    hidden_TD: Tensor,
) -> list[TokenLogprobs]:
    """`prompt_logprobs` by what the host knows: a chunk's positions are never a guess."""
    out = []
    for row, scores in enumerate(scores_B):
        count = int(plan.query_len_B[row])
        start = int(plan.length_bound_B[row]) - count
        if scores is None or start >= scores.last:
            continue
        end = min(start + count, scores.last)
        first = row_start_B[row]
        target_T = torch.from_numpy(scores.tokens[start + 1 : end + 1]).to(hidden_TD.device)
        out.append(
            _scored(model, row, hidden_TD[first : first + end - start], target_T, scores.num_top)
        )
    return out


def _scored(
    model: Decoder, row: int, hidden_TD: Tensor, target_T: Tensor, num_top: int
) -> TokenLogprobs:
    slices = zip(hidden_TD.split(_SLICE_ROWS), target_T.split(_SLICE_ROWS), strict=True)
    logits = model.vocab.gather  # of all ids, on every rank
    parts = [token_logprobs(logits(model.logits(h)), t.long(), num_top) for h, t in slices]
    ids, values, rank = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    return TokenLogprobs(row, ids.numpy(), values.numpy(), rank.numpy())
