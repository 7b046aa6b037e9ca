"""Decode attention over long contexts on a GPU: every candidate checked and timed in one run.

usage: python -m bench.long_contexts_gpu [--json FILE] [--seconds 420] [--only TEXT] [--tiny]

Prints µs and the share of 4.8 TB/s (GQA of an 8B model; MLA of GLM-4.7-Flash), first for this
checkout, then for candidates. `layer` is the time of a whole layer of an 8B model with the
candidate inside, less the layer without attention: shared memory that attention takes is missing
to the products behind it (bench/h200_kernels.md). `read` loads the same pages and computes nothing.
Candidates that only differ in warps, stages and programs have the bits of the kernel in use.
--tiny: small cases, on any GPU or in Triton's interpreter (tests/bench/test_long_contexts.py), only
checked.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from bench.gemm_gpu import timed
from bench.span_kernels import read_kernel, use_pairs
from paceline.kernels.attention.reference import AttentionBatch
from paceline.kernels.attention.reference import paged_attention as attention_reference
from paceline.kernels.attention.triton import attend, spans, work
from paceline.kernels.attention.triton.spans import SpanTiles
from paceline.kernels.gpu.device import num_multiprocessors
from paceline.kernels.mla.reference import mla_attention as latent_reference
from paceline.kernels.mla.triton import attend as latent
from paceline.kernels.mla.triton.kernels import LatentTiles

MEMORY_RATE = 4.8e12  # an H200's, by its datasheet
COLD_BYTES = 300e6  # several times the cache
TOLERANCE = 8e-3  # relative to the reference, in bf16
PAGE_SIZE = 16
# Requests by tokens of each.
GQA_SHAPES = ((1, 32_000), (1, 64_000), (1, 128_000), (8, 16_000), (64, 4_000))
MLA_SHAPES = ((1, 32_000), (1, 128_000), (8, 16_000), (64, 4_000))
TINY_SHAPES = ((1, 2_500), (3, 700))
INTERPRETED = ("checkout", "reach 512", "pairs w4 s2 p3")


@dataclass(frozen=True)
class Heads:
    """A layer's attention."""

    num_q: int
    num_kv: int
    size: int  # of a head; of a latent row with its rotary part
    latent: int = 0  # 0: GQA

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv * self.size * (1 if self.latent else 2)


L8, GLM = Heads(32, 8, 128), Heads(20, 1, 576, 512)
TINY_L8, TINY_GLM = Heads(4, 2, 16), Heads(4, 1, 24, 16)


@dataclass(frozen=True)
class Candidate:
    """How attention is built; the first one of a kind is what the checkout does."""

    name: str
    tiles: SpanTiles | LatentTiles | None = None
    pairs: bool = False
    reach: int = 0  # 0: as the checkout

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(use_pairs() if self.pairs else nullcontext())
            if self.tiles is not None:
                module: Any = spans if isinstance(self.tiles, SpanTiles) else latent
                chosen = mock.patch.object(module, "span_tiles", return_value=self.tiles)
                stack.enter_context(chosen)
            yield

    def changes_bits(self) -> bool:
        return bool(self.reach) or self.pairs or isinstance(self.tiles, LatentTiles)

    def prepare(self, batch: AttentionBatch, num_entries: int, heads: Heads) -> None:
        """The lists, for as many programs as there are."""
        if heads.latent:
            batch.work = None  # made by the first call
            return
        few = self.tiles.programs_per_sm if isinstance(self.tiles, SpanTiles) else 0
        changes = {"reach": self.reach or work.REACH}
        if few:
            changes["programs_per_sm"] = few
        batch.work = work.make_work(batch, num_entries, heads.num_kv, **changes)


def span_candidates() -> list[Candidate]:
    """Warps, stages (buffers of 32 KB: one fewer), programs per multiprocessor, registers."""
    return [
        Candidate("checkout"),
        Candidate("reach 512", reach=512),
        Candidate("w4 s2 p3", SpanTiles(4, 2, 3, 168)),
        Candidate("w4 s2 p4", SpanTiles(4, 2, 4, 128)),
        Candidate("w4 s3 p2", SpanTiles(4, 3, 2, 255)),
        Candidate("w4 s3 p3", SpanTiles(4, 3, 3, 168)),
        Candidate("w4 s4 p2", SpanTiles(4, 4, 2, 255)),
        Candidate("w8 s2 p2", SpanTiles(8, 2, 2, 128)),
        Candidate("w8 s3 p2", SpanTiles(8, 3, 2, 128)),
        Candidate("w8 s3 p2, reach 512", SpanTiles(8, 3, 2, 128), reach=512),
        Candidate("pairs w4 s2 p2", SpanTiles(4, 2, 2, 255), pairs=True),
        Candidate("pairs w4 s2 p3", SpanTiles(4, 2, 3, 168), pairs=True),
        Candidate("pairs w8 s2 p2", SpanTiles(8, 2, 2, 128), pairs=True),
    ]


def latent_candidates() -> list[Candidate]:
    """Tiles of half of the 20 heads read all KV twice, the second time from the L2 cache."""
    return [
        Candidate("checkout"),
        Candidate("g10 b64 w8 s2", LatentTiles(10, 16, 64, 8, 2)),
        Candidate("g10 b64 w16 s2", LatentTiles(10, 16, 64, 16, 2)),
        Candidate("g10 b32 w8 s3", LatentTiles(10, 16, 32, 8, 3, 2)),
        Candidate("g20 b64 w8 s2", LatentTiles(20, 32, 64, 8, 2)),
        Candidate("g20 b64 w16 s2", LatentTiles(20, 32, 64, 16, 2)),
        Candidate("g20 b32 w8 s3", LatentTiles(20, 32, 32, 8, 3)),
    ]


# ---- operands


@dataclass
class Problem:
    """Rows of `width` queries over `length` tokens each."""

    heads: Heads
    num_rows: int
    length: int
    width: int
    device: torch.device
    dtype: torch.dtype

    @property
    def name(self) -> str:
        kind = "mla" if self.heads.latent else "gqa"
        return f"{kind} {self.num_rows}x{self.length}" + ("" if self.width == 1 else " verify")

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.length * self.heads.bytes_per_token

    @property
    def num_entries(self) -> int:
        return self.num_rows * self.width

    def batch(self) -> AttentionBatch:
        """Pages in random order."""
        num_pages = -(-self.length // PAGE_SIZE)
        order = torch.randperm(self.num_rows * num_pages, device=self.device).int()

        def integers(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        return AttentionBatch(
            row_start_B=integers([i * self.width for i in range(self.num_rows)]),
            length_B=integers([self.length] * self.num_rows),
            slot_B=integers(list(range(self.num_rows))),
            table_SP=order.view(self.num_rows, num_pages).contiguous(),
            page_size=PAGE_SIZE,
            group_size=self.heads.num_q // self.heads.num_kv,
            query_len_B=integers([self.width] * self.num_rows),
            max_query_len=self.width,
        )

    def numbers(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype).normal_()

    def queries(self) -> Tensor:
        if self.heads.latent:
            return self.numbers(self.num_entries, self.heads.num_q, self.heads.size) * 0.1
        columns = (self.heads.num_q + 2 * self.heads.num_kv) * self.heads.size
        return self.numbers(self.num_entries, columns)

    def caches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        num_slots = self.num_rows * -(-self.length // PAGE_SIZE) * PAGE_SIZE
        shape = (self.heads.num_kv, num_slots, self.heads.size)
        return [(self.numbers(*shape), self.numbers(*shape)) for _ in range(count)]

    def call(self, query: Tensor, cache: tuple[Tensor, Tensor], batch: AttentionBatch) -> Tensor:
        if self.heads.latent:
            return latent.mla_attention(query, cache[0], batch, 0.1, self.heads.latent)
        return attend.paged_attention(query, *cache, batch, self.heads.size**-0.5)

    def wanted(self, query: Tensor, cache: tuple[Tensor, Tensor], batch: AttentionBatch) -> Tensor:
        """From the reference in fp32, on the CPU if that is where it fits."""
        batch = replace(batch, work=None)
        key, value = (x.float() for x in cache)
        if self.heads.latent:
            return latent_reference(query.float(), key, batch, 0.1, self.heads.latent)
        return attention_reference(query.float(), key, value, batch, self.heads.size**-0.5)


# ---- checking and timing


class Runner:
    """Calls of one problem by any candidate."""

    def __init__(self, problem: Problem, num_sets: int) -> None:
        torch.manual_seed(problem.length)
        self.problem = problem
        self._query, self._batch = problem.queries(), problem.batch()
        self._caches = problem.caches(num_sets)
        self.wanted = problem.wanted(self._query, self._caches[0], self._batch)

    def __call__(self, candidate: Candidate, index: int = 0) -> Tensor:
        with candidate.in_use():
            if index == 0:
                candidate.prepare(self._batch, self.problem.num_entries, self.problem.heads)
            cache = self._caches[index % len(self._caches)]
            return self.problem.call(self._query, cache, self._batch)

    def refused(self, candidates: list[Candidate]) -> dict[str, str]:
        """Candidates that must not be timed, and why."""
        bad, first = {}, None
        for candidate in candidates:
            try:
                found = self(candidate)
            except Exception as error:
                bad[candidate.name] = f"{type(error).__name__} {str(error)[:60]}"
                continue
            wrong = float((found.float() - self.wanted).norm() / self.wanted.norm())
            if not wrong < TOLERANCE:
                bad[candidate.name] = f"relative error {wrong:.2g}"
            elif first is None:
                first = found
            elif not candidate.changes_bits() and not torch.equal(found, first):
                bad[candidate.name] = "other bits"
        return bad

    def alone_us(self, candidate: Candidate) -> float:
        """Lists are made before: a step makes them once for all layers."""
        self(candidate)
        with candidate.in_use():
            calls = [
                partial(self.problem.call, self._query, cache, self._batch)
                for cache in self._caches
            ]
            return timed(lambda i: calls[i % len(calls)](), max(len(calls), 4))

    def read_us(self, num_stages: int) -> float:
        """The pages of all rows, read by a persistent kernel that computes nothing."""
        batch, (num_kv, _, size) = self._batch, self._caches[0][0].shape
        programs = 3 * num_multiprocessors(self._query.device)
        out = torch.empty(programs, 64, triton.next_power_of_2(size), device=self._query.device)

        def call(index: int) -> None:
            key, value = self._caches[index % len(self._caches)]
            read_kernel[(programs,)](
                *(key, value, batch.table_SP, out, self.problem.length, key.stride(0)),
                *(batch.table_SP.stride(0), self.problem.num_rows * num_kv),
                HEADS=num_kv,
                HEAD=size,
                PADDED=triton.next_power_of_2(size),
                PAGE=PAGE_SIZE,
                SIZE=64,
                HAS_VALUES=not self.problem.heads.latent,
                STAGES=num_stages,
                num_warps=4,
            )

        return timed(call, max(len(self._caches), 4))

    def layer_us(self, candidate: Candidate, stack: Any) -> float:
        """Of layers whose products follow each other as in a step."""
        self(candidate)
        state, calls = stack.inputs(self.problem.num_entries), iter(range(1 << 40))

        def attention(qkv_TD: Tensor, *_: Any) -> Tensor:
            cache = self._caches[next(calls) % len(self._caches)]
            return self.problem.call(qkv_TD, cache, self._batch)

        with candidate.in_use():
            stack._attend_with(attention)
            return timed(lambda _: stack.run(*state, True), 2) / len(stack.layers)


def copy_rate() -> float:
    """Bytes per second that torch reads, of one large tensor."""
    numbers = torch.empty(1 << 30, device="cuda", dtype=torch.bfloat16).normal_()
    took_us = timed(lambda _: numbers.view(torch.int32).max(), 4)
    return numbers.nbytes / took_us * 1e6


def problems(is_tiny: bool, device: torch.device) -> Iterator[tuple[Problem, list[Candidate]]]:
    dtype = torch.float16 if is_tiny else torch.bfloat16  # the interpreter has no bf16
    for heads, shapes, candidates in (
        (TINY_L8 if is_tiny else L8, GQA_SHAPES, span_candidates()),
        (TINY_GLM if is_tiny else GLM, MLA_SHAPES, latent_candidates()),
    ):
        if is_tiny:  # the interpreter has neither warps nor stages
            candidates = [c for c in candidates if c.name in INTERPRETED]
        for num_rows, length in TINY_SHAPES if is_tiny else shapes:
            for width in (1, 4) if num_rows == 1 and not heads.latent else (1,):
                problem = Problem(heads, num_rows, length, width, device, dtype)
                yield problem, candidates


def measure(problem: Problem, candidates: list[Candidate], stack: Any) -> list[dict[str, Any]]:
    runner = Runner(problem, int(min(max(COLD_BYTES // problem.num_bytes, 2), 16)))
    bad = runner.refused(candidates)
    found = []
    plain_us = _without_attention(stack, problem) if stack is not None else 0.0
    for candidate in candidates:
        row: dict[str, Any] = {"case": problem.name, "candidate": candidate.name}
        row["failed"] = bad.get(candidate.name)
        try:
            if not row["failed"]:
                row["us"] = round(runner.alone_us(candidate), 2)
                row["share"] = round(problem.num_bytes / row["us"] * 1e6 / MEMORY_RATE, 3)
                if stack is not None:
                    row["layer_us"] = round(runner.layer_us(candidate, stack) - plain_us, 2)
        except Exception as error:
            row["failed"] = f"{type(error).__name__} {str(error)[:60]}"
        found.append(row)
        _show(row)
    for stages in (2, 4):
        took = runner.read_us(stages)
        share = round(problem.num_bytes / took * 1e6 / MEMORY_RATE, 3)
        row = {"case": problem.name, "candidate": f"read s{stages}", "us": round(took, 2)}
        found.append({**row, "share": share})
        _show(found[-1])
    return found


def _without_attention(stack: Any, problem: Problem) -> float:
    from bench.gemm_stack import no_attention

    stack._attend_with(no_attention)
    state = stack.inputs(problem.num_entries)
    return timed(lambda _: stack.run(*state, True), 2) / len(stack.layers)


def _show(row: dict[str, Any]) -> None:
    rest = row.get("failed") or f"{row['us']:9.2f} µs {100 * row['share']:5.1f} %"
    if "layer_us" in row:
        rest += f"   layer {row['layer_us']:9.2f}"
    print(f"{row['case']:22} {row['candidate']:22} {rest}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=420, help="start no case after this")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    torch.set_grad_enabled(False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin_s, found, failed = time.monotonic(), [], 0
    if not args.tiny:
        from bench.gemm_stack import Stack

        print(f"torch reads {copy_rate() / 1e12:.2f} TB/s", flush=True)
        stack = Stack("l8", 4)
    for problem, candidates in problems(args.tiny, device):
        if args.only not in problem.name:
            continue
        if time.monotonic() - begin_s > args.seconds:
            print(f"no time for {problem.name}")
            failed += 1
            continue
        if args.tiny:
            bad = Runner(problem, 1).refused(candidates)
            print(problem.name, len(candidates), "candidates", bad)
            failed += len(bad)
            continue
        is_small = not problem.heads.latent and problem.num_entries <= 64
        found += measure(problem, candidates, stack if is_small else None)
        torch.cuda.empty_cache()
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"bench": "long_contexts", "tiny": args.tiny, "cells": found}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
