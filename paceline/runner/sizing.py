"""How many KV pages fit: bytes per page over target and draft layers, memory of each device.

Pure arithmetic over numbers that the caller measured; no torch, so it is tested without a device.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import GIB, CacheConfig
from paceline.errors import ConfigError

DEFAULT_CPU_KV_BYTES = 1 * GIB


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """What the device has, in bytes; `used` counts weights, slot state and everybody else."""

    total: int
    used: int


def page_bytes(page_size: int, bytes_per_token: list[int]) -> int:
    """One page of every model that shares the table: target and draft layers."""
    return page_size * sum(bytes_per_token)


def num_pages(
    cache: CacheConfig,
    bytes_per_page: int,
    *,
    max_model_len: int,
    max_num_seqs: int,
    gpu: MemoryReading | None,
    cpu_free_bytes: int,
) -> int:
    """Pages to allocate. Refuses a cache that cannot hold one sequence of max_model_len."""
    per_sequence = -(-max_model_len // cache.block_size)
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    budget = kv_budget(cache, gpu, cpu_free_bytes)
    # One page belongs to nobody (padding), and more than every sequence's worst case is idle.
    pages = min(budget // bytes_per_page - 1, per_sequence * max_num_seqs)
    if pages < per_sequence:
        needed = (per_sequence + 1) * bytes_per_page
        raise ConfigError(
            f"the KV cache of {budget / GIB:.2f} GiB holds {max(pages, 0) * cache.block_size} "
            f"tokens, but one sequence of max_model_len {max_model_len} needs "
            f"{needed / GIB:.2f} GiB; raise --kv-cache-memory-bytes to {needed} or lower "
            "--max-model-len."
        )
    return pages


def kv_budget(cache: CacheConfig, gpu: MemoryReading | None, cpu_free_bytes: int) -> int:
    """Bytes that the KV cache of one rank may take. `cpu_free_bytes`: this rank's share."""
    asked = cache.kv_cache_memory_bytes
    if asked is not None:
        most, of = (cpu_free_bytes, "available to") if gpu is None else (gpu.total, "on the GPU of")
        if asked > most:
            raise ConfigError(
                f"--kv-cache-memory-bytes {asked} ({asked / GIB:.2f} GiB) is more than the {most} "
                f"bytes ({most / GIB:.2f} GiB) {of} this rank; lower it or free some memory."
            )
        return asked
    if gpu is not None:
        return max(int(gpu.total * cache.gpu_memory_utilization) - gpu.used, 0)
    return min(DEFAULT_CPU_KV_BYTES, cpu_free_bytes // 2)


# Context, kernels and about a hundred captured graphs of a thousand nodes each.
GRAPH_BYTES = 2 * GIB
_ACTIVATIONS = 1.5  # of what one layer holds at once: blocks that the allocator cannot reuse


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The largest step of a model: what it holds beside weights, state and pages."""

    tokens: int
    captured_tokens: int  # of the largest graph: graphs have memory of their own
    layer_width: int  # numbers of one token that live at once inside a layer
    itemsize: int
    logits_bytes: int  # of all rows that sample, and what the costliest tail keeps beside them


def step_bytes(models: list[StepSizes]) -> int:
    """Bytes that a step needs at most. Models run one after the other in the same memory."""
    activations = (
        (m.tokens + m.captured_tokens) * m.layer_width * m.itemsize * _ACTIVATIONS for m in models
    )
    return int(max(activations)) + max(m.logits_bytes for m in models) + GRAPH_BYTES
