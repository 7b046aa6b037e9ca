"""Gated delta rule behind a short convolution, over rows of slots. In torch.

The recurrent state of a slot covers its first `state_len` positions and never a rejected draft.
Inputs of the last positions are kept beside it, by position, as a KV cache with a small window:
the convolution reads them, and accepted drafts of the last step are replayed from them.

Shape letters: T entries, B rows, S slots, C channels of the convolution (all queries, all keys, all
values), P = C + 2 N columns of a kept input, N value heads, K and V sizes of a key and a value,
R positions kept, J = taps of the convolution, E snapshots, M marks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

NORM_EPS = 1e-6  # of the unit length of queries and keys


class DeltaSizes(NamedTuple):
    """Of one rank's heads. Value head n reads key head n // (num_value_heads / num_key_heads)."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_size: int = 4  # taps: a position and those before it

    @property
    def channels(self) -> int:
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size

    @property
    def width(self) -> int:
        """Columns of an input: channels, then b and a of every value head."""
        return self.channels + 2 * self.num_value_heads


class DeltaWeights(NamedTuple):
    conv_CJ: Tensor  # the tap of the position itself is the last
    decay_N: Tensor  # fp32: -exp(A_log)
    bias_N: Tensor  # fp32: dt_bias


class DeltaState(NamedTuple):
    """One layer's state of all slots, and its snapshots."""

    state_SNVK: Tensor  # fp32
    input_SRP: Tensor  # raw inputs: position p at p % R
    saved_state_ENVK: Tensor  # fp32; E may be 0
    saved_input_EJP: Tensor  # of the J - 1 positions before the snapshot's length, oldest first


class DeltaRows(NamedTuple):
    """What a pass computes of each slot. Rows without a query change nothing.

    Row b computes positions start ... start + query_len - 1. The first `committed` of them are
    final; drafts follow. Positions state_len ... start - 1 were accepted since the state was
    written: they are replayed first. When the state has passed exactly mark_len positions, it is
    copied to snapshot mark_entry.
    """

    slot_B: Tensor
    row_start_B: Tensor  # first entry
    query_len_B: Tensor
    start_B: Tensor
    committed_B: Tensor
    state_len_B: Tensor  # 0: the state is zero, whatever the slot held before
    mark_len_BM: Tensor  # -1: no mark
    mark_entry_BM: Tensor
    max_query_len: int  # no row of this shape has more queries


def num_kept(max_k: int, conv_size: int) -> int:
    """R: after a step the window's drafts and the taps before them; the next step may write its
    own window while it reads those."""
    return 2 * max_k + conv_size


def delta_rule(
    input_TP: Tensor, weights: DeltaWeights, sizes: DeltaSizes, state: DeltaState, rows: DeltaRows
) -> Tensor:
    """[T, N * V]: what each entry reads of the state, before norm and gate. 0 between rows.

    Writes the state after the committed positions, the kept inputs, and marked snapshots.
    `input_TP` may have gaps between its rows.
    """
    return apply_rows(1, _token, input_TP, weights, sizes, state, rows)


class Heads(NamedTuple):
    """Of I positions, in fp32. Queries and keys are those of the value heads."""

    query_INK: Tensor
    key_INK: Tensor
    value_INV: Tensor
    log_decay_IN: Tensor
    beta_IN: Tensor


def _token(state_NVK: Tensor, heads: Heads) -> Tensor:
    """Apply one position to the state in place; what it reads."""
    query_NK, key_NK, value_NV, log_decay_N, beta_N = (x[0] for x in heads)
    state_NVK *= log_decay_N.exp()[:, None, None]
    read_NV = (state_NVK @ key_NK[:, :, None])[..., 0]
    delta_NV = (value_NV - read_NV) * beta_N[:, None]
    state_NVK += delta_NV[:, :, None] * key_NK[:, None, :]
    return (state_NVK @ query_NK[:, :, None])[None, ..., 0]


def apply_rows(
    most: int,
    advance: Callable[[Tensor, Heads], Tensor],
    input_TP: Tensor,
    weights: DeltaWeights,
    sizes: DeltaSizes,
    state: DeltaState,
    rows: DeltaRows,
) -> Tensor:
    """By an `advance` that takes up to `most` positions at once. Tests have one for chunks."""
    width = sizes.num_value_heads * sizes.value_size
    out_TV = input_TP.new_zeros(len(input_TP), width)
    for b, count in enumerate(rows.query_len_B.tolist()):
        if not count:
            continue
        first = int(rows.row_start_B[b])
        own_QP = input_TP[first : first + count]
        slot, start, state_len = (int(x[b]) for x in (rows.slot_B, rows.start_B, rows.state_len_B))
        num_final = start + int(rows.committed_B[b])  # positions of the state that is written
        kept_RP, num_taps = state.input_SRP[slot], sizes.conv_size - 1
        before = torch.arange(state_len - num_taps, start)
        old_P = kept_RP[before % len(kept_RP)].masked_fill((before < 0)[:, None], 0)
        input_QP = torch.cat((old_P, own_QP))  # from position state_len - num_taps on
        heads = prepare(input_QP, weights, sizes)
        state_NVK = torch.zeros_like(state.state_SNVK[slot])
        if state_len:
            state_NVK.copy_(state.state_SNVK[slot])
        marks = dict(zip(rows.mark_len_BM[b].tolist(), rows.mark_entry_BM[b].tolist(), strict=True))
        out_QNV = torch.zeros_like(heads.value_INV)
        # Ends where the state is wanted, and after `most` positions.
        lengths = {*range(state_len, start + count, most), num_final, start + count}
        lengths |= {x for x in marks if state_len < x <= num_final}
        for begin, end in pairwise(sorted(x - state_len for x in lengths if x >= state_len)):
            part = Heads(*(x[begin:end] for x in heads))
            out_QNV[begin:end] = advance(state_NVK, part)
            length = state_len + end
            if length == num_final:
                state.state_SNVK[slot] = state_NVK
            if length <= num_final and length in marks:
                state.saved_state_ENVK[marks[length]] = state_NVK
                state.saved_input_EJP[marks[length]] = input_QP[end : end + num_taps]
        kept = range(max(start, num_final - num_taps), start + count)
        kept_RP[torch.tensor(kept) % len(kept_RP)] = own_QP[kept.start - start :].to(kept_RP.dtype)
        out_TV[first : first + count] = out_QNV[start - state_len :].flatten(1).to(out_TV.dtype)
    return out_TV


def prepare(input_QP: Tensor, weights: DeltaWeights, sizes: DeltaSizes) -> Heads:
    """Of each position but the first conv_size - 1."""
    num_keys, num_values = sizes.num_key_heads, sizes.num_value_heads
    key_width, channels = num_keys * sizes.key_size, sizes.channels
    window_QCJ = input_QP[:, :channels].float().unfold(0, sizes.conv_size, 1)
    mixed_QC = silu((window_QCJ * weights.conv_CJ.float()).sum(2))
    query, key, value = mixed_QC.split((key_width, key_width, channels - 2 * key_width), dim=1)

    def per_value_head(x_QK: Tensor) -> Tensor:
        x_QNK = x_QK.unflatten(1, (num_keys, sizes.key_size))
        unit: Tensor = x_QNK * torch.rsqrt(x_QNK.square().sum(-1, keepdim=True) + NORM_EPS)
        return unit.repeat_interleave(num_values // num_keys, dim=1)

    gates_QN = input_QP[sizes.conv_size - 1 :, channels:].float()
    b_QN, a_QN = gates_QN.split((num_values, num_values), dim=1)
    return Heads(
        per_value_head(query) * sizes.key_size**-0.5,
        per_value_head(key),
        value.unflatten(1, (num_values, sizes.value_size)),
        weights.decay_N * softplus(a_QN + weights.bias_N),
        torch.sigmoid(b_QN),
    )


def gated_norm(
    out_TV: Tensor, gate_TV: Tensor, norm_V: Tensor, eps: float, is_sigmoid: bool
) -> Tensor:
    """Each head's RMS norm times silu (or sigmoid) of its gate, in fp32: [T, N * V] of the gate's
    type. `norm_V` is that of every head. The gate's rows may have gaps."""
    out_TNV = out_TV.float().unflatten(1, (-1, len(norm_V)))
    normed_TV = torch.rms_norm(out_TNV, norm_V.shape, norm_V.float(), eps).flatten(1)
    gate = torch.sigmoid if is_sigmoid else silu
    return (normed_TV * gate(gate_TV.float())).to(gate_TV.dtype)
