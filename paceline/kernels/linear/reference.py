"""Matrix products of a few rows, fused with their neighbours. In torch.

Owns how a norm travels between two products; `tiles` says which tile runs.

A norm is linear but for one number per row, so it never needs a separate kernel: the product that
updates the residual also hands on `residual * norm weight` and sums of the residual's squares, and
the next product multiplies what it adds up by 1 / rms. Letters: T rows, K inputs, N outputs, D the
residual's width, P partial sums. A `tile` says how the GPU cuts its work; torch needs none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

from paceline.kernels.elementwise.reference import rotate_, write_kv
from paceline.kernels.kv_codes.reference import KvScales
from paceline.kernels.linear.tiles import Tile

# A residual may outgrow fp16 before it is divided by its rms; powers of two cost no bits.
SHRINK = {torch.float16: 1 / 16}


class Product(NamedTuple):
    """y = x W^T + b."""

    weight_NK: Tensor
    bias_N: Tensor | None


class NormedRows(NamedTuple):
    """Rows behind an RMS norm, some of its arithmetic left to the kernel that reads them."""

    x_TD: Tensor  # residual * weight (* SHRINK), in the products' type; the norm if no squares
    squares_TP: Tensor | None  # fp32; their sum over P is the sum of the residual's squares
    eps: float


class HeadPlaces(NamedTuple):
    """Where queries, keys and values of a step go: see elementwise/reference.place_heads."""

    rotation_TH: Tensor
    key_NSH: Tensor
    value_NSH: Tensor
    slot_T: Tensor
    scales: KvScales | None = None  # of fp8 pages


def scale_rows(residual_TD: Tensor, norm_weight_D: Tensor, eps: float, like: Tensor) -> NormedRows:
    """Open a chain of products: the rows of a residual in the type of the weight `like`."""
    shrink = SHRINK.get(like.dtype, 1.0)
    scaled_TD = residual_TD * norm_weight_D.float() * shrink
    return NormedRows(scaled_TD.to(like.dtype), residual_TD.square().sum(1, keepdim=True), eps)


def linear(
    x_TK: Tensor, product: Product, out_dtype: torch.dtype | None = None, tile: Tile | None = None
) -> Tensor:
    """x W^T + b; logits may ask for fp32."""
    return _sum(x_TK, product).to(out_dtype or x_TK.dtype)


def norm_linear(rows: NormedRows, product: Product, tile: Tile | None = None) -> Tensor:
    """norm(residual) W^T + b."""
    return _normed(rows, product).to(rows.x_TD.dtype)


def norm_linear_silu(rows: NormedRows, product: Product, tile: Tile | None = None) -> Tensor:
    """silu(gate) * up of the fused gate-up projection behind a norm."""
    gate, up = _normed(rows, product).chunk(2, dim=-1)
    return (silu(gate) * up).to(rows.x_TD.dtype)


def linear_silu(x_TK: Tensor, product: Product) -> Tensor:
    """The same for rows that are normed, of which there may be many: rounded in between."""
    gate, up = torch_linear(x_TK, *product).float().chunk(2, dim=-1)
    return (silu(gate) * up).to(x_TK.dtype)


def norm_linear_heads(
    rows: NormedRows, product: Product, places: HeadPlaces, tile: Tile | None = None
) -> Tensor:
    """qkv behind a norm, rotated; keys and values go to their page slots and only there.

    Returns [T, N]: the queries lead each row, what follows them is undefined.
    """
    num_kv, _, head_size = places.key_NSH.shape
    qkv_TNH = _normed(rows, product).unflatten(1, (-1, head_size))
    num_q = qkv_TNH.shape[1] - 2 * num_kv
    rotate_(qkv_TNH[:, : num_q + num_kv], places.rotation_TH)
    out_TNH = qkv_TNH.to(rows.x_TD.dtype)
    _, key_TNH, value_TNH = out_TNH.split((num_q, num_kv, num_kv), dim=1)
    pages, slot_T = (places.key_NSH, places.value_NSH), places.slot_T.long()
    write_kv(*pages, key_TNH, value_TNH, slot_T, places.scales)
    out_TN: Tensor = out_TNH.flatten(1)
    return out_TN


def linear_add(
    x_TK: Tensor,
    product: Product,
    residual_TD: Tensor,
    norm_weight_D: Tensor | None = None,
    eps: float = 0.0,
    tile: Tile | None = None,
) -> NormedRows | None:
    """residual += x W^T + b in place; with a weight, the rows of the norm that comes next."""
    residual_TD.add_(_sum(x_TK, product).to(residual_TD.dtype))
    if norm_weight_D is None:
        return None
    return scale_rows(residual_TD, norm_weight_D, eps, x_TK)


def _sum(x_TK: Tensor, product: Product) -> Tensor:
    bias = None if product.bias_N is None else product.bias_N.float()
    return torch_linear(x_TK.float(), product.weight_NK.float(), bias)


def _normed(rows: NormedRows, product: Product) -> Tensor:
    if rows.squares_TP is None:
        return _sum(rows.x_TD, product)
    mean_T1 = rows.squares_TP.sum(1, keepdim=True) / rows.x_TD.shape[1]
    scale_T1 = torch.rsqrt(mean_T1 + rows.eps) / SHRINK.get(rows.x_TD.dtype, 1.0)
    sum_TN = torch_linear(rows.x_TD.float(), product.weight_NK.float()) * scale_T1
    return sum_TN if product.bias_N is None else sum_TN + product.bias_N.float()
