"""Where min_p, top_k and top_p cut each row, without sorting it: five kernels.

Drafts and rejection need the mass that is kept; a mere draw does without (`draw`).
`survey` finds the best token and the total mass, `guess` tries from a sample of the row to tell a
few values around the cut, `weigh` counts and weighs exactly what lies above each of them. Then the
cut is known but for the few values between two of them: `gather` collects those and `search` finds
the cut itself. A bad guess costs time, no token. All compare logits as they are: a temperature
changes masses, not the order. Float sums run in an order that the vocabulary alone decides, the
others are integers.

Shape letters: B rows, W window positions, N = B * W logits rows, V vocabulary, S slots, C chunks
of a row, G values that are tried, L values that are gathered.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.rows import WindowRows
from paceline.kernels.sampling.reference import SlotKnobs
from paceline.kernels.sampling.triton.chunks import (
    MOST_ROWS,
    NUM_WARPS,
    Logits,
    Split,
    best_of,
    is_last,
    logits_row,
    row_at,
    sharpness,
    tickets,
)
from paceline.kernels.sampling.triton.guess import guess

# What is known of a row.
SETTLED = tl.constexpr(0)  # unused, greedy or broken: its token is final
CUT = tl.constexpr(1)  # its threshold
OPEN = tl.constexpr(2)  # values around its threshold

TRIED = 16
GATHERED = 4096
_SAMPLED = 1024
_GRID = 32


class Cuts(NamedTuple):
    """What is known of each row before it is drawn. A row of 128256 tokens takes 21 KiB."""

    token_N: Tensor  # int32: the best one; this and the next by logits row
    bad_N: Tensor  # bool
    # All else by window position.
    state_N: Tensor  # int32: SETTLED, CUT or OPEN
    best_N: Tensor  # float32: the best logit
    threshold_N: Tensor  # float32: no token with a logit below it is kept
    mass_N: Tensor  # float32: sum of exp((logit - best) / T): of all, then of kept tokens
    part_value_NC: Tensor  # float32
    part_index_NC: Tensor  # int32
    part_mass_NC: Tensor  # float32
    tried_NG: Tensor  # float32
    count_NCG: Tensor  # int32
    mass_NCG: Tensor  # float32
    bracket_N4: Tensor  # float32: around the cut of top_k (low, high) and of top_p
    bracket_mass_N4: Tensor  # float64: mass at or above each of them
    above_N: Tensor  # int32: tokens at or above the upper end of top_k's bracket
    gathered_NL: Tensor  # float32
    num_gathered_N: Tensor  # int32

    @classmethod
    def empty(cls, num_rows: int, num_logits: int, split: Split, device: torch.device) -> Cuts:
        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((num_rows, *shape), dtype=dtype, device=device)

        i32, parts = torch.int32, split.num_chunks
        return cls(
            token_N=torch.empty(num_logits, dtype=i32, device=device),
            bad_N=torch.empty(num_logits, dtype=torch.bool, device=device),
            state_N=new(dtype=i32),
            best_N=new(),
            threshold_N=new(),
            mass_N=new(),
            part_value_NC=new(parts),
            part_index_NC=new(parts, dtype=i32),
            part_mass_NC=new(parts),
            tried_NG=new(TRIED),
            count_NCG=new(parts, TRIED, dtype=i32),
            mass_NCG=new(parts, TRIED),
            bracket_N4=new(4),
            bracket_mass_N4=new(4, dtype=torch.float64),
            above_N=new(dtype=i32),
            gathered_NL=new(min(GATHERED, split.chunk * split.num_chunks)),
            num_gathered_N=new(dtype=i32),
        )


def begin_cuts(logits_NV: Tensor, windows: WindowRows, knobs: SlotKnobs) -> Cuts:
    """The best token of each row, whether it is unusable, and two values around its threshold."""
    num_rows, vocab_size = windows.num_positions, logits_NV.shape[1]
    assert num_rows <= MOST_ROWS
    split = Split.of(vocab_size)
    cuts = Cuts.empty(num_rows, len(logits_NV), split, logits_NV.device)
    grid = (num_rows * split.num_chunks,)
    where = (Logits.of(logits_NV), windows, windows.width, knobs, cuts)
    ticket_N = tickets(logits_NV.device)
    sizes = {
        "CHUNK": split.chunk,
        "NUM_CHUNKS": split.num_chunks,
        "PARTS": split.parts,
        "TRIED": TRIED,
        "num_warps": NUM_WARPS,
    }
    _survey_kernel[grid](*where, ticket_N, **sizes)
    if split.num_chunks > 1:
        _guess_kernel[(num_rows,)](
            *where, SAMPLED=_SAMPLED, GRID=_GRID, TRIED=TRIED, num_warps=NUM_WARPS
        )
    _weigh_kernel[grid](*where, ticket_N, **sizes)
    return cuts


@triton.jit(do_not_specialize=["width"])
def _survey_kernel(  # noqa: PLR0913
    logits,
    windows,
    width,
    knobs,
    cuts,
    ticket_N,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    TRIED: tl.constexpr,
):
    row, chunk = tl.program_id(0) // NUM_CHUNKS, tl.program_id(0) % NUM_CHUNKS
    if row % width >= tl.load(windows.width_B + row // width):
        if chunk == 0:
            tl.store(cuts.state_N + row, SETTLED)
        return
    slot = tl.load(windows.slot_B + row // width)
    at_logits = logits_row(windows, row, width)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    is_token = place < logits.vocab_size
    logit = tl.load(row_at(logits, at_logits) + place, is_token, float("-inf")).to(tl.float32)
    temperature, min_p = tl.load(knobs.temperature_S + slot), tl.load(knobs.min_p_S + slot)
    top_k, top_p = tl.load(knobs.top_k_S + slot), tl.load(knobs.top_p_S + slot)
    sharp = sharpness(tl.maximum(temperature, 1e-20))
    logit = tl.where(logit == logit, logit, float("inf"))
    best, token = tl.max(logit, 0, return_indices=True, return_indices_tie_break_left=True)
    token += chunk * CHUNK
    # Against its own best, if that is a number: the row's is not known yet.
    base = tl.where(tl.abs(best) < float("inf"), best, 0.0)
    mass = tl.sum(tl.exp2((logit - base) * sharp))
    part = row * NUM_CHUNKS + chunk
    if NUM_CHUNKS > 1:
        tl.store(cuts.part_value_NC + part, best)
        tl.store(cuts.part_index_NC + part, token)
        tl.store(cuts.part_mass_NC + part, mass)
    if is_last(ticket_N, row, NUM_CHUNKS):
        if NUM_CHUNKS > 1:
            parts = tl.arange(0, PARTS)
            at, is_part = row * NUM_CHUNKS + parts, parts < NUM_CHUNKS
            values = tl.load(cuts.part_value_NC + at, is_part, float("-inf"), cache_modifier=".cg")
            indices = tl.load(cuts.part_index_NC + at, is_part, 0, cache_modifier=".cg")
            masses = tl.load(cuts.part_mass_NC + at, is_part, 0.0, cache_modifier=".cg")
            best, token = best_of(values, indices)
            masses = tl.where(values > float("-inf"), masses, 0.0)
            mass = tl.sum(masses * tl.exp2((values - best) * sharp))
        is_bad = (best == float("inf")) | (best == float("-inf"))
        is_drawn = (temperature > 0) & (is_bad == 0)
        is_open = (top_k > 0) & (top_k < logits.vocab_size) | (top_p < 1) | (min_p > 0)
        # A threshold must never pass the best token, whatever rounding did.
        low = tl.minimum(best + temperature * tl.log(tl.maximum(min_p, 1e-37)), best)
        low = tl.where(min_p > 0, low, float("-inf"))
        state = tl.where(is_drawn, tl.where(is_open, OPEN, CUT), SETTLED)
        tl.store(cuts.token_N + at_logits, token)
        tl.store(cuts.bad_N + at_logits, is_bad)
        tl.store(cuts.best_N + row, best)
        tl.store(cuts.state_N + row, state)
        tl.store(cuts.threshold_N + row, low)
        tl.store(cuts.mass_N + row, mass)
        tl.store(cuts.tried_NG + row * TRIED, low)
        tl.store(cuts.num_gathered_N + row, 0)


@triton.jit(do_not_specialize=["width"])
def _guess_kernel(
    logits,
    windows,
    width,
    knobs,
    cuts,
    SAMPLED: tl.constexpr,
    GRID: tl.constexpr,
    TRIED: tl.constexpr,
):
    row = tl.program_id(0)
    if tl.load(cuts.state_N + row) != OPEN:
        return
    slot = tl.load(windows.slot_B + row // width)
    best, total = tl.load(cuts.best_N + row), tl.load(cuts.mass_N + row)
    tried_G = cuts.tried_NG + row * TRIED
    values = guess(
        *(row_at(logits, logits_row(windows, row, width)), logits.vocab_size),
        *(best, sharpness(tl.load(knobs.temperature_S + slot)), total, tl.load(tried_G)),
        *(tl.load(knobs.top_k_S + slot), tl.load(knobs.top_p_S + slot)),
        *(SAMPLED, GRID, TRIED),
    )
    tl.store(tried_G + tl.arange(0, TRIED), values)


@triton.jit(do_not_specialize=["width"])
def _weigh_kernel(  # noqa: PLR0913
    logits,
    windows,
    width,
    knobs,
    cuts,
    ticket_N,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    TRIED: tl.constexpr,
):
    row, chunk = tl.program_id(0) // NUM_CHUNKS, tl.program_id(0) % NUM_CHUNKS
    if tl.load(cuts.state_N + row) != OPEN:
        return
    slot = tl.load(windows.slot_B + row // width)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = place < logits.vocab_size
    logits_V = row_at(logits, logits_row(windows, row, width))
    logit = tl.load(logits_V + place, inside, other=float("-inf")).to(tl.float32)
    top_k, top_p = tl.load(knobs.top_k_S + slot), tl.load(knobs.top_p_S + slot)
    sharp = sharpness(tl.load(knobs.temperature_S + slot))
    weight = tl.exp2((logit - tl.load(cuts.best_N + row)) * sharp)
    is_limited = (top_k > 0) & (top_k < logits.vocab_size)
    # A row of one chunk was not guessed at; one with both cuts was for both.
    num_tried = tl.where(is_limited & (top_p < 1), TRIED, TRIED // 2)
    num_tried = tl.where(NUM_CHUNKS > 1, num_tried, 1)
    part = (row * NUM_CHUNKS + chunk) * TRIED
    tried_G = cuts.tried_NG + row * TRIED
    g = 0
    while g < num_tried:
        value = tl.load(tried_G + g)
        tl.store(cuts.mass_NCG + part + g, tl.sum(weight * tl.where(logit >= value, 1.0, 0.0)))
        if is_limited:
            is_above = inside & (logit >= value)
            tl.store(cuts.count_NCG + part + g, tl.sum(is_above.to(tl.int32)))
        g += 1
    if is_last(ticket_N, row, NUM_CHUNKS):
        tl.debug_barrier()
        tried = tl.arange(0, TRIED)
        parts = tl.arange(0, PARTS)[:, None]
        at = (row * NUM_CHUNKS + parts) * TRIED + tried[None, :]
        is_part = (parts < NUM_CHUNKS) & (tried[None, :] < num_tried)
        # Counts are stored only where top_k limits the row, and read only there.
        count = tl.sum(tl.load(cuts.count_NCG + at, is_part, other=0, cache_modifier=".cg"), 0)
        masses = tl.load(cuts.mass_NCG + at, is_part, other=0.0, cache_modifier=".cg")
        mass = tl.sum(masses.to(tl.float64), 0)
        values = tl.load(tried_G + tried, tried < num_tried, other=float("inf"))
        top_k = tl.where(is_limited, top_k, 0)
        _enclose(cuts, row, values, count, mass, top_k, top_p.to(tl.float64), TRIED)


@triton.jit
def _enclose(cuts, row, value, count, mass, top_k, top_p, TRIED: tl.constexpr):
    """Of the values tried: the last that keeps enough and the first that does not, for both cuts.

    A bracket whose two ends are equal is empty: its cut is known.
    """
    is_first = tl.arange(0, TRIED) == 0
    low = tl.sum(tl.where(is_first, value, 0.0))
    mass_low = tl.sum(tl.where(is_first, mass, 0.0))
    is_limited = (top_k > 0) & (tl.sum(tl.where(is_first, count, 0)) > top_k)
    covers = count >= top_k
    low_k = tl.where(is_limited, tl.max(tl.where(covers, value, float("-inf"))), low)
    high_k = tl.where(is_limited, tl.min(tl.where(covers, float("inf"), value)), low)
    mass_low_k = tl.min(tl.where(covers, mass, float("inf")))
    mass_low_k = tl.where(is_limited, mass_low_k, mass_low)
    mass_high_k = tl.max(tl.where(covers, 0.0, mass))
    mass_high_k = tl.where(is_limited, mass_high_k, mass_low)
    tl.store(cuts.above_N + row, tl.max(tl.where(covers, 0, count)))
    # The mass that top_p takes its share of lies between those at the ends of top_k's bracket.
    is_nucleus = top_p < 1
    covers = mass >= top_p * mass_low_k
    low_p = tl.where(is_nucleus, tl.max(tl.where(covers, value, float("-inf"))), low)
    mass_low_p = tl.min(tl.where(covers, mass, float("inf")))
    fails = mass < top_p * mass_high_k
    high_p = tl.where(is_nucleus, tl.min(tl.where(fails, value, float("inf"))), low)
    mass_high_p = tl.max(tl.where(fails, mass, 0.0))
    bracket_4, bracket_mass_4 = cuts.bracket_N4 + row * 4, cuts.bracket_mass_N4 + row * 4
    tl.store(bracket_4, low_k)
    tl.store(bracket_4 + 1, high_k)
    tl.store(bracket_4 + 2, low_p)
    tl.store(bracket_4 + 3, high_p)
    tl.store(bracket_mass_4, mass_low_k)
    tl.store(bracket_mass_4 + 1, mass_high_k)
    tl.store(bracket_mass_4 + 2, mass_low_p)
    tl.store(bracket_mass_4 + 3, mass_high_p)
