"""Log probabilities of prompt tokens, for requests that asked: logits in slices, never whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.logprobs.reference import token_logprobs
from paceline.kernels.step_rows import StepRows
from paceline.models.decoder import Decoder
from paceline.step import Ints, SlotInit, StepPlan, TokenLogprobs

_SLICE_ROWS = 64  # bounds the memory: 64 x vocabulary of fp32 logits


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What the host keeps of a request that wants its prompt scored."""

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
    rows: StepRows,
    hidden_TD: Tensor,
) -> list[TokenLogprobs]:
    """One entry per plan row whose chunk holds prompt positions; position p scores token p + 1.

    A chunk's positions are never a guess, so the host knows them. Reads the device.
    """
    starts = rows.row_start_B.tolist()
    plan_rows = range(len(starts)) if rows.plan_row_B is None else rows.plan_row_B.tolist()
    out = []
    for first, row in zip(starts, plan_rows, strict=True):
        scores = scores_B[row] if row < len(scores_B) else None
        if scores is None:
            continue
        count = int(plan.query_len_B[row])
        start = int(plan.length_bound_B[row]) - count
        if start >= scores.last:
            continue
        end = min(start + count, scores.last)
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
