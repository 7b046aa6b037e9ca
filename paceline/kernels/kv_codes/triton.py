"""e4m3 codes of fp8 pages inside kernels. See reference; nothing is launched here."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def numbers(stored, dtype: tl.constexpr):
    """What was loaded from a page: codes as numbers of `dtype`, which holds each of them exactly;
    numbers of a page in a wider type as they are."""
    if stored.dtype != tl.uint8:
        return stored
    elif not _IS_INTERPRETED and cuda_capability_geq(8, 9):
        # In these steps: to bfloat16 at once would take an instruction that is slow (F2F).
        code = stored.to(tl.float8e4nv, bitcast=True)
        return code.to(tl.float16).to(tl.float32).to(dtype)
    else:
        # GPUs before Ada have no such instruction. The bits of a float16, but for its exponent.
        code = stored.to(tl.uint16)
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        number = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((code & 0x7F) == 0x7F, float("nan"), number).to(dtype)


@triton.jit
def scaled(x, scale_N, head):
    """Times the scale of a head, if pages have scales."""
    if scale_N is None:
        return x
    else:
        return x * tl.load(scale_N + head)


@triton.jit
def encoded(x, scale):
    """Codes of x / scale, by integers: the same bits on every GPU and where it is interpreted."""
    x = tl.div_rn(x.to(tl.float32), scale + tl.zeros_like(x).to(tl.float32))
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    # Three bits of the mantissa are left, and an exponent that begins 120 later.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2^-6 codes are multiples of 2^-9: one unit of a float32 that is at least 2^14.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    return (tl.where(x != x, 0x7F, code) | sign).to(tl.uint8)
