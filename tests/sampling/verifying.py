"""One call from logits to emitted tokens, as a step makes it: verify, then settle the windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.logprobs.reference import LogprobResults
from paceline.kernels.processors.reference import LateBits
from paceline.kernels.rows import WindowRows
from paceline.kernels.verify.reference import Limits, settle
from paceline.sampling.custom import CustomProcessors
from paceline.sampling.verify import Extras, SamplingMode, Synthetic, verify
from paceline.state.slots import Slots

MOST_LOGPROBS = 40


@dataclass
class Accepted:
    """What each row emits."""

    token_BW: Tensor
    count_B: Tensor
    done_B: Tensor
    num_drafts_B: Tensor
    num_accepted_B: Tensor
    ids_BWT: Tensor
    values_BWT: Tensor
    rank_BW: Tensor


def accept(
    logits_NV: Tensor,
    windows: WindowRows,
    slots: Slots,
    *,
    mode: SamplingMode = SamplingMode.FULL,
    synthetic: Synthetic | None = None,
    is_block: bool = False,
    custom: CustomProcessors | None = None,
    late: LateBits | None = None,
) -> Accepted:
    """The logits stay as they are."""
    shape = (1, len(windows.slot_B), windows.width)
    results = LogprobResults(
        torch.full((*shape, 1 + MOST_LOGPROBS), -1, dtype=torch.int32),
        torch.zeros(*shape, 1 + MOST_LOGPROBS),
        torch.zeros(shape, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    )
    verdicts = verify(
        logits_NV.clone(),
        windows,
        slots,
        mode=mode,
        synthetic=synthetic,
        is_block=is_block,
        extras=Extras(custom, late, results),
    )
    tables = (slots.eos_ids_SE, slots.stop_ids_SE, slots.min_len_S, slots.max_len_S)
    limits = Limits(*(t.numpy() for t in tables))
    settled = settle(verdicts, windows, limits)
    tensors = [torch.from_numpy(array) for array in settled]
    return Accepted(*tensors, *(t[0] for t in results[:3]))


def late_bits(bits_NX: Tensor, windows: WindowRows) -> LateBits:
    """A mask for every position of windows of one width."""
    batch = len(windows.slot_B)
    index_B = torch.arange(batch, dtype=torch.int32)
    return LateBits(index_B, bits_NX.view(batch, windows.width, -1))
