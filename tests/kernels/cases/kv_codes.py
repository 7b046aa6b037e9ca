"""fp8 pages: every kernel that writes or reads them, with a scale for each head.

What is written must be equal bit by bit, so its inputs are such that both sides compute the same
numbers before they are rounded: angles of 0, sums of small integers, latents of length 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from paceline.kernels.kv_codes.reference import PAGE_DTYPE, KvScales, encode
from paceline.kernels.linear.reference import HeadPlaces, NormedRows, Product
from paceline.kernels.linear.tiles import Tile
from paceline.kernels.mla.reference import LatentNorm
from tests.kernels.cases import attention, elementwise, mla
from tests.kernels.cases.pairs import FLOATS, Arguments, TritonCase

Make = Callable[[torch.device, torch.dtype], Arguments]


def cases() -> Iterator[TritonCase]:
    wide = {(case.operation, case.name): case for case in (*attention.cases(), *mla.cases())}
    for operation, coded, names in (
        ("paged_attention", coded_attention, ATTENDED),
        ("mla_attention", coded_latents, LATENTS),
    ):
        for name in names:
            case = wide[operation, name]
            # The interpreter takes its time: only float32 is in `make test`.
            dtypes = case.dtypes if name in FIRST else FLOATS[1:]
            make = coded(case.make)
            yield replace(case, name=f"fp8 pages, {name}", make=make, dtypes=dtypes)
    for tokens, heads, size in ((7, (4, 2), 12), (3, (9, 3), 64)):
        make = coded_heads(elementwise.heads_arguments(tokens, heads, size, False))
        name = f"fp8 pages, {tokens}x{heads}x{size}"
        yield TritonCase("place_heads", name, make, lambda given, _: [*given[3:5]], FLOATS)
    for tile in TILES:
        name = f"fp8 pages, {tile.kind if tile else 'by default'}"
        yield TritonCase("norm_linear_heads", name, _products(tile), _placed_heads, FLOATS)
    yield TritonCase(
        "place_latent", "fp8 pages", _placed_latent, lambda given, _: [given[5]], FLOATS
    )


# These need all kernels of their operation.
FIRST = ("mixed, group of 3", "chunk with history", "mixed")
ATTENDED = (
    *("mixed, group of 3", "long decode", "odd pages", "chunk with history"),
    *("chunks of a large step, group of 3", "window, mixed", "block"),
    *("l8 decode", "l8 many rows", "l8 mixed", "l8 prompt", "wide heads", "large window"),
)
LATENTS = ("mixed", "verify", "glm decode", "glm verify", "glm mixed")
TILES = (
    Tile("fma", 4, 16, 128),
    Tile("mma", 8, 16, 32, 2, 3),
    Tile("tma", 32, 64, 32, 4, 2, 2),
    None,
)


def scales_of(num_heads: int, device: torch.device) -> KvScales:
    """No two are alike, and none is a power of two."""
    key_N = 0.011 + 0.003 * torch.arange(num_heads, device=device)
    return KvScales(key_N, 0.7 * key_N)


def with_codes(key_NSH: Tensor, value_NSH: Tensor) -> tuple[Tensor, Tensor, KvScales]:
    """The same pages in fp8: NaN stays NaN."""
    scales = scales_of(len(key_NSH), key_NSH.device)
    key, value = (
        encode(x, s[:, None, None]) for x, s in zip((key_NSH, value_NSH), scales, strict=True)
    )
    return key, value, scales


def coded_attention(make: Make) -> Make:
    def coded(device: torch.device, dtype: torch.dtype) -> Arguments:
        qkv_TD, key_NSH, value_NSH, batch, scale = make(device, dtype)
        key, value, scales = with_codes(key_NSH, value_NSH)
        # Not what the pages hold: no kernel may read it there.
        qkv_TD[:, -2 * key.shape[0] * key.shape[2] :] = float("nan")
        return qkv_TD, key, value, batch, scale, scales

    return coded


def coded_latents(make: Make) -> Make:
    def coded(device: torch.device, dtype: torch.dtype) -> Arguments:
        query_TNH, page_NSH, *rest = make(device, dtype)
        page, _, scales = with_codes(page_NSH, page_NSH)
        return query_TNH, page, *rest, KvScales(scales.key_N, scales.key_N)

    return coded


def coded_heads(make: Make) -> Make:
    def coded(device: torch.device, dtype: torch.dtype) -> Arguments:
        qkv_TD, rotation_TH, norms, key_NSH, value_NSH, slot_T = make(device, dtype)
        qkv_TD[0, ::5] *= 1000  # beyond the range
        qkv_TD[0, 1::5] *= 0.001  # less than the smallest number
        pages = [torch.zeros_like(x, dtype=PAGE_DTYPE) for x in (key_NSH, value_NSH)]
        scales = scales_of(len(key_NSH), device)
        return qkv_TD, torch.ones_like(rotation_TH), norms, *pages, slot_T, scales

    return coded


def _products(tile: Tile | None) -> Make:
    rows, num_q, num_kv, head, inputs = 4, 2, 2, 16, 96

    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        random = torch.Generator().manual_seed(6)
        x_TK = torch.randint(-2, 3, (rows, inputs), generator=random).to(device, dtype)
        shape = ((num_q + 2 * num_kv) * head, inputs)
        weight_NK = torch.randint(-1, 2, shape, generator=random).to(device, dtype)
        key = torch.zeros(num_kv, 9, head, dtype=PAGE_DTYPE, device=device)
        slot = torch.tensor([3, -1, 8, 0], dtype=torch.int32, device=device)
        rotation = torch.ones(rows, head // 2, dtype=torch.complex64, device=device)
        places = HeadPlaces(rotation, key, torch.zeros_like(key), slot, scales_of(num_kv, device))
        return NormedRows(x_TK, None, 0.0), Product(weight_NK, None), places, tile

    return make


def _placed_heads(given: Arguments, _: Tensor) -> list[Tensor]:
    places: HeadPlaces = given[2]
    return [places.key_NSH, places.value_NSH]


def _placed_latent(device: torch.device, dtype: torch.dtype) -> Arguments:
    heads, latent, rope = 3, 16, 8
    random = torch.Generator().manual_seed(7)
    kv_TH = torch.randn(7, latent + rope, generator=random).to(device, dtype)
    kv_TH[:, :latent] = kv_TH[:, :latent].sign()
    weight_L = torch.randn(latent, generator=random).to(device, dtype) * 40
    query_TNH = torch.zeros(7, heads, 12 + rope, device=device, dtype=dtype)
    out_TNH = torch.zeros(7, heads, latent + rope, device=device, dtype=dtype)
    page_NSH = torch.zeros(1, 32, latent + rope, dtype=PAGE_DTYPE, device=device)
    slot_T = torch.tensor([5, -1, 31, 0, 12, -1, 13], dtype=torch.int32, device=device)
    rotation_TR = torch.ones(7, rope // 2, dtype=torch.complex64, device=device)
    places = (out_TNH, page_NSH, slot_T, scales_of(1, device))
    return query_TNH, kv_TH, rotation_TR, LatentNorm(weight_L, 0.0), *places
