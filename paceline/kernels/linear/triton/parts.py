"""What all `kernels` have in common: how a product begins and what becomes of its sums.

Only pieces of kernels; nothing is launched here. `cut` holds what is known when a kernel is
compiled (products.Cut), `ends` the tensors beside x, W and the output (products.Ends).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from paceline.kernels.fp8.triton.parts import BLOCK, BLOCKS, CHANNELS, group_scales
from paceline.kernels.gpu.triton import prefetch_to_l2
from paceline.kernels.kv_codes.triton import encoded

PLAIN = tl.constexpr(0)
GATED = tl.constexpr(1)
HEADS = tl.constexpr(2)
ADDED = tl.constexpr(3)


@triton.jit
def begin(cut):
    """From here on the next kernel may be launched: it waits by itself for what this one writes."""
    if cut.IS_DEPENDENT:
        cuda.gdc_launch_dependents()


@triton.jit
def wait(cut):
    """Until the kernel in front has written everything; only weights may be read before."""
    if cut.IS_DEPENDENT:
        cuda.gdc_wait()


@triton.jit
def zero_behind_loads(cut):
    """Zero, of which the compiler only knows that it comes from a barrier behind all loads so far.

    Sums that begin with it cannot be added up before those loads are on their way; otherwise the
    compiler puts the first addition between two loads, and the second waits for the first.
    """
    if cut.IS_GPU:
        count = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.u32 p, 0, 0; bar.red.popc.u32 $0, 0, p; }",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        zero = count.to(tl.float32)
    else:
        zero = 0.0
    return zero


@triton.jit
def weight_row(pid_n, cut):
    """Weight rows of a program; an up row follows its gate row. Past the end the last repeats."""
    j = tl.arange(0, cut.BLOCK_N)
    if cut.END == GATED:
        pair = tl.minimum(pid_n * (cut.BLOCK_N // 2) + j // 2, cut.N // 2 - 1)
        row = pair + (j % 2) * (cut.N // 2)
    else:
        row = tl.minimum(pid_n * cut.BLOCK_N + j, cut.N - 1)
    return row


@triton.jit
def pull_to_l2(w_ptr, row_N, start, cut):
    """Ask for the first AHEAD inputs of each weight row, in PARTS pieces: one piece per thread."""
    piece: tl.constexpr = cut.AHEAD // cut.PARTS
    size: tl.constexpr = piece * w_ptr.dtype.element_ty.primitive_bitwidth // 8
    part = tl.arange(0, cut.PARTS) * piece
    at = w_ptr + row_N.to(tl.int64)[:, None] * cut.K + start + part[None, :]
    prefetch_to_l2(at, size)


@triton.jit
def load_constants(ends, pid_n, cut):
    """What no kernel writes, so that it may be read before the wait: bias, the next norm's weight,
    and the scales of e4m3 weights."""
    bias = 0.0
    norm = 0.0
    scale = 0.0
    if cut.HAS_BIAS:
        bias = tl.load(ends.bias + weight_row(pid_n, cut))[None, :].to(tl.float32)
    if cut.HAS_NORM:
        norm = tl.load(ends.norm + weight_row(pid_n, cut))[None, :].to(tl.float32)
    if cut.SCALES == CHANNELS:
        scale = tl.load(ends.weight_scale + weight_row(pid_n, cut))[None, :]
    return bias, norm, scale


@triton.jit
def load_squares(ends, row_R, T, cut):
    """Partial sums of some rows; one row as a vector, since the sum of a vector is a scalar."""
    p = tl.arange(0, cut.WIDTH)
    if cut.NUM_SQUARES == 0:
        squares = 0.0
    elif row_R.shape == ():
        at = ends.squares + row_R * cut.NUM_SQUARES + p
        squares = tl.load(at, mask=(row_R < T) & (p < cut.NUM_SQUARES), other=0.0)
    else:
        at = ends.squares + row_R[:, None] * cut.NUM_SQUARES + p[None, :]
        squares = tl.load(at, mask=(row_R < T)[:, None] & (p < cut.NUM_SQUARES)[None, :], other=0.0)
    return squares


@triton.jit
def load_operands(ends, row_R, pid_n, T, cut):
    """What `finish` needs from the kernels in front, fetched while the products are added up."""
    is_row = (row_R < T)[:, None]
    operands = ()
    if cut.END == ADDED:
        n = pid_n * cut.BLOCK_N + tl.arange(0, cut.BLOCK_N)[None, :]
        at = ends.residual + row_R[:, None] * cut.N + n
        operands = (tl.load(at, mask=is_row & (n < cut.N), other=0.0),)
    elif cut.END == HEADS:
        pair = pid_n * (cut.BLOCK_N // 2) + tl.arange(0, cut.BLOCK_N // 2)[None, :]
        at = ends.rotation + row_R[:, None] * cut.HEAD + pair % (cut.HEAD // 2) * 2
        real = tl.load(at, mask=is_row, other=1.0)
        imaginary = tl.load(at + 1, mask=is_row, other=0.0)
        slot = tl.load(ends.slot + row_R, mask=row_R < T, other=-1).to(tl.int64)
        operands = (real, imaginary, slot)
    if cut.SCALES == CHANNELS:
        row_scale = tl.load(ends.row_scale + row_R, mask=row_R < T, other=0.0)
        operands = operands + (row_scale[:, None],)  # noqa: RUF005
    return operands


@triton.jit
def scales_at(ends, row_T, row_N, k, T, cut):
    """Scales by block of the inputs from `k` on: those of rows, and those of outputs."""
    scales = (0.0, 0.0)
    if cut.SCALES == BLOCKS:
        scales = (
            group_scales(ends.row_scale, row_T, row_T < T, k, cut.K),
            group_scales(ends.weight_scale, row_N // BLOCK, row_N < cut.N, k, cut.K),
        )
    return scales


@triton.jit
def scale_of(sum_of_squares, eps, cut):
    """1 / rms."""
    return tl.rsqrt(sum_of_squares / cut.K + eps) / cut.SHRINK


@triton.jit
def scales_of(squares, eps, cut):
    if cut.NUM_SQUARES > 0:
        scale_R = scale_of(tl.sum(squares, axis=1), eps, cut)
    else:
        scale_R = tl.zeros((cut.BLOCK_T,), tl.float32)
    return scale_R


@triton.jit
def finish(sum_RN, scale_R, constants, operands, ends, out_ptr, row_R, pid_n, T, cut):  # noqa: PLR0913
    """From sums to what leaves the kernel."""
    if cut.SCALES == CHANNELS:
        sum_RN = sum_RN * operands[-1] * constants[2]
    if cut.NUM_SQUARES > 0:
        sum_RN = sum_RN * scale_R[:, None]
    if cut.HAS_BIAS:
        sum_RN += constants[0]
    is_row = (row_R < T)[:, None]
    row_at = row_R.to(tl.int64)[:, None]
    n = pid_n * cut.BLOCK_N + tl.arange(0, cut.BLOCK_N)[None, :]
    if cut.END == PLAIN:
        tl.store(out_ptr + row_at * cut.N + n, sum_RN, mask=is_row & (n < cut.N))
    elif cut.END == GATED:
        gate, up = tl.split(tl.reshape(sum_RN, (sum_RN.shape[0], cut.BLOCK_N // 2, 2)))
        pair = pid_n * (cut.BLOCK_N // 2) + tl.arange(0, cut.BLOCK_N // 2)[None, :]
        y = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out_ptr + row_at * (cut.N // 2) + pair, y, mask=is_row & (pair < cut.N // 2))
    elif cut.END == ADDED:
        _store_added(sum_RN + operands[0], constants[1], ends, out_ptr, row_R, pid_n, T, cut)
    else:
        _store_heads(sum_RN, operands, ends, out_ptr, row_R, pid_n, T, cut)


@triton.jit
def _store_added(total, norm, ends, out_ptr, row_R, pid_n, T, cut):
    n = pid_n * cut.BLOCK_N + tl.arange(0, cut.BLOCK_N)[None, :]
    keep = (row_R < T)[:, None] & (n < cut.N)
    at = row_R.to(tl.int64)[:, None] * cut.N + n
    tl.store(ends.residual + at, total, mask=keep)
    if cut.HAS_NORM:
        tl.store(out_ptr + at, total * norm * cut.SHRINK, mask=keep)
        squares_R = tl.sum(tl.where(keep, total * total, 0.0), axis=1)
        num_blocks: tl.constexpr = (cut.N + cut.BLOCK_N - 1) // cut.BLOCK_N
        tl.store(ends.squares_out + row_R * num_blocks + pid_n, squares_R, mask=row_R < T)


@triton.jit
def _store_heads(sum_RN, operands, ends, out_ptr, row_R, pid_n, T, cut):
    even, odd = tl.split(tl.reshape(sum_RN, (sum_RN.shape[0], cut.BLOCK_N // 2, 2)))
    column = (pid_n * (cut.BLOCK_N // 2) + tl.arange(0, cut.BLOCK_N // 2)[None, :]) * 2
    is_turned = column < cut.NUM_Q + cut.NUM_KV
    real = tl.where(is_turned, operands[0], 1.0)
    imaginary = tl.where(is_turned, operands[1], 0.0)
    turned = tl.join(even * real - odd * imaginary, even * imaginary + odd * real)
    y = tl.reshape(turned, (sum_RN.shape[0], cut.BLOCK_N)).to(out_ptr.dtype.element_ty)
    n = pid_n * cut.BLOCK_N + tl.arange(0, cut.BLOCK_N)[None, :]
    is_row = (row_R < T)[:, None]
    tl.store(out_ptr + row_R.to(tl.int64)[:, None] * cut.N + n, y, mask=is_row & (n < cut.NUM_Q))
    slot = operands[2][:, None]
    behind_q = n - cut.NUM_Q
    head = (behind_q % cut.NUM_KV // cut.HEAD).to(tl.int64)
    at = head * ends.head_stride + slot * cut.HEAD + n % cut.HEAD
    is_key = (behind_q >= 0) & (behind_q < cut.NUM_KV)
    is_value = (behind_q >= cut.NUM_KV) & (n < cut.N)
    is_kept = is_row & (slot >= 0)
    if ends.key_scale is not None:
        scale = tl.load(ends.key_scale + head, mask=is_key, other=1.0)
        y = encoded(y, tl.load(ends.value_scale + head, mask=is_value, other=scale))
    tl.store(ends.key + at, y, mask=is_kept & is_key)
    tl.store(ends.value + at, y, mask=is_kept & is_value)


@triton.jit
def deliver(sum_TN, early, ends, out_ptr, row_T, pid_n, split, tile, T, eps, cut):  # noqa: PLR0913
    """`finish`, after the shares of SPLITS programs are added up in their order."""
    constants, operands, squares = early
    if cut.SPLITS == 1:
        scale_T = scales_of(squares, eps, cut)
        finish(sum_TN, scale_T, constants, operands, ends, out_ptr, row_T, pid_n, T, cut)
    else:
        size: tl.constexpr = cut.BLOCK_T * cut.BLOCK_N
        inside = tl.arange(0, cut.BLOCK_T)[:, None] * cut.BLOCK_N + tl.arange(0, cut.BLOCK_N)
        first = ends.partial + tile.to(tl.int64) * (cut.SPLITS * size) + inside
        tl.store(first + split * size, sum_TN)
        # All threads' stores come before the ticket: the last program sees every share.
        tl.debug_barrier()
        ticket = tl.atomic_add(ends.ticket + tile, 1, sem="acq_rel", scope="gpu")
        if ticket == cut.SPLITS - 1:
            tl.store(ends.ticket + tile, 0)
            late = load_operands(ends, row_T, pid_n, T, cut)
            late_scale_T = scales_of(load_squares(ends, row_T, T, cut), eps, cut)
            total_TN = tl.load(first, cache_modifier=".cg")
            for i in tl.static_range(1, cut.SPLITS):
                total_TN += tl.load(first + i * size, cache_modifier=".cg")
            finish(total_TN, late_scale_T, constants, late, ends, out_ptr, row_T, pid_n, T, cut)


@triton.jit
def load_early(ends, row_T, pid_n, T, cut):
    """Operands and squares, unless only the last of several programs will want them."""
    if cut.SPLITS == 1:
        early = (load_operands(ends, row_T, pid_n, T, cut), load_squares(ends, row_T, T, cut))
    else:
        early = ((), 0.0)
    return early
