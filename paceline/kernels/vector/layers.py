"""All layers of the common decoder in one call: the vector kernels, launched from machine code.

The kernels and the numbers of the loop in models/decoder; but Python is left once for a forward,
not ten times for a layer, and the GIL is free all the while.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.kernels.attention.numba import ATTEND, launch_attention
from paceline.kernels.attention.reference import AttentionBatch
from paceline.kernels.elementwise.numba import (
    GATE_ROWS,
    NORM_ROWS,
    PLACE_TOKENS,
    launch_gate,
    launch_norm,
    launch_place,
    page_addresses,
    scale_addresses,
)
from paceline.kernels.elementwise.reference import HeadNorms
from paceline.kernels.kv_codes.reference import KvScales
from paceline.kernels.panels.numba import launch_product, num_blocks, product_body
from paceline.kernels.panels.reference import PanelWeight
from paceline.kernels.vector.jit import jit
from paceline.kernels.vector.simd import load_i64
from paceline.kernels.vector.team import team
from paceline.kernels.vector.tile import ADD_PRODUCT

# Words of a layer in the table of addresses: four norms, two scales of fp8 pages, then the linears
# in order of use.
_FIRST_WORDS, _LINEAR_WORDS, _NUM_LINEARS = 6, 5, 4
_LAYER_BYTES = 8 * (_FIRST_WORDS + _LINEAR_WORDS * _NUM_LINEARS)
_QKV, _O, _GATE_UP, _DOWN = (8 * (_FIRST_WORDS + _LINEAR_WORDS * i) for i in range(_NUM_LINEARS))

Addresses = npt.NDArray[np.int64]
_WANTED = np.zeros(1, np.int64)


class LayerTensors(NamedTuple):
    """What a layer is made of."""

    input_norm: Tensor
    post_norm: Tensor
    head_norms: HeadNorms | None
    kv_scales: KvScales | None
    linears: tuple[PanelWeight, ...]  # qkv, o, gate_up, down


class LayerSizes(NamedTuple):
    """Sizes that all layers share."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden: int
    inner: int
    eps: float


def address_table(layers: list[LayerTensors]) -> Addresses:
    """One row per layer. The tensors must outlive it."""
    rows = []
    for layer in layers:
        norms = layer.head_norms
        heads = (0, 0) if norms is None else (norms.query_H.data_ptr(), norms.key_H.data_ptr())
        row = [layer.input_norm.data_ptr(), layer.post_norm.data_ptr(), *heads]
        row += scale_addresses(layer.kv_scales)
        for weight in layer.linears:
            row += [product_body(weight.kind), *weight.addresses, num_blocks(weight), weight.width]
        rows.append(row)
    return np.array(rows, np.int64)


def page_table(pages: list[tuple[Tensor, Tensor]]) -> Addresses:
    """Where each layer's keys and values are, and the bytes from head to head."""
    return np.array([page_addresses(*layer) for layer in pages], np.int64)


@jit
def _linear(team: int, product: int, linear: int, x: tuple[int, int, int], out: int) -> None:
    """`linear`: its words in the table. `x`: address, bytes from row to row, rows."""
    weight = (load_i64(linear + 8), load_i64(linear + 16), load_i64(linear + 24))
    launch_product(team, (load_i64(linear), product), x, weight, out, load_i64(linear + 32))


@jit
def _run(
    team: int,
    bodies: tuple[int, int, int, int, int],
    tables: tuple[int, int, int, int],
    buffers: tuple[int, ...],
    tokens: tuple[int, int, int],
    rows: tuple[int, int, int, int],
    pages: tuple[int, int, int],
    shape: tuple[tuple[int, int, int, int, int], tuple[float, float]],
) -> None:
    """Residual and delta of the last layer are left in their buffers."""
    norm, place, attend, gate, product = bodies
    layers, kv, num_layers, unwanted = tables
    residual, x, qkv, attended, gate_up, inner, delta = buffers
    rotation, slots, num_tokens = tokens
    page_ids, page_ids_bytes, page_size = pages
    (num_q, num_kv, size, hidden, width), (eps, scale) = shape
    heads_bytes = 4 * (num_q + 2 * num_kv) * size
    for i in range(num_layers):
        if load_i64(unwanted):
            return
        at = layers + i * _LAYER_BYTES
        own = kv + 24 * i
        keys, values, head_bytes = load_i64(own), load_i64(own + 8), load_i64(own + 16)
        scales = (load_i64(at + 32), load_i64(at + 40))
        added = delta if i else 0
        launch_norm(team, norm, (residual, added, load_i64(at), x), num_tokens, hidden, eps)
        _linear(team, product, at + _QKV, (x, 4 * hidden, num_tokens), qkv)
        launch_place(
            team,
            place,
            (qkv, heads_bytes, rotation, slots, num_tokens),
            (keys, values, head_bytes, *scales),
            (load_i64(at + 16), load_i64(at + 24)),
            eps,
            (num_q, num_kv, size),
        )
        launch_attention(
            team,
            (attend, product),
            (qkv, heads_bytes, attended),
            (keys, values, head_bytes, page_size, *scales),
            rows,
            (page_ids, page_ids_bytes),
            (num_q // num_kv, num_kv, size, 1),
            scale,
        )
        _linear(team, product, at + _O, (attended, 4 * num_q * size, num_tokens), delta)
        launch_norm(team, norm, (residual, delta, load_i64(at + 8), x), num_tokens, hidden, eps)
        _linear(team, product, at + _GATE_UP, (x, 4 * hidden, num_tokens), gate_up)
        launch_gate(team, gate, gate_up, inner, num_tokens, width)
        _linear(team, product, at + _DOWN, (inner, 4 * width, num_tokens), delta)


def compile_ahead() -> None:
    """Compile what the first request would else wait for: a run of no layers over no tokens."""
    one = ((1, 1, 1, 1, 1), (1.0, 1.0))
    four = (0, 0, 0, 0)
    _run(team.address, (0,) * 5, (0,) * 4, (0,) * 7, (0, 0, 0), four, four[:3], one)


class Step(NamedTuple):
    """What changes from forward to forward."""

    residual_TD: Tensor  # becomes the residual before the last layer's delta
    rotation_TH: Tensor
    slot_T: Tensor
    batch: AttentionBatch
    unwanted: Addresses | None = None  # not 0: return after the present layer


def run_layers(layers: Addresses, pages: Addresses, shape: LayerSizes, step: Step) -> Tensor:
    """The delta of the last layer, [T, D]."""
    num_tokens = step.residual_TD.shape[0]
    heads = shape.num_heads + 2 * shape.num_kv_heads
    delta_TD = torch.empty(num_tokens, shape.hidden)
    columns = (
        shape.hidden,  # normed
        heads * shape.head_size,
        shape.num_heads * shape.head_size,  # attended
        2 * shape.inner,
        shape.inner,
    )
    scratch = torch.empty(num_tokens * sum(columns))
    at = scratch.data_ptr()
    buffers = []
    for width in columns:
        buffers.append(at)
        at += 4 * num_tokens * width
    batch, unwanted = step.batch, _WANTED if step.unwanted is None else step.unwanted
    _run(
        team.address,
        (NORM_ROWS, PLACE_TOKENS, ATTEND, GATE_ROWS, ADD_PRODUCT),
        (layers.ctypes.data, pages.ctypes.data, len(layers), unwanted.ctypes.data),
        (step.residual_TD.data_ptr(), *buffers, delta_TD.data_ptr()),
        (step.rotation_TH.data_ptr(), step.slot_T.data_ptr(), num_tokens),
        (
            batch.row_start_B.data_ptr(),
            batch.length_B.data_ptr(),
            batch.slot_B.data_ptr(),
            batch.slot_B.shape[0],
        ),
        (batch.table_SP.data_ptr(), 4 * batch.table_SP.stride(0), batch.page_size),
        (shape[:5], (shape.eps, shape.head_size**-0.5)),
    )
    return delta_TD
