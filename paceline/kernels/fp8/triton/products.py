"""Products of e4m3 numbers on the GPU (Ada, Hopper and later).

Few rows: the kernels of linear/triton, which read e4m3 as they read wider types. With the default
tiles a row's bits do not depend on the number of rows up to 128. Many: torch's product, if it has
one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.e4m3 import DTYPE
from paceline.kernels.fp8.reference import Fp8Rows, Fp8Weight
from paceline.kernels.linear.reference import NormedRows, Product
from paceline.kernels.linear.tiles import Tile, default_fp8_tile, pick_tile
from paceline.kernels.linear.triton.parts import PLAIN
from paceline.kernels.linear.triton.products import Ends, multiply


def fp8_linear(
    rows: Fp8Rows,
    weight: Fp8Weight,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    num_rows, (num_outputs, num_inputs) = len(rows.codes_TK), weight.codes_NK.shape
    device = rows.codes_TK.device
    end = "fp8-blocks" if weight.is_blocked else "fp8"
    tile = tile or pick_tile(end, num_outputs, num_inputs, num_rows, DTYPE, device)
    if tile is None:
        if _is_torchs(weight, bias_N, out_dtype):
            codes = rows.codes_TK, weight.codes_NK.t()
            scales = rows.scale_TG, weight.scale.t()
            return torch._scaled_mm(*codes, *scales, bias_N, None, out_dtype, use_fast_accum=True)
        tile = default_fp8_tile(num_outputs, num_inputs, num_rows, device)
    out_TN = torch.empty(num_rows, num_outputs, dtype=out_dtype, device=device)
    ends = Ends(row_scale=rows.scale_TG, weight_scale=weight.scale)
    product = Product(weight.codes_NK, bias_N)
    multiply(NormedRows(rows.codes_TK, None, 0.0), product, out_TN, ends, PLAIN, tile)
    return out_TN


def _is_torchs(weight: Fp8Weight, bias_N: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether torch multiplies so: scales by row and by output, whole 16 bytes, bf16 results."""
    num_outputs, num_inputs = weight.codes_NK.shape
    device = weight.codes_NK.device
    return (
        not weight.is_blocked
        and num_outputs % 16 == num_inputs % 16 == 0
        and out_dtype == torch.bfloat16
        and (bias_N is None or bias_N.dtype == out_dtype)
        and (device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9)
    )
