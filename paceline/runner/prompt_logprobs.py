"""Log probabilities of prompt tokens, for requests that asked: logits in slices, never whole."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.logprobs import token_logprobs
from paceline.models.decoder import Decoder
from paceline.runner.inputs import StepInputs
from paceline.state.slots import Slots
from paceline.step import TokenLogprobs

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
            parts = [
                token_logprobs(model.logits(rows), targets, int(wanted_B[i]))
                for rows, targets in zip(
                    torch.split(rows_TD, _SLICE_ROWS),
                    torch.split(target_T, _SLICE_ROWS),
                    strict=True,
                )
            ]
            ids, values, rank = (torch.cat(part) for part in zip(*parts, strict=True))
            out.append(
                TokenLogprobs(int(inputs.row_B[i]), ids.numpy(), values.numpy(), rank.numpy())
            )
        offset += count
    return out
