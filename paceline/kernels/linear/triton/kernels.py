"""The kernels of `products`: four ways to multiply, all deterministic. Nothing is launched here.

`fma` adds up row after row in registers, `mma` feeds the matrix units straight from memory, `dot`
through shared memory, `tma` likewise by the copy engine, which fills a tile of more rows than there
are with zeros. All fetch weights before they wait for the kernel in front of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from paceline.kernels.fp8.triton.parts import CHANNELS, add_product
from paceline.kernels.linear.triton.parts import (
    ADDED,
    GATED,
    begin,
    deliver,
    finish,
    load_constants,
    load_early,
    load_operands,
    load_squares,
    pull_to_l2,
    scale_of,
    scales_at,
    wait,
    weight_row,
    zero_behind_loads,
)


@triton.jit
def _load_weight(w_ptr, row_N, start, cut, IS_EVEN: tl.constexpr):
    k = start + tl.arange(0, cut.BLOCK_K)
    at = w_ptr + row_N.to(tl.int64)[:, None] * cut.K + k[None, :]
    if IS_EVEN:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        w = tl.load(at, mask=(k < cut.K)[None, :], other=0.0, eviction_policy="evict_first")
    return w


@triton.jit
def _load_rows(x_ptr, start, T, cut):
    k = start + tl.arange(0, cut.BLOCK_K)
    rows = ()
    for t in tl.static_range(cut.BLOCK_T):
        row = tl.load(x_ptr + t * cut.K + k, mask=(k < cut.K) & (t < T), other=0.0)
        rows = rows + (row,)  # noqa: RUF005
    return rows


@triton.jit
def _stack(sums, cut):
    """The sums of each row over the threads that share them, as [T, N]: one reduction for all."""
    if cut.BLOCK_T == 1:
        sum_TN = tl.sum(sums[0], axis=1)[None, :]
    elif cut.BLOCK_T == 2:
        sum_TN = tl.permute(tl.sum(tl.join(sums[0], sums[1]), axis=1), (1, 0))
    else:
        tl.static_assert(cut.BLOCK_T == 4)
        pairs = tl.join(tl.join(sums[0], sums[1]), tl.join(sums[2], sums[3]))
        sum_N22 = tl.sum(pairs, axis=1)
        sum_TN = tl.reshape(tl.permute(sum_N22, (2, 1, 0)), (cut.BLOCK_T, cut.BLOCK_N))
    return sum_TN


@triton.jit(do_not_specialize=["T"])
def fma_kernel(x_ptr, w_ptr, out_ptr, ends, T, eps, cut):
    """A program owns BLOCK_N outputs of all rows; DEPTH chunks of weights are on their way."""
    chunks: tl.constexpr = (cut.K + cut.BLOCK_K - 1) // cut.BLOCK_K
    is_even: tl.constexpr = cut.K % cut.BLOCK_K == 0
    # A thread adds up its own 16 bytes first: partial sums instead of products fill the registers.
    vector: tl.constexpr = 128 // w_ptr.dtype.element_ty.primitive_bitwidth
    pid_n = tl.program_id(0)
    begin(cut)
    row_N = weight_row(pid_n, cut)
    ring_w = ()
    for i in tl.static_range(cut.DEPTH):
        w = _load_weight(w_ptr, row_N, i * cut.BLOCK_K, cut, is_even)
        ring_w = ring_w + (w,)  # noqa: RUF005
    constants = load_constants(ends, pid_n, cut)
    wait(cut)
    ring_x = ()
    for i in tl.static_range(cut.DEPTH):
        ring_x = ring_x + (_load_rows(x_ptr, i * cut.BLOCK_K, T, cut),)  # noqa: RUF005
    row_T = tl.arange(0, cut.BLOCK_T)
    operands = load_operands(ends, row_T, pid_n, T, cut)
    squares = ()
    for t in tl.static_range(cut.BLOCK_T):
        squares = squares + (load_squares(ends, tl.full((), t, tl.int32), T, cut),)  # noqa: RUF005
    zero = zero_behind_loads(cut)
    sums = ()
    for _ in tl.static_range(cut.BLOCK_T):
        no_sum = tl.zeros((cut.BLOCK_N, cut.BLOCK_K // vector), tl.float32)
        sums = sums + (no_sum,)  # noqa: RUF005
    for i in tl.static_range(chunks):
        w = ring_w[0].to(tl.float32)
        xs = ring_x[0]
        ring_w, ring_x = ring_w[1:], ring_x[1:]
        if i + cut.DEPTH < chunks:
            start = (i + cut.DEPTH) * cut.BLOCK_K
            later = _load_weight(w_ptr, row_N, start, cut, is_even)
            ring_w = ring_w + (later,)  # noqa: RUF005
            ring_x = ring_x + (_load_rows(x_ptr, start, T, cut),)  # noqa: RUF005
        for t in tl.static_range(cut.BLOCK_T):
            x = xs[t].to(tl.float32)
            if i < cut.DEPTH:
                x += zero
            parts = tl.reshape(w * x[None, :], (cut.BLOCK_N, cut.BLOCK_K // vector, vector))
            sums = sums[:t] + (sums[t] + tl.sum(parts, axis=2),) + sums[t + 1 :]  # noqa: RUF005
    scale_T = tl.zeros((cut.BLOCK_T,), tl.float32)
    if cut.NUM_SQUARES > 0:
        for t in tl.static_range(cut.BLOCK_T):
            scale = scale_of(tl.sum(squares[t], axis=0), eps, cut)
            scale_T = tl.where(row_T == t, scale, scale_T)
    sum_TN = _stack(sums, cut)
    finish(sum_TN, scale_T, constants, operands, ends, out_ptr, row_T, pid_n, T, cut)


@triton.jit
def _eight_rows(ptr, row_8, begin_S, chunk, cut, IS_EVEN: tl.constexpr):
    """A chunk of 8 rows for each warp: every thread reads 16 bytes. [8, WARPS, BLOCK_K]"""
    k = begin_S[None, :, None] + chunk * cut.BLOCK_K + tl.arange(0, cut.BLOCK_K)[None, None, :]
    at = ptr + row_8[:, None, None] * cut.K + k
    if IS_EVEN:
        rows = tl.load(at, eviction_policy="evict_first")
    else:
        rows = tl.load(at, mask=k < cut.K, other=0.0, eviction_policy="evict_first")
    return rows


@triton.jit
def _left(low, high, cut):
    """Sixteen weight rows as a left operand whose every number is where its thread loaded it.

    The order of inputs does not matter to a product as long as both operands agree: thread c of
    four holds inputs 8 c ... 8 c + 7, and the matrix unit wants 4 c ... of each half. Of e4m3 all
    are twice as many.
    """
    pair = tl.reshape(tl.join(low, high), (8, cut.WARPS, 4, 2, cut.BLOCK_K // 8, 2))
    return tl.reshape(tl.permute(pair, (1, 5, 0, 3, 2, 4)), (cut.WARPS, 16, cut.BLOCK_K))


@triton.jit
def _right(rows, cut):
    """Eight rows of x as a right operand in the order of `_left`."""
    x = tl.reshape(rows, (8, cut.WARPS, 4, 2, cut.BLOCK_K // 8))
    return tl.reshape(tl.permute(x, (1, 3, 2, 4, 0)), (cut.WARPS, cut.BLOCK_K, 8))


@triton.jit
def _load_left(w_ptr, row_N8, begin_S, chunk, cut, IS_EVEN: tl.constexpr):
    """One chunk of the program's weights: BLOCK_N / 8 tiles of eight rows."""
    tiles = ()
    for i in tl.static_range(cut.BLOCK_N // 8):
        tile = _eight_rows(w_ptr, row_N8[i], begin_S, chunk, cut, IS_EVEN)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@triton.jit
def _load_right(x_ptr, first_row, begin_S, chunk, T, cut, IS_EVEN: tl.constexpr):
    """The same chunk of x: BLOCK_T / 8 tiles of eight rows."""
    k = begin_S[None, :, None] + chunk * cut.BLOCK_K + tl.arange(0, cut.BLOCK_K)[None, None, :]
    tiles = ()
    for j in tl.static_range(cut.BLOCK_T // 8):
        row = first_row + j * 8 + tl.arange(0, 8)[:, None, None]
        mask = row < T
        if not IS_EVEN:
            mask = mask & (k < cut.K)
        tiles = tiles + (tl.load(x_ptr + row * cut.K + k, mask=mask, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@triton.jit
def _add_chunk(sums, tiles_w, tiles_x, cut):
    """Add one chunk to the sums of every pair of sixteen weight rows and eight rows of x."""
    groups: tl.constexpr = cut.BLOCK_T // 8
    for i in tl.static_range(cut.BLOCK_N // 16):
        left = _left(tiles_w[2 * i], tiles_w[2 * i + 1], cut)
        for j in tl.static_range(groups):
            before, after = sums[: i * groups + j], sums[i * groups + j + 1 :]
            right = _right(tiles_x[j], cut)
            one = tl.dot(left, right, sums[i * groups + j], input_precision="ieee")
            sums = before + (one,) + after  # noqa: RUF005
    return sums


@triton.jit
def _beside(one, other, IS_N: tl.constexpr):
    """Two tiles [WARPS, N, T] as one that has twice as many outputs, or else rows."""
    both = tl.join(one, other)
    warps: tl.constexpr = one.shape[0]
    n: tl.constexpr = one.shape[1]
    t: tl.constexpr = one.shape[2]
    if IS_N:
        out = tl.reshape(tl.permute(both, (0, 3, 1, 2)), (warps, 2 * n, t))
    else:
        out = tl.reshape(tl.permute(both, (0, 1, 3, 2)), (warps, n, 2 * t))
    return out


@triton.jit
def _all_beside(tiles, COUNT: tl.constexpr, IS_N: tl.constexpr):
    """A power of two of tiles as one."""
    if COUNT == 1:
        out = tiles[0]
    elif COUNT == 2:
        out = _beside(tiles[0], tiles[1], IS_N)
    elif COUNT == 4:
        out = _beside(_all_beside(tiles[:2], 2, IS_N), _all_beside(tiles[2:], 2, IS_N), IS_N)
    else:
        tl.static_assert(COUNT == 8)
        out = _beside(_all_beside(tiles[:4], 4, IS_N), _all_beside(tiles[4:], 4, IS_N), IS_N)
    return out


@triton.jit
def _added_up(sums, cut):
    """The tiles of all warps as [T, N]."""
    groups: tl.constexpr = cut.BLOCK_T // 8
    blocks = ()
    for i in tl.static_range(cut.BLOCK_N // 16):
        block = _all_beside(sums[i * groups : (i + 1) * groups], groups, False)
        blocks = blocks + (block,)  # noqa: RUF005
    return tl.permute(tl.sum(_all_beside(blocks, cut.BLOCK_N // 16, True), axis=0), (1, 0))


@triton.jit(do_not_specialize=["T"])
def mma_kernel(x_ptr, w_ptr, out_ptr, ends, T, eps, cut):
    """A program owns BLOCK_T rows of BLOCK_N outputs; its warps (and SPLITS) share the inputs."""
    num_blocks: tl.constexpr = (cut.N + cut.BLOCK_N - 1) // cut.BLOCK_N
    step: tl.constexpr = cut.WARPS * cut.SPLITS * cut.BLOCK_K
    chunks: tl.constexpr = (cut.K + step - 1) // step
    is_even: tl.constexpr = chunks * step == cut.K
    groups: tl.constexpr = cut.BLOCK_T // 8
    # Blocks of rows side by side: the second one finds the weights in the cache.
    pid_t = tl.program_id(0)
    pid_n = tl.program_id(1)
    split = tl.program_id(2)
    begin(cut)
    begin_S = (split * cut.WARPS + tl.arange(0, cut.WARPS)) * (chunks * cut.BLOCK_K)
    row_N8 = ()
    for i in tl.static_range(cut.BLOCK_N // 8):
        row_N8 = row_N8 + (_rows_at(pid_n, i, cut),)  # noqa: RUF005
    zero = tl.full((), 0, tl.int32)  # chunk numbers are tensors: one compiled function for all
    ring_w = ()
    for i in tl.static_range(cut.DEPTH):
        tiles = _load_left(w_ptr, row_N8, begin_S, zero + i, cut, is_even)
        ring_w = ring_w + (tiles,)  # noqa: RUF005
    if cut.AHEAD > 0:
        pull_to_l2(w_ptr, weight_row(pid_n, cut), split * (cut.WARPS * chunks * cut.BLOCK_K), cut)
    constants = load_constants(ends, pid_n, cut)
    wait(cut)
    ring_x = ()
    for i in tl.static_range(cut.DEPTH):
        tiles = _load_right(x_ptr, pid_t * cut.BLOCK_T, begin_S, zero + i, T, cut, is_even)
        ring_x = ring_x + (tiles,)  # noqa: RUF005
    row_T = pid_t * cut.BLOCK_T + tl.arange(0, cut.BLOCK_T)
    early = load_early(ends, row_T, pid_n, T, cut)
    no_sum = tl.zeros((cut.WARPS, 16, 8), tl.float32) + zero_behind_loads(cut)
    sums = ()
    for _ in tl.static_range(cut.BLOCK_N // 16 * groups):
        sums = sums + (no_sum,)  # noqa: RUF005
    rounds: tl.constexpr = chunks // cut.DEPTH
    # A loop would carry e4m3 numbers byte by byte.
    unroll: tl.constexpr = max(rounds - 1, 1) if cut.SCALES > 0 else 1
    last: tl.constexpr = (rounds - 1) * cut.DEPTH
    for at in tl.range(0, last, cut.DEPTH, num_stages=1, loop_unroll_factor=unroll):
        for i in tl.static_range(cut.DEPTH):
            sums = _add_chunk(sums, ring_w[i], ring_x[i], cut)
            chunk = at + i + cut.DEPTH
            tiles = _load_left(w_ptr, row_N8, begin_S, chunk, cut, is_even)
            ring_w = ring_w[:i] + (tiles,) + ring_w[i + 1 :]  # noqa: RUF005
            tiles = _load_right(x_ptr, pid_t * cut.BLOCK_T, begin_S, chunk, T, cut, is_even)
            ring_x = ring_x[:i] + (tiles,) + ring_x[i + 1 :]  # noqa: RUF005
    for i in tl.static_range(cut.DEPTH):
        sums = _add_chunk(sums, ring_w[i], ring_x[i], cut)
        if rounds * cut.DEPTH + i < chunks:
            chunk = zero + rounds * cut.DEPTH + i
            tiles = _load_left(w_ptr, row_N8, begin_S, chunk, cut, is_even)
            ring_w = ring_w[:i] + (tiles,) + ring_w[i + 1 :]  # noqa: RUF005
            tiles = _load_right(x_ptr, pid_t * cut.BLOCK_T, begin_S, chunk, T, cut, is_even)
            ring_x = ring_x[:i] + (tiles,) + ring_x[i + 1 :]  # noqa: RUF005
    for i in tl.static_range(chunks - rounds * cut.DEPTH):
        sums = _add_chunk(sums, ring_w[i], ring_x[i], cut)
    sum_TN = _added_up(sums, cut)
    early = (constants, early[0], early[1])
    tile = pid_t * num_blocks + pid_n
    deliver(sum_TN, early, ends, out_ptr, row_T, pid_n, split, tile, T, eps, cut)


@triton.jit
def _rows_at(pid_n, eight, cut):
    """Eight of the rows of `weight_row`."""
    j = eight * 8 + tl.arange(0, 8)
    if cut.END == GATED:
        pair = tl.minimum(pid_n * (cut.BLOCK_N // 2) + j // 2, cut.N // 2 - 1)
        row = pair + (j % 2) * (cut.N // 2)
    else:
        row = tl.minimum(pid_n * cut.BLOCK_N + j, cut.N - 1)
    return row.to(tl.int64)


@triton.jit(do_not_specialize=["T"])
def dot_kernel(x_ptr, w_ptr, out_ptr, ends, T, eps, cut):
    """A program owns BLOCK_T rows of BLOCK_N outputs, and one of SPLITS shares of the inputs."""
    num_blocks: tl.constexpr = (cut.N + cut.BLOCK_N - 1) // cut.BLOCK_N
    step: tl.constexpr = cut.SPLITS * cut.BLOCK_K
    share: tl.constexpr = (cut.K + step - 1) // step * cut.BLOCK_K
    is_even: tl.constexpr = share * cut.SPLITS == cut.K
    # Blocks of rows side by side: the second one finds the weights in the cache.
    pid_t = tl.program_id(0)
    pid_n = tl.program_id(1)
    split = tl.program_id(2)
    begin(cut)
    row_N = weight_row(pid_n, cut)
    start = split * share
    if cut.AHEAD > 0:
        pull_to_l2(w_ptr, row_N, start, cut)
    constants = load_constants(ends, pid_n, cut)
    wait(cut)
    row_T = pid_t * cut.BLOCK_T + tl.arange(0, cut.BLOCK_T)
    early = load_early(ends, row_T, pid_n, T, cut)
    x_row = x_ptr + row_T.to(tl.int64)[:, None] * cut.K
    sum_TN = tl.zeros((cut.BLOCK_T, cut.BLOCK_N), tl.float32)
    for inside in tl.range(0, share, cut.BLOCK_K, num_stages=cut.DEPTH):
        k = start + inside + tl.arange(0, cut.BLOCK_K)[None, :]
        scales = scales_at(ends, row_T, row_N, start + inside, T, cut)
        w = _load_weight(w_ptr, row_N, start + inside, cut, is_even)
        # Rows past T are not read: a thousand programs that read the same row wait for each other.
        mask = (row_T < T)[:, None]
        if not is_even:
            mask = mask & (k < cut.K)
        x = tl.load(x_row + k, mask=mask, other=0.0)
        sum_TN = add_product(x, tl.trans(w), sum_TN, scales, cut.SCALES, cut.BLOCK_K)
    early = (constants, early[0], early[1])
    tile = pid_t * num_blocks + pid_n
    deliver(sum_TN, early, ends, out_ptr, row_T, pid_n, split, tile, T, eps, cut)


@triton.jit
def _in_order(total, total_up, HAS_FEW_ROWS: tl.constexpr, cut):
    """Sums as [T, N], an up column behind its gate column as `weight_row` has them."""
    sum_TN = tl.trans(total) if HAS_FEW_ROWS else total
    if cut.END == GATED:
        if HAS_FEW_ROWS:
            pairs = tl.join(sum_TN, tl.trans(total_up))
        else:
            pairs = tl.permute(tl.reshape(sum_TN, (cut.BLOCK_T, 2, cut.BLOCK_N // 2)), (0, 2, 1))
        sum_TN = tl.reshape(pairs, (cut.BLOCK_T, cut.BLOCK_N))
    return sum_TN


@triton.jit(do_not_specialize=["T"])
def tma_kernel(x_tiles, w_tiles, w_ptr, out_ptr, ends, T, eps, cut):
    """As `dot_kernel`, through tiles of x and of W as [1 or 2, N, K]: gate rows before up rows."""
    num_blocks: tl.constexpr = (cut.N + cut.BLOCK_N - 1) // cut.BLOCK_N
    chunks: tl.constexpr = -(-cut.K // (cut.SPLITS * cut.BLOCK_K))
    last_turn: tl.constexpr = chunks - (cut.AHEAD + cut.BLOCK_K - 1) // cut.BLOCK_K
    # Blocks of rows side by side: the second one finds the weights in the cache.
    pid_t = tl.program_id(0)
    pid_n = tl.program_id(1)
    split = tl.program_id(2)
    begin(cut)
    first_row = pid_n * (cut.BLOCK_N // 2 if cut.END == GATED else cut.BLOCK_N)
    start = split * chunks
    # Each program begins elsewhere, lest all of them want the same few lines of x at a time.
    turn = tl.minimum(pid_n * chunks // num_blocks, last_turn)
    if cut.AHEAD > 0:  # noqa: SIM102
        if pid_t == 0:
            pull_to_l2(w_ptr, weight_row(pid_n, cut), (start + turn) * cut.BLOCK_K, cut)
    constants = load_constants(ends, pid_n, cut)
    wait(cut)
    row_T = pid_t * cut.BLOCK_T + tl.arange(0, cut.BLOCK_T)
    squares = 0.0
    # What would fill the registers is fetched when the sums are done.
    has_room: tl.constexpr = cut.BLOCK_T * cut.WIDTH <= cut.WARPS * 32 * 8
    if cut.SPLITS == 1 and has_room:
        squares = load_squares(ends, row_T, T, cut)
    # Matrix units take 64 of one operand at least: few rows of x are their columns. As such they
    # take no tile of two parts from shared memory, so gate and up are two products. More rows of
    # e4m3 are columns too, if one group of warps has a tile: then their number changes no bits.
    has_few_rows: tl.constexpr = cut.BLOCK_T < 64 or (cut.SCALES > 0 and cut.WARPS == 4)
    height: tl.constexpr = cut.BLOCK_N // 2 if has_few_rows and cut.END == GATED else cut.BLOCK_N
    shape: tl.constexpr = (height, cut.BLOCK_T) if has_few_rows else (cut.BLOCK_T, height)
    total = tl.zeros(shape, tl.float32)
    total_up = total
    row_N = first_row + tl.arange(0, height)
    for i in tl.range(0, chunks, num_stages=cut.DEPTH):
        chunk = i + turn
        k = (start + tl.where(chunk < chunks, chunk, chunk - chunks)) * cut.BLOCK_K
        x_TK = x_tiles.load([pid_t * cut.BLOCK_T, k])
        w_NK = tl.reshape(w_tiles.load([0, first_row, k]), (height, cut.BLOCK_K))
        scales = scales_at(ends, row_T, row_N, k, T, cut)
        if has_few_rows:
            x_KT, scales = tl.trans(x_TK), (scales[1], scales[0])
            total = add_product(w_NK, x_KT, total, scales, cut.SCALES, cut.BLOCK_K)
            if cut.END == GATED:
                up_NK = tl.reshape(w_tiles.load([1, first_row, k]), (height, cut.BLOCK_K))
                total_up = add_product(up_NK, x_KT, total_up, scales, cut.SCALES, cut.BLOCK_K)
        else:
            total = add_product(x_TK, tl.trans(w_NK), total, scales, cut.SCALES, cut.BLOCK_K)
    sum_TN = _in_order(total, total_up, has_few_rows, cut)
    if cut.IS_APART:
        n = pid_n * cut.BLOCK_N + tl.arange(0, cut.BLOCK_N)[None, :]
        at = ends.partial + (split * T + row_T).to(tl.int64)[:, None] * cut.N + n
        tl.store(at, sum_TN, mask=(row_T < T)[:, None] & (n < cut.N))
    else:
        operands = ()
        if cut.SPLITS == 1:
            operands = load_operands(ends, row_T, pid_n, T, cut)
            if not has_room:
                squares = load_squares(ends, row_T, T, cut)
        early = (constants, operands, squares)
        tile = pid_t * num_blocks + pid_n
        deliver(sum_TN, early, ends, out_ptr, row_T, pid_n, split, tile, T, eps, cut)


@triton.jit(do_not_specialize=["T"])
def sum_kernel(out_ptr, ends, T, cut, BLOCK: tl.constexpr):
    """Adds up the shares of `tma_kernel` in their order: a row's BLOCK outputs each program.

    Takes no tickets and keeps every multiprocessor busy, where the last of a few large programs
    would do all of this alone.
    """
    row = tl.program_id(0)
    pid_n = tl.program_id(1)
    begin(cut)
    n = pid_n * BLOCK + tl.arange(0, BLOCK)
    is_in = n < cut.N
    bias = 0.0
    norm = 0.0
    scale = 0.0
    if cut.SCALES == CHANNELS:
        scale = tl.load(ends.weight_scale + n, mask=is_in, other=0.0)
    if cut.HAS_BIAS:
        bias = tl.load(ends.bias + n, mask=is_in, other=0.0).to(tl.float32)
    if cut.HAS_NORM:
        norm = tl.load(ends.norm + n, mask=is_in, other=0.0).to(tl.float32)
    wait(cut)
    at = row.to(tl.int64) * cut.N + n
    total = tl.load(ends.partial + at, mask=is_in, other=0.0)
    for i in tl.static_range(1, cut.SPLITS):
        total += tl.load(ends.partial + i * (T.to(tl.int64) * cut.N) + at, mask=is_in, other=0.0)
    if cut.SCALES == CHANNELS:
        total = total * tl.load(ends.row_scale + row) * scale
    total += bias
    if cut.END == ADDED:
        total += tl.load(ends.residual + at, mask=is_in, other=0.0)
        tl.store(ends.residual + at, total, mask=is_in)
        if cut.HAS_NORM:
            tl.store(out_ptr + at, total * norm * cut.SHRINK, mask=is_in)
            num_blocks: tl.constexpr = (cut.N + BLOCK - 1) // BLOCK
            tl.store(ends.squares_out + row * num_blocks + pid_n, tl.sum(total * total, axis=0))
    else:
        tl.store(out_ptr + at, total, mask=is_in)


@triton.jit
def scale_kernel(
    residual_ptr, norm_ptr, out_ptr, squares_ptr, D: tl.constexpr, WIDTH: tl.constexpr,
    SHRINK_BY: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if IS_DEPENDENT:
        cuda.gdc_launch_dependents()
    d = tl.arange(0, WIDTH)
    norm = tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    if IS_DEPENDENT:
        cuda.gdc_wait()
    x = tl.load(residual_ptr + row * D + d, mask=d < D, other=0.0)
    tl.store(out_ptr + row * D + d, x * norm * SHRINK_BY, mask=d < D)
    tl.store(squares_ptr + row, tl.sum(x * x, axis=0))
