"""All layers of the common decoder in one call: the other vector kernels, launched from machine code.

Same kernels, same numbers as the loop in models/decoder; but Python is entered once for a forward,
not ten times for a layer, and the GIL is free all the while.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.kernels.activation_numba import GATE_ROWS, launch_gate
from paceline.kernels.attention import AttentionBatch
from paceline.kernels.attention_numba import ATTEND, launch_attention
from paceline.kernels.matmul import PanelWeight
from paceline.kernels.matmul_numba import launch_product, num_blocks, product_body
from paceline.kernels.norm_numba import NORM_ROWS, launch_norm
from paceline.kernels.numba_jit import jit
from paceline.kernels.numba_simd import load_i64
from paceline.kernels.numba_team import team
from paceline.kernels.numba_tile import ADD_PRODUCT
from paceline.kernels.rope import HeadNorms
from paceline.kernels.rope_numba import PLACE_TOKENS, launch_place

# Words of a layer in the table of addresses: four norms, then the linears in order of use.
_NORM_WORDS, _LINEAR_WORDS, _NUM_LINEARS = 4, 5, 4
_LAYER_BYTES = 8 * (_NORM_WORDS + _LINEAR_WORDS * _NUM_LINEARS)
_QKV, _O, _GATE_UP, _DOWN = (8 * (_NORM_WORDS + _LINEAR_WORDS * i) for i in range(_NUM_LINEARS))

Addresses = npt.NDArray[np.int64]


class LayerTensors(NamedTuple):
    """What a layer is made of."""

    input_norm: Tensor
    post_norm: Tensor
    head_norms: HeadNorms | None
    linears: tuple[PanelWeight, ...]  # qkv, o, gate_up, down


class Shape(NamedTuple):
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
        for weight in layer.linears:
            row += [product_body(weight.kind), *weight.addresses, num_blocks(weight), weight.width]
        rows.append(row)
    return np.array(rows, np.int64)


def page_table(pages: list[tuple[Tensor, Tensor]]) -> Addresses:
    """Where each layer's keys and values are."""
    return np.array([[key.data_ptr(), value.data_ptr()] for key, value in pages], np.int64)


@jit
def _linear(team: int, layer: int, linear: int, x: int, x_bytes: int, num_rows: int, out: int) -> None:
    at = layer + linear
    launch_product(
        team,
        (load_i64(at), ADD_PRODUCT_AT(team)),
        (x, x_bytes, num_rows),
        (load_i64(at + 8), load_i64(at + 16), load_i64(at + 24)),
        out,
        load_i64(at + 32),
    )
