"""Products of e4m3 numbers (fp8): rows are rounded when they arrive, weights when they are loaded.

A row has one scale, or one for each group of BLOCK inputs. A weight has one scale for each output,
or one for each block of BLOCK outputs and BLOCK inputs; then its rows have one for each group. The
codes of a row depend on that row alone. Letters: T rows, K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from paceline.kernels.e4m3 import DTYPE, MOST
from paceline.kernels.elementwise.reference import add_rms_norm, rms_norm, silu_and_mul
from paceline.kernels.linear.tiles import Tile

BLOCK = 128


class Fp8Rows(NamedTuple):
    """What was rounded is code * scale."""

    codes_TK: Tensor
    scale_TG: Tensor  # fp32 [T, 1], or [T, ceil(K / BLOCK)]


class Fp8Weight(NamedTuple):
    """y = x W^T, where W is code * scale."""

    codes_NK: Tensor
    scale: Tensor  # fp32 [N, 1], or [ceil(N / BLOCK), ceil(K / BLOCK)]
    is_blocked: bool

    @property
    def nbytes(self) -> int:
        return self.codes_NK.nbytes + self.scale.nbytes


def quantise_rows(x_TK: Tensor, is_blocked: bool) -> Fp8Rows:
    """Each row, or each group of its inputs, is scaled so that its largest number is MOST."""
    num_inputs = x_TK.shape[1]
    size = BLOCK if is_blocked else num_inputs
    groups_TGS = _in_groups(x_TK.float(), size)
    scale_TG = groups_TGS.abs().amax(2) / MOST
    scale_TG = torch.where(scale_TG == 0, 1.0, scale_TG)
    codes_TGS = (groups_TGS / scale_TG.unsqueeze(2)).clamp(-MOST, MOST).to(DTYPE)
    return Fp8Rows(codes_TGS.flatten(1)[:, :num_inputs].contiguous(), scale_TG)


def norm_rows(
    residual_TD: Tensor,
    delta_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    dtype: torch.dtype,
    is_blocked: bool,
) -> Fp8Rows:
    """The norm of the residual, to which the delta is added first, if there is one; rounded to
    `dtype` before."""
    if delta_TD is None:
        return quantise_rows(rms_norm(residual_TD, weight_D, eps, dtype), is_blocked)
    return quantise_rows(add_rms_norm(residual_TD, delta_TD, weight_D, eps, dtype), is_blocked)


def silu_rows(gate_up_TI: Tensor, is_blocked: bool) -> Fp8Rows:
    """silu(gate) * up, rounded to the type of the product before."""
    return quantise_rows(silu_and_mul(gate_up_TI), is_blocked)


def quantise_weight(weight_NK: Tensor, is_blocked: bool) -> Fp8Weight:
    """The weight of a checkpoint in a wider type."""
    if not is_blocked:
        codes, scale = quantise_rows(weight_NK, False)
        return Fp8Weight(codes, scale, False)
    num_outputs, num_inputs = weight_NK.shape
    blocks = _in_groups(weight_NK.float(), BLOCK)  # [N, G, BLOCK]
    scale_NG = _in_groups(blocks.abs().amax(2).t(), BLOCK).amax(2).t() / MOST
    scale_NG = torch.where(scale_NG == 0, 1.0, scale_NG)
    each_NG = scale_NG.repeat_interleave(BLOCK, 0)[:num_outputs]
    codes = (blocks / each_NG.unsqueeze(2)).clamp(-MOST, MOST).to(DTYPE)
    return Fp8Weight(codes.flatten(1)[:, :num_inputs].contiguous(), scale_NG.contiguous(), True)


def fp8_linear(
    rows: Fp8Rows,
    weight: Fp8Weight,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """Codes are multiplied and summed up; sums are scaled in fp32.

    In double precision sums of codes are exact, so that a row's bits are its own.
    """
    codes_TK, scale_TG = rows
    if not weight.is_blocked:
        sum_TN = _code_sums(codes_TK, weight.codes_NK) * scale_TG * weight.scale.t()
    else:
        sum_TN = codes_TK.new_zeros((len(codes_TK), len(weight.codes_NK)), dtype=torch.float32)
        scale_NG = weight.scale.repeat_interleave(BLOCK, 0)[: len(weight.codes_NK)]
        pairs = zip(codes_TK.split(BLOCK, 1), weight.codes_NK.split(BLOCK, 1), strict=True)
        for group, (x_TS, w_NS) in enumerate(pairs):
            scale_TN = scale_TG[:, group : group + 1] * scale_NG[:, group]
            sum_TN += _code_sums(x_TS, w_NS) * scale_TN
    return (sum_TN if bias_N is None else sum_TN + bias_N.float()).to(out_dtype)


def round_rows(x_TK: Tensor, is_blocked: bool) -> Tensor:
    """What rows are after `quantise_rows`: code * scale in fp32."""
    codes_TK, scale_TG = quantise_rows(x_TK, is_blocked)
    if is_blocked:
        scale_TG = scale_TG.repeat_interleave(BLOCK, 1)[:, : x_TK.shape[1]]
    return codes_TK.float() * scale_TG


def scale_outputs(x_TN: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    """x * scale + bias, in place."""
    x_TN.mul_(scale_N)
    return x_TN if bias_N is None else x_TN.add_(bias_N)


def dequantised(weight: Fp8Weight) -> Tensor:
    """code * scale in fp32, of one matrix or of a stack."""
    codes, scale, is_blocked = weight
    if is_blocked:
        rows, columns = codes.shape[-2:]
        scale = scale.repeat_interleave(BLOCK, -2)[..., :rows, :]
        scale = scale.repeat_interleave(BLOCK, -1)[..., :columns]
    return codes.float() * scale


def _code_sums(codes_TK: Tensor, codes_NK: Tensor) -> Tensor:
    sum_TN: Tensor = linear(codes_TK.double(), codes_NK.double())
    return sum_TN.float()


def _in_groups(x_TK: Tensor, size: int) -> Tensor:
    """[T, K] as [T, G, size]; zeros fill the last group."""
    padded_TK = torch.nn.functional.pad(x_TK, (0, -x_TK.shape[1] % size))
    groups_TGS: Tensor = padded_TK.unflatten(1, (-1, size))
    return groups_TGS
