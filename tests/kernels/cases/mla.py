"""Latent attention cases for the Triton twins: rows of every kind between gaps, scattered pages.

Every slot that no row may read holds NaN; the result of entries without an owner must be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.mla.reference import LatentNorm
from tests.kernels.cases.attention import DEAD, Shape, arguments
from tests.kernels.cases.pairs import FLOATS, Arguments, TritonCase


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    rows: list[tuple[int, int]]
    heads: int
    latent: int
    rope: int
    sizes: dict[str, int] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = FLOATS
    is_large: bool = False


def cases() -> Iterator[TritonCase]:
    for named in (*_small(), *_large()):
        yield TritonCase(
            operation="mla_attention",
            name=named.name,
            make=_attention(named),
            outputs=lambda _, result: [result],
            dtypes=named.dtypes,
            is_large=named.is_large,
        )
    for name, heads, sizes, is_large in (
        ("tiny", 3, (12, 16, 8), False),
        ("odd", 4, (10, 24, 6), False),
        ("one head", 1, (0, 16, 4), False),
        ("glm", 20, (192, 512, 64), True),
        ("deepseek", 128, (128, 512, 64), True),
    ):
        yield TritonCase(
            operation="place_latent",
            name=name,
            make=_placing(heads, *sizes),
            outputs=lambda given, _: [given[4], given[5]],
            dtypes=FLOATS,
            is_large=is_large,
        )


def _small() -> Iterator[_Named]:
    few = (torch.float32, torch.bfloat16)  # the interpreter takes its time
    decode = [(1, 1), (1, 17), (1, 90), DEAD]
    yield _Named("decode", decode, 4, 16, 8, {"width": 1})
    yield _Named("dead rows only", [DEAD] * 3, 4, 16, 8, {"width": 1})
    long = [(1, 300), DEAD, (1, 256), (1, 257), (1, 1600)]
    yield _Named("long decode", long, 3, 16, 4, {"width": 1})
    windows = [(4, 4), (2, 33), DEAD, (1, 259), (4, 258)]
    yield _Named("verify", windows, 5, 24, 8, {"width": 4, "gap": 1})
    yield _Named("many heads", [(2, 40), (1, 300)], 40, 16, 8, {"width": 2, "page_size": 4}, few)
    yield _Named("odd sizes", [(3, 70), (1, 9)], 7, 24, 6, {"width": 3, "page_size": 7}, few)
    rows = [(40, 40), (1, 70), DEAD, (3, 300), (20, 90)]
    yield _Named("mixed", rows, 4, 16, 8, {"gap": 2})
    yield _Named("mixed, 20 heads", [(17, 17), (1, 9), (30, 60)], 20, 32, 16, {"gap": 1})
    yield _Named("chunk with history", [(64, 290), (16, 16)], 4, 16, 8, {"page_size": 4}, few)


def _large() -> Iterator[_Named]:
    halves = (torch.float16, torch.bfloat16)
    for name, heads in (("glm", 20), ("deepseek", 128)):
        rows = [(1, 4000 - 37 * i) for i in range(32)]
        yield _Named(f"{name} decode", rows, heads, 512, 64, {"width": 1}, FLOATS, True)
        rows = [(4, 4000 + i) for i in range(64)] + [DEAD] * 4  # not all partials find room
        yield _Named(f"{name} verify", rows, heads, 512, 64, {"width": 4}, halves, True)
        rows = [(1, 1 + 97 * i) for i in range(16)] + [(512, 512), (300, 3000), DEAD, (17, 4000)]
        yield _Named(f"{name} mixed", rows, heads, 512, 64, {"gap": 1}, halves, True)


def _attention(named: _Named) -> Callable[[torch.device, torch.dtype], Arguments]:
    row_size = named.latent + named.rope
    sizes: dict[str, Any] = named.sizes
    shape = Shape(named.rows, (named.heads, 1), row_size, **sizes)

    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        qkv_TD, page_NSH, _, batch, scale = arguments(shape)(device, dtype)
        query_TNH = qkv_TD[:, : named.heads * row_size].unflatten(1, (named.heads, row_size))
        return query_TNH.contiguous(), page_NSH, batch, scale, named.latent

    return make


def _placing(
    heads: int, nope: int, latent: int, rope: int
) -> Callable[[torch.device, torch.dtype], Arguments]:
    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        generator = torch.Generator(device).manual_seed(3)

        def rand(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        # Parts of wider rows, as products give them.
        query_TNH = rand(7, heads * (nope + rope) + 8).to(dtype)[:, 8:].unflatten(1, (heads, -1))
        kv_TH = rand(7, latent + rope + 4).to(dtype)[:, 4:]
        angle_TR = rand(7, rope // 2)
        rotation_TR = torch.complex(angle_TR.cos(), angle_TR.sin()) * 1.25
        norm = LatentNorm(rand(latent).to(dtype), 1e-6)
        out_TNH = torch.zeros(7, heads, latent + rope, dtype=dtype, device=device)
        page_NSH = torch.zeros(1, 32, latent + rope, dtype=dtype, device=device)
        slot_T = torch.tensor([5, -1, 31, 0, 12, -1, 13], dtype=torch.int32, device=device)
        return query_TNH, kv_TH, rotation_TR, norm, out_TNH, page_NSH, slot_T

    return make
