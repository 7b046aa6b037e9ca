"""Head norms, rotation and the KV write in one pass over the tokens; twin of kernels/rope."""

from __future__ import annotations

from torch import Tensor

from paceline.kernels.norm_numba import scale_row, sum_of_squares
from paceline.kernels.numba_jit import c_function, jit
from paceline.kernels.numba_simd import (
    float_bits,
    load,
    load_f32,
    load_f64,
    load_i64,
    packed,
    rotate,
    store,
    store_f32,
)
from paceline.kernels.numba_team import run_tiles, team
from paceline.kernels.rope import HeadNorms

_TOKENS_PER_TILE = 16


@jit
def _rotate_head(head: int, rotation: int, size: int, copy: int) -> None:
    """In place, and once more to `copy` unless that is 0."""
    whole = size // 16 * 16
    for i in range(0, whole, 16):
        turned = rotate(load(head + 4 * i), load(rotation + 4 * i))
        store(head + 4 * i, turned)
        if copy:
            store(copy + 4 * i, turned)
    for i in range(whole, size, 2):
        x, y = load_f32(head + 4 * i), load_f32(head + 4 * i + 4)
        cos, sin = load_f32(rotation + 4 * i), load_f32(rotation + 4 * i + 4)
        store_f32(head + 4 * i, x * cos - y * sin)
        store_f32(head + 4 * i + 4, y * cos + x * sin)
        if copy:
            store_f32(copy + 4 * i, x * cos - y * sin)
            store_f32(copy + 4 * i + 4, y * cos + x * sin)


@jit
def _copy_head(head: int, size: int, target: int) -> None:
    whole = size // 16 * 16
    for i in range(0, whole, 16):
        store(target + 4 * i, load(head + 4 * i))
    for i in range(whole, size):
        store_f32(target + 4 * i, load_f32(head + 4 * i))


@jit
def _norm_head(head: int, weight: int, size: int, eps: float) -> None:
    if weight:
        scale_row(head, weight, head, size, sum_of_squares(head, size), eps)


def _place_tokens(arguments: int, tile: int, scratch: int) -> None:
    qkv, rotation, slots = load_i64(arguments), load_i64(arguments + 8), load_i64(arguments + 16)
    key, value, page_bytes = (
        load_i64(arguments + 24),
        load_i64(arguments + 32),
        load_i64(arguments + 40),
    )
    num_tokens, num_q = load_i64(arguments + 48), load_i64(arguments + 56)
    num_kv, size = load_i64(arguments + 64), load_i64(arguments + 72)
    q_norm, k_norm = load_i64(arguments + 80), load_i64(arguments + 88)
    eps = load_f64(arguments + 96)
    first = tile * _TOKENS_PER_TILE
    for token in range(first, min(first + _TOKENS_PER_TILE, num_tokens)):
        heads = qkv + 4 * token * (num_q + 2 * num_kv) * size
        turn = rotation + 4 * token * size
        slot = load_i64(slots + 8 * token)
        for i in range(num_q):
            head = heads + 4 * i * size
            _norm_head(head, q_norm, size, eps)
            _rotate_head(head, turn, size, 0)
        for i in range(num_kv):
            at = i * page_bytes + 4 * slot * size
            head = heads + 4 * (num_q + i) * size
            _norm_head(head, k_norm, size, eps)
            _rotate_head(head, turn, size, key + at if slot >= 0 else 0)
            if slot >= 0:
                _copy_head(heads + 4 * (num_q + num_kv + i) * size, size, value + at)


PLACE_TOKENS = c_function(_place_tokens, 3)


@jit
def launch_place(
    team: int,
    body: int,
    tokens: tuple[int, int, int, int],
    pages: tuple[int, int, int],
    norms: tuple[int, int],
    eps: float,
    heads: tuple[int, int, int],
) -> None:
    qkv, rotation, slots, num_tokens = tokens
    key, value, page_bytes = pages
    num_q, num_kv, size = heads
    q_norm, k_norm = norms
    arguments = packed(
        (
            qkv,
            rotation,
            slots,
            key,
            value,
            page_bytes,
            num_tokens,
            num_q,
            num_kv,
            size,
            q_norm,
            k_norm,
            float_bits(eps),
        )
    )
    run_tiles(team, body, arguments, -(-num_tokens // _TOKENS_PER_TILE))


def place_heads(
    qkv_TD: Tensor,
    rotation_TH: Tensor,
    norms: HeadNorms | None,
    key_NSH: Tensor,
    value_NSH: Tensor,
    slot_T: Tensor,
) -> None:
    """Norm and rotate queries and keys in place, write keys and values to their page slots."""
    num_tokens, width = qkv_TD.shape
    num_kv, _, size = key_NSH.shape
    at = (0, 0) if norms is None else (norms.query_H.data_ptr(), norms.key_H.data_ptr())
    launch_place(
        team.address,
        PLACE_TOKENS,
        (qkv_TD.data_ptr(), rotation_TH.data_ptr(), slot_T.data_ptr(), num_tokens),
        (key_NSH.data_ptr(), value_NSH.data_ptr(), 4 * key_NSH.stride(0)),
        at,
        0.0 if norms is None else norms.eps,
        (width // size - 2 * num_kv, num_kv, size),
    )
