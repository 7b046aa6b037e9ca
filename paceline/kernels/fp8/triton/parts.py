"""What kernels with e4m3 operands have in common. Only pieces; nothing is launched here."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.e4m3 import MOST
from paceline.kernels.fp8 import reference

BLOCK = tl.constexpr(reference.BLOCK)
_LARGEST = tl.constexpr(MOST)
# How operands are scaled: not at all, by row and by output, by blocks.
UNSCALED = tl.constexpr(0)
CHANNELS = tl.constexpr(1)
BLOCKS = tl.constexpr(2)


def scales_of(scale: Tensor | None, num_outputs: int) -> tl.constexpr:
    """The kind of scales that a weight has, or those of experts."""
    if scale is None:
        return UNSCALED
    return CHANNELS if scale.shape[-2:] == (num_outputs, 1) else BLOCKS


@triton.jit
def group_scales(scale_RG, row_R, is_row_R, k, K: tl.constexpr):
    """Of some rows of [R, G]: the scales of the group of inputs that `k` is in, or the last one."""
    groups: tl.constexpr = (K + BLOCK - 1) // BLOCK
    at = scale_RG + row_R.to(tl.int64) * groups + tl.minimum(k // BLOCK, groups - 1)
    return tl.load(at, mask=is_row_R, other=0.0)


@triton.jit
def add_product(a_MK, b_KN, total_MN, scales, SCALES: tl.constexpr, BLOCK_K: tl.constexpr):
    """total + a b. With scales by block, what is added is multiplied by those of a and of b.

    Hopper's matrix units add up e4m3 products in fewer bits than fp32 has; no more than BLOCK_K of
    them are added up so.
    """
    if SCALES == BLOCKS:
        part_MN = tl.dot(a_MK, b_KN, input_precision="ieee")
        total_MN += part_MN * (scales[0][:, None] * scales[1][None, :])
    elif SCALES == CHANNELS:
        total_MN = tl.dot(
            a_MK, b_KN, total_MN, input_precision="ieee", max_num_imprecise_acc=BLOCK_K
        )
    else:
        total_MN = tl.dot(a_MK, b_KN, total_MN, input_precision="ieee")
    return total_MN


@triton.jit
def rounded(x_GS):
    """The codes of some groups, and their scales.

    As whole numbers, bits of absolute values have the order of these, and NaN is above all.
    """
    bits_G = tl.max(tl.abs(x_GS).to(tl.int32, bitcast=True), axis=1)
    scale_G = tl.div_rn(bits_G.to(tl.float32, bitcast=True), _LARGEST)
    scale_G = tl.where(scale_G == 0.0, 1.0, scale_G)
    x_GS = tl.div_rn(x_GS, tl.broadcast_to(scale_G[:, None], x_GS.shape))
    # Comparisons let NaN pass.
    x_GS = tl.where(x_GS > _LARGEST, _LARGEST, x_GS)
    x_GS = tl.where(x_GS < -_LARGEST, -_LARGEST, x_GS)
    return x_GS.to(tl.float8e4nv), scale_G
