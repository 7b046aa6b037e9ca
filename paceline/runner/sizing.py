"""What fits: KV pages, slots with recurrent state, and snapshots. Over bytes and device memory.

Arithmetic over numbers that the caller measured; no torch, so it is tested without a device.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from paceline.config import GIB, CacheConfig
from paceline.errors import ConfigError

logger = logging.getLogger(__name__)
MIB = 1 << 20
DEFAULT_CPU_KV_BYTES = 1 * GIB


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """What the device has, in bytes; `used` counts weights, slot state and other processes."""

    total: int
    used: int


def page_bytes(page_size: int, bytes_per_token: list[int]) -> int:
    """One page of every model that shares the table: target and draft layers."""
    return page_size * sum(bytes_per_token)


def num_pages(
    cache: CacheConfig,
    bytes_per_page: int,
    *,
    budget: int,
    max_model_len: int,
    max_num_seqs: int,
) -> int:
    """Pages to allocate. Refuses a budget that cannot hold one sequence of max_model_len."""
    per_sequence = -(-max_model_len // cache.block_size)
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    # One page is padding. Pages beyond every sequence's worst case would never be used.
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


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Recurrent state of one rank, over all layers."""

    slot: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class StateShare:
    """How many slots and snapshots there are, and the bytes that they take from the KV budget."""

    num_slots: int
    num_snapshots: int
    taken: int


def share_state(
    cache: CacheConfig,
    budget: int,
    state: StateBytes,
    bytes_per_page: int,
    *,
    max_model_len: int,
    asked: int | None,
    default: int,
) -> StateShare:
    """Recurrent states come before pages. `asked`: --max-num-seqs where it was given.

    The budget also holds the pages of one sequence. Snapshots get what was asked for, or a quarter
    of the budget if that much is left. If --max-num-seqs is not given, states get at most half of
    the budget.
    """
    per_sequence = -(-max_model_len // cache.block_size)
    one_sequence = (per_sequence + 1) * bytes_per_page
    wanted = cache.state_snapshot_memory_bytes if cache.enable_prefix_caching else 0
    room = budget - one_sequence - (wanted or 0)
    most = room // state.slot - 1  # one slot is for padding
    if most < (asked or 1):
        needed = ((asked or 1) + 1) * state.slot
        lower = f"lower --max-num-seqs to {most}, " if most > 0 else ""
        raise ConfigError(
            f"{asked or 1} running requests need {needed / GIB:.2f} GiB of recurrent state "
            f"({state.slot / MIB:.2f} MiB each, and one for padding), but "
            f"{max(room, 0) / GIB:.2f} GiB are left for it: the KV cache of {budget / GIB:.2f} GiB "
            f"also holds the pages of one sequence of max_model_len {max_model_len} and "
            f"{(wanted or 0) / GIB:.2f} GiB of snapshots; {lower}raise --kv-cache-memory-bytes to "
            f"{budget - room + needed} or lower --max-model-len."
        )
    num_slots = asked or min(default, most, max(budget // 2 // state.slot - 1, 1))
    if num_slots < (asked or default):
        logger.warning(
            "--max-num-seqs is %d instead of %d: a request has %.2f MiB of recurrent state, and "
            "the KV cache has %.2f GiB. Give --max-num-seqs, or raise --kv-cache-memory-bytes.",
            num_slots,
            default,
            state.slot / MIB,
            budget / GIB,
        )
    states = (num_slots + 1) * state.slot
    if wanted is None:
        wanted = min(budget // 4, budget - one_sequence - states)
    # A page has at most one snapshot.
    num_pages = cache.num_gpu_blocks_override or per_sequence * num_slots
    num_snapshots = min(wanted // state.snapshot, num_pages)
    return StateShare(num_slots, num_snapshots, states + num_snapshots * state.snapshot)


# Context, kernels and about a hundred captured graphs of a thousand nodes each.
GRAPH_BYTES = 2 * GIB
_ACTIVATIONS = 1.5  # of what one layer holds at once: blocks that the allocator cannot reuse


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The largest step of a model: what it holds beside weights, state and pages."""

    tokens: int
    captured_tokens: int  # of the largest graph: graphs allocate separately
    layer_width: int  # numbers of one token that live at once inside a layer
    itemsize: int
    logits_bytes: int  # of all rows that sample, and the scratch of the costliest sampling mode


def step_bytes(models: list[StepSizes]) -> int:
    """Bytes that a step needs at most. Models run one after the other in the same memory."""
    activations = (
        (m.tokens + m.captured_tokens) * m.layer_width * m.itemsize * _ACTIVATIONS for m in models
    )
    return int(max(activations)) + max(m.logits_bytes for m in models) + GRAPH_BYTES
