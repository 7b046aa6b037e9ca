"""Which tile multiplies a matrix of which shape with how many rows, on which GPU: data, read once.

Measured by bench/gemm_gpu --write; never tuned at run time, so the same model gives the same bits.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Row counts of one bucket share a tile, and with it the bits of a row.
BUCKETS = (1, 8, 16, 32, 64, 128, 256)
# Above this only what was measured has tiles.
MOST_ROWS_BY_DEFAULT = 64
MOST_FP8_ROWS = 128  # the same of e4m3
FILE = Path(__file__).with_name("tiles.json")


class Tile(NamedTuple):
    """How a product is cut into programs: see linear/triton/products."""

    kind: str  # fma, mma, dot, tma: see linear/triton/kernels
    block_t: int  # fma: no more rows than this
    block_n: int
    block_k: int  # mma: 32, and 64 for e4m3, which it takes with scales by output only
    warps: int = 4
    depth: int = 1  # fma, mma: chunks of weights on their way; dot, tma: stages of the pipeline
    splits: int = 1  # all but fma: programs that share the inputs of an output
    ahead: int = 0  # all but fma: inputs of a weight row pulled into the cache before the wait
    is_dependent: bool = True  # launched before the kernel in front has ended
    is_apart: bool = False  # tma: a separate kernel adds up the shares of `splits`


def bucket_of(num_rows: int) -> int | None:
    return next((x for x in BUCKETS if num_rows <= x), None)


@cache
def pick_tile(
    end: str, num_outputs: int, num_inputs: int, num_rows: int, dtype: torch.dtype,
    device: torch.device,
) -> Tile | None:  # fmt: skip
    """None: torch's product (cuBLAS) is as fast, with the neighbours as separate kernels."""
    bucket = bucket_of(num_rows)
    if bucket is None:
        return None
    may_be_known = device.type == "cuda" and dtype != torch.float32
    if may_be_known:
        known = _table().get(torch.cuda.get_device_name(device), {})
        shape = f"{num_outputs}x{num_inputs}"
        found = known.get(f"{end} {shape}", {}).get(str(bucket))
        if found is not None:
            return None if found == "cublas" else Tile(*found)
    if dtype.itemsize == 1 and bucket <= MOST_FP8_ROWS:
        return default_fp8_tile(num_outputs, num_inputs, num_rows, device)
    if bucket > MOST_ROWS_BY_DEFAULT:
        return None
    # Measured on 8B shapes: from here on cuBLAS wins, but for the activation that it leaves.
    is_torchs = end == "plain" or (end != "gated" and num_outputs * num_inputs > 8e6)
    if may_be_known and bucket >= 32 and is_torchs:
        return None
    return default_tile(num_outputs, num_inputs, bucket, dtype)


def default_tile(num_outputs: int, num_inputs: int, bucket: int, dtype: torch.dtype) -> Tile:
    """For shapes and GPUs without a measurement."""
    width = 1 << max((num_inputs - 1).bit_length(), 4)
    if bucket == 1:
        return Tile("fma", 1, 8 if num_outputs > 4096 else 4, min(width, 1024))
    if bucket <= 16 or (num_outputs * num_inputs < 2e6 and dtype != torch.float32):
        warps = 8 if num_inputs >= 1024 else 4 if num_inputs >= 768 else 2
        chunks = -(-num_inputs // (32 * warps))
        # Of a small model all weights are on their way at once, and are read again for more rows.
        if chunks < 10:
            return Tile("mma", 8, 16, 32, warps, chunks)
        return Tile("mma", min(bucket, 16), 16, 32, warps, 4 if bucket == 8 else 3)
    if dtype == torch.float32:
        return Tile("dot", bucket, 16, min(width, 64), depth=2)
    block_n = 128 if num_outputs >= 16384 else 64
    return Tile("dot", bucket, block_n, min(width, 64), depth=4, ahead=256)


def default_fp8_tile(
    num_outputs: int, num_inputs: int, num_rows: int, device: torch.device
) -> Tile:
    """The same for e4m3, which torch may lack a product for (ends: fp8, fp8-blocks). Few rows have
    one cut of outputs and inputs, so that a row's bits do not depend on their number."""
    has_copy_engine = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    kind = "tma" if has_copy_engine and num_inputs % 16 == 0 else "dot"
    bucket = bucket_of(num_rows)
    if bucket is None or bucket > MOST_FP8_ROWS:
        return Tile(kind, 128, 128, 128, warps=8, depth=3)
    splits, least = 1, 4 * 128  # inputs of a program
    # An H200 has 132 multiprocessors.
    while num_outputs * splits < 64 * 192 and num_inputs >= 2 * splits * least:
        splits *= 2
    return Tile(kind, max(bucket, 16), 64, 128, depth=4, splits=splits, ahead=512)


@cache
def _table() -> dict[str, dict[str, dict[str, list[Any] | str]]]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}
