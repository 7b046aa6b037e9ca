"""What kernels share that spread one logits row over several programs: chunks, tickets, looks.

A row is cut into chunks by the vocabulary alone, so its result has the same bits in any batch.
Programs leave their part in memory; whichever comes last puts the parts together, so no kernel
waits for another program. Tickets are shared by all such kernels of a device: run them on one
stream.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_CHUNK = 4096
MOST_ROWS = 1 << 17
NUM_WARPS = 8


class Split(NamedTuple):
    """How a row is cut."""

    chunk: int  # a power of two
    num_chunks: int
    parts: int  # num_chunks, up to a power of two

    @classmethod
    def of(cls, vocab_size: int) -> Split:
        chunk = min(MOST_CHUNK, max(16, triton.next_power_of_2(vocab_size)))
        num_chunks = triton.cdiv(vocab_size, chunk)
        return cls(chunk, num_chunks, triton.next_power_of_2(num_chunks))


class Logits(NamedTuple):
    """Logits as kernels take them."""

    at_NV: Tensor
    row_stride: int
    vocab_size: int

    @classmethod
    def of(cls, logits_NV: Tensor) -> Logits:
        assert logits_NV.stride(1) == 1
        return cls(logits_NV, logits_NV.stride(0), logits_NV.shape[1])


@cache
def tickets(device: torch.device) -> Tensor:
    """int32 [MOST_ROWS], zero between kernels: 512 KiB for each device, once."""
    return kept_tensor(0, MOST_ROWS, device=device)


def kept_tensor(value: int, *shape: int, device: torch.device) -> Tensor:
    """int32, for all steps: a graph that made it itself would take it along when it goes."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("A kernel's lasting memory is missing: run the step once, then capture.")
    return torch.full(shape, value, dtype=torch.int32, device=device)


@triton.jit
def logits_row(windows, position, width):
    """The logits row of a window position; positions count through windows of one width."""
    return tl.load(windows.first_B + position // width) + position % width


@triton.jit
def row_at(logits, row):
    """Where a row of the logits begins."""
    return logits.at_NV + row.to(tl.int64) * logits.row_stride


@triton.jit
def own_draft(windows, batch_row, j, width):
    """The draft that window position j verifies; -1 at the last position."""
    return tl.load(windows.draft_BK + batch_row * (width - 1) + j, j + 1 < width, -1)


@triton.jit
def is_used(windows, batch_row, j, slot, mask):
    """Whether a window has position j, and its slot the feature of the mask."""
    has_feature = (tl.load(mask.features_S + slot) & mask.bit) != 0
    return has_feature & (j < tl.load(windows.width_B + batch_row))


@triton.jit
def is_last(ticket_N, row, NUM_CHUNKS: tl.constexpr):
    """Whether every other program of the row has left its part. Resets the ticket."""
    arrived = NUM_CHUNKS - 1
    if NUM_CHUNKS > 1:
        tl.debug_barrier()  # all threads' stores come before the one thread's ticket
        arrived = tl.atomic_add(ticket_N + row, 1, sem="acq_rel", scope="gpu")
        if arrived == NUM_CHUNKS - 1:
            tl.store(ticket_N + row, 0)
        tl.debug_barrier()
    return arrived == NUM_CHUNKS - 1


@triton.jit
def best_of(value, index):
    """The largest value and its index; of equals the first. NaN counts as +inf."""
    value = tl.where(value == value, value, float("inf"))
    best, place = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    return best, tl.sum(tl.where(tl.arange(0, value.shape[0]) == place, index, 0))


@triton.jit
def best_part(value_NC, index_NC, row, NUM_CHUNKS: tl.constexpr, PARTS: tl.constexpr):
    """`best_of` over what the programs of a row left, which lies in the order of their tokens."""
    part = tl.arange(0, PARTS)
    at = row * NUM_CHUNKS + part
    value = tl.load(value_NC + at, part < NUM_CHUNKS, other=float("-inf"), cache_modifier=".cg")
    index = tl.load(index_NC + at, part < NUM_CHUNKS, other=0, cache_modifier=".cg")
    return best_of(value, index)


@triton.jit
def sharpness(temperature):
    """What turns a difference of logits into the power of two that it stands for."""
    return 1.4426950408889634 / temperature


@triton.jit
def ordered_bits(value):
    """int32 in the order of the floats; -0.0 and 0.0 are one."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_ordered_bits(bits):
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
