"""Host drafts on the GPU: one program per continuation."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.host_drafts import reference
from paceline.kernels.step_rows import SlotTensors

_SLOT = tl.constexpr(reference.SLOT)
_LENGTH = tl.constexpr(reference.LENGTH)
_LEAST = tl.constexpr(reference.LEAST)
_TOKENS = tl.constexpr(reference.TOKENS)


def take_host_drafts(record_RW: Tensor, state: SlotTensors) -> None:
    num_rows, num_words = record_RW.shape
    sizes = state.sizes
    _take_kernel[(num_rows,)](
        *(record_RW, record_RW.stride(0), num_words - reference.TOKENS, state, sizes),
        # One size for all records: Triton compiles once.
        TOKENS=triton.next_power_of_2(2 * sizes.num_drafts + 1),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["row_stride", "num_tokens"])
def _take_kernel(record_RW, row_stride, num_tokens, state, sizes, TOKENS: tl.constexpr):
    words = record_RW + tl.program_id(0) * row_stride
    slot = tl.load(words + _SLOT).to(tl.int64)
    length = tl.load(words + _LENGTH)
    num_emitted = tl.load(state.num_tokens_S + slot) - length
    index = tl.arange(0, TOKENS)
    token = tl.load(words + _TOKENS + index, mask=index < num_tokens, other=-1)
    num_real = tl.sum((token >= 0).to(tl.int32))
    emitted_at = state.tokens_SL + slot * sizes.tokens_stride + length + index
    is_emitted = index < tl.minimum(num_emitted, num_real)
    emitted = tl.load(emitted_at, mask=is_emitted, other=-1)
    num_wrong = tl.sum((is_emitted & (emitted != token)).to(tl.int32))
    is_long = num_real - num_emitted >= tl.load(words + _LEAST)
    takes = (num_emitted >= 0) & is_long & (num_wrong == 0)
    # The draft at each place of the slot: tokens of the record from `num_emitted` on.
    place = num_emitted + index
    is_draft = takes & (place < num_real)
    draft = tl.load(words + _TOKENS + place, mask=is_draft, other=-1)
    stored_at = state.drafts_SK + slot * sizes.drafts_stride + index
    tl.store(stored_at, draft, mask=takes & (index < sizes.num_drafts))
    tl.store(state.drafts_onehot_S + slot, 1, mask=takes)
