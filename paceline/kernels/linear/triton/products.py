"""Matrix products of a few rows in Triton, fused with what would be kernels beside them.

Tiles come from linear/tiles or from the caller; nothing is tuned here.

Kernels are launched before the one in front of them has ended (programmatic dependent launch) and
wait by themselves for what it writes, so that a chain of products keeps the memory busy across its
seams.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear as torch_linear
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.kernels.elementwise.triton import silu_and_mul
from paceline.kernels.fp8.triton.parts import BLOCKS, scales_of
from paceline.kernels.gpu.triton import has_dependent_launches
from paceline.kernels.linear import hopper
from paceline.kernels.linear.reference import SHRINK, HeadPlaces, NormedRows, Product
from paceline.kernels.linear.tiles import Tile, pick_tile
from paceline.kernels.linear.triton.kernels import (
    dot_kernel,
    fma_kernel,
    mma_kernel,
    scale_kernel,
    sum_kernel,
    tma_kernel,
)
from paceline.kernels.linear.triton.parts import ADDED, GATED, HEADS, PLAIN

ENDS = ("plain", "gated", "heads", "added")
_INTERPRETED = triton.knobs.runtime.interpret
_MOST_TICKETS = 1 << 14
# Outputs of a row that one program adds up when a separate kernel does it.
SUMMED = 1024


class Ends(NamedTuple):
    """Pointers that only some products have; a None is compiled away."""

    bias: Tensor | None = None
    squares: Tensor | None = None
    residual: Tensor | None = None
    norm: Tensor | None = None
    squares_out: Tensor | None = None
    rotation: Tensor | None = None
    slot: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    head_stride: int = 0
    partial: Tensor | None = None
    ticket: Tensor | None = None
    # e4m3: see fp8/reference.
    row_scale: Tensor | None = None
    weight_scale: Tensor | None = None


class Cut(NamedTuple):
    """A product and its tile, all tl.constexpr. One kernel serves every row count of a bucket."""

    N: Any
    K: Any
    BLOCK_T: Any
    BLOCK_N: Any
    BLOCK_K: Any
    WARPS: Any
    DEPTH: Any
    SPLITS: Any
    AHEAD: Any
    PARTS: Any
    IS_APART: Any
    END: Any
    HAS_BIAS: Any
    HAS_NORM: Any
    NUM_SQUARES: Any
    WIDTH: Any
    SHRINK: Any
    HEAD: Any
    NUM_Q: Any
    NUM_KV: Any
    SCALES: Any
    IS_DEPENDENT: Any
    IS_GPU: Any


def scale_rows(residual_TD: Tensor, norm_weight_D: Tensor, eps: float, like: Tensor) -> NormedRows:
    num_rows, width = residual_TD.shape
    out_TD = torch.empty_like(residual_TD, dtype=like.dtype)
    squares_T1 = residual_TD.new_empty(num_rows, 1)
    is_dependent = has_dependent_launches()
    scale_kernel[(num_rows,)](
        residual_TD, norm_weight_D, out_TD, squares_T1, D=width,
        WIDTH=triton.next_power_of_2(width), SHRINK_BY=SHRINK.get(like.dtype, 1.0),
        IS_DEPENDENT=is_dependent, **_launch(8 if width > 2048 else 4, is_dependent),
    )  # fmt: skip
    return NormedRows(out_TD, squares_T1, eps)


def linear(
    x_TK: Tensor, product: Product, out_dtype: torch.dtype | None = None, tile: Tile | None = None
) -> Tensor:
    out_TN = x_TK.new_empty(len(x_TK), len(product.weight_NK), dtype=out_dtype or x_TK.dtype)
    multiply(NormedRows(x_TK, None, 0.0), product, out_TN, Ends(), PLAIN, tile)
    return out_TN


def norm_linear(rows: NormedRows, product: Product, tile: Tile | None = None) -> Tensor:
    out_TN = rows.x_TD.new_empty(len(rows.x_TD), len(product.weight_NK))
    multiply(rows, product, out_TN, Ends(), PLAIN, tile)
    return out_TN


def norm_linear_silu(rows: NormedRows, product: Product, tile: Tile | None = None) -> Tensor:
    out_TI = rows.x_TD.new_empty(len(rows.x_TD), len(product.weight_NK) // 2)
    multiply(rows, product, out_TI, Ends(), GATED, tile)
    return out_TI


def linear_silu(x_TK: Tensor, product: Product) -> Tensor:
    if hopper.is_faster(x_TK, product):
        return hopper.linear_silu(x_TK, product)
    return silu_and_mul(torch_linear(x_TK, *product))


def norm_linear_heads(
    rows: NormedRows, product: Product, places: HeadPlaces, tile: Tile | None = None
) -> Tensor:
    out_TN = rows.x_TD.new_empty(len(rows.x_TD), len(product.weight_NK))
    ends = Ends(
        rotation=torch.view_as_real(places.rotation_TH),
        slot=places.slot_T,
        key=places.key_NSH,
        value=places.value_NSH,
        key_scale=places.scales.key_N if places.scales else None,
        value_scale=places.scales.value_N if places.scales else None,
        head_stride=places.key_NSH.stride(0),
    )
    num_kv_heads, _, head_size = places.key_NSH.shape
    multiply(rows, product, out_TN, ends, HEADS, tile, (num_kv_heads, head_size))
    return out_TN


def linear_add(
    x_TK: Tensor,
    product: Product,
    residual_TD: Tensor,
    norm_weight_D: Tensor | None = None,
    eps: float = 0.0,
    tile: Tile | None = None,
) -> NormedRows | None:
    num_rows, num_outputs = residual_TD.shape
    tile = tile or _tile(x_TK, product, ADDED)
    ends = Ends(residual=residual_TD, norm=norm_weight_D)
    out_TD = squares_TP = None
    if norm_weight_D is not None:
        out_TD = x_TK.new_empty(num_rows, num_outputs)
        width = SUMMED if _is_apart(tile, ends, ADDED) else tile.block_n
        squares_TP = residual_TD.new_empty(num_rows, triton.cdiv(num_outputs, width))
    ends = ends._replace(squares_out=squares_TP)
    multiply(NormedRows(x_TK, None, 0.0), product, out_TD, ends, ADDED, tile)
    return None if out_TD is None else NormedRows(out_TD, squares_TP, eps)


def multiply(
    rows: NormedRows,
    product: Product,
    out: Tensor | None,
    ends: Ends,
    end: tl.constexpr,
    tile: Tile | None,
    heads: tuple[int, int] = (1, 2),
) -> None:
    x, weight = rows.x_TD, product.weight_NK
    assert x.is_contiguous()
    assert weight.is_contiguous()
    num_rows, num_outputs = len(x), len(weight)
    tile = tile or _tile(x, product, end)
    ends = ends._replace(bias=product.bias_N, squares=rows.squares_TP)
    cut = _cut(product, tile, ends, end, heads)
    if cut.SCALES.value == BLOCKS.value:
        assert tile.kind in ("dot", "tma")
        assert end.value != GATED.value
        assert 128 % tile.block_k == 0
    blocks_n, blocks_t = triton.cdiv(num_outputs, tile.block_n), triton.cdiv(num_rows, tile.block_t)
    launch = _launch(tile.warps, tile.is_dependent)
    if tile.kind == "fma":
        assert blocks_t == 1
        fma_kernel[(blocks_n,)](x, weight, out, ends, num_rows, rows.eps, cut, **launch)
        return
    grid = (blocks_t, blocks_n, tile.splits)
    is_apart = _is_apart(tile, ends, end)
    if tile.splits > 1:
        size = num_rows * num_outputs
        if not is_apart:
            assert blocks_n * blocks_t <= _MOST_TICKETS
            size = blocks_n * blocks_t * tile.block_t * tile.block_n
            ends = ends._replace(ticket=tickets(x.device))
        partial = torch.empty(size * tile.splits, dtype=torch.float32, device=x.device)
        ends = ends._replace(partial=partial)
    if tile.kind == "tma":
        parts = 2 if end.value == GATED.value else 1
        x_tiles = TensorDescriptor.from_tensor(x, [tile.block_t, tile.block_k])
        block = [1 if tile.block_t < 64 else parts, tile.block_n // parts, tile.block_k]
        w_tiles = TensorDescriptor.from_tensor(weight.unflatten(0, (parts, -1)), block)
        operands = (x_tiles, w_tiles, weight, out, ends, num_rows, rows.eps, cut)
        tma_kernel[grid](*operands, **launch)
    else:
        kernel = mma_kernel if tile.kind == "mma" else dot_kernel
        kernel[grid](x, weight, out, ends, num_rows, rows.eps, cut, **launch)
    if is_apart:
        blocks = (num_rows, triton.cdiv(num_outputs, SUMMED))
        launch = _launch(4, tile.is_dependent)
        sum_kernel[blocks](out, ends, num_rows, cut, BLOCK=SUMMED, **launch)


def _cut(
    product: Product, tile: Tile, ends: Ends, end: tl.constexpr, heads: tuple[int, int]
) -> Cut:
    num_outputs, num_inputs = product.weight_NK.shape
    num_kv_heads, head_size = heads
    num_squares = 0 if ends.squares is None else ends.squares.shape[1]
    depth = tile.depth
    if tile.kind == "fma":
        depth = min(depth, triton.cdiv(num_inputs, tile.block_k))
    elif tile.kind == "mma":
        depth = min(depth, triton.cdiv(num_inputs, tile.warps * tile.splits * tile.block_k))
    ahead, parts = _ahead(tile, num_inputs, product.weight_NK.itemsize)
    values = {
        "N": num_outputs,
        "K": num_inputs,
        "BLOCK_T": tile.block_t,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "WARPS": tile.warps,
        "DEPTH": depth,
        "SPLITS": tile.splits,
        "AHEAD": ahead,
        "PARTS": parts,
        "IS_APART": _is_apart(tile, ends, end),
        "END": end.value,
        "HAS_BIAS": product.bias_N is not None,
        "HAS_NORM": ends.norm is not None,
        "NUM_SQUARES": num_squares,
        "WIDTH": triton.next_power_of_2(max(num_squares, 1)),
        "SHRINK": SHRINK.get(product.weight_NK.dtype, 1.0),
        "HEAD": head_size,
        "NUM_Q": num_outputs - 2 * num_kv_heads * head_size,
        "NUM_KV": num_kv_heads * head_size,
        "SCALES": scales_of(ends.weight_scale, num_outputs).value,
        "IS_DEPENDENT": tile.is_dependent and has_dependent_launches(),
        "IS_GPU": not _INTERPRETED,
    }
    return Cut(**{name: tl.constexpr(value) for name, value in values.items()})


@cache
def tickets(device: torch.device) -> Tensor:
    """Zero between kernels. Ask once before a graph is captured, so that it outlives the graph."""
    return torch.zeros(_MOST_TICKETS, dtype=torch.int32, device=device)


def _tile(x_TK: Tensor, product: Product, end: tl.constexpr) -> Tile:
    num_outputs, num_inputs = product.weight_NK.shape
    shape = (num_outputs, num_inputs, len(x_TK))
    tile = pick_tile(ENDS[end.value], *shape, x_TK.dtype, x_TK.device)
    assert tile is not None, "the table has torch's product for this shape"
    return tile


def _is_apart(tile: Tile, ends: Ends, end: tl.constexpr) -> bool:
    """Whether a separate kernel adds up the shares: it finishes no norm and places no heads."""
    can_be = ends.squares is None and end.value in (PLAIN.value, ADDED.value)
    return can_be and tile.kind == "tma" and tile.is_apart and tile.splits > 1


def _ahead(tile: Tile, num_inputs: int, itemsize: int) -> tuple[int, int]:
    """How far weights are pulled ahead, and in how many pieces a row: multiples of 16 bytes."""
    step = tile.splits * tile.block_k * (tile.warps if tile.kind == "mma" else 1)
    is_even = num_inputs % step == 0
    ahead = (
        min(tile.ahead, num_inputs // tile.splits) if is_even and has_dependent_launches() else 0
    )
    parts = max(1, 32 * tile.warps // tile.block_n)
    while ahead and ahead * itemsize % (16 * parts):
        parts //= 2
    return ahead, parts


def _launch(num_warps: int, is_dependent: bool) -> dict[str, Any]:
    """Launch options of a kernel that, if dependent, waits by itself for the one in front."""
    options: dict[str, Any] = {"num_warps": num_warps}
    if is_dependent and has_dependent_launches():
        options["launch_pdl"] = True
    return options
