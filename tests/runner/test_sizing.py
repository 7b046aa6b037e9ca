"""Cache sizing: pages from bytes, draft layers included, on GPU shares and CPU budgets alike."""

from __future__ import annotations

import pytest

from paceline.config import GIB, CacheConfig
from paceline.errors import ConfigError
from paceline.runner.sizing import MemoryReading, num_pages, page_bytes

LIMITS = {"max_model_len": 1024, "max_num_seqs": 1000}


def test_draft_layers_count_in_every_page() -> None:
    assert page_bytes(16, [1000]) == 16_000
    assert page_bytes(16, [1000, 250]) == 20_000


def test_on_a_gpu_the_share_minus_what_is_used_is_paged() -> None:
    gpu = MemoryReading(total=10 * GIB, used=4 * GIB)
    cache = CacheConfig(gpu_memory_utilization=0.5)
    assert num_pages(cache, 1 << 20, gpu=gpu, cpu_free_bytes=0, **LIMITS) == 1023
    explicit = CacheConfig(kv_cache_memory_bytes=2 * GIB)
    assert num_pages(explicit, 1 << 20, gpu=gpu, cpu_free_bytes=0, **LIMITS) == 2047


def test_on_cpu_the_default_is_a_gib_but_never_more_than_half_of_what_is_free() -> None:
    cache = CacheConfig()
    roomy = num_pages(cache, 1 << 20, gpu=None, cpu_free_bytes=64 * GIB, **LIMITS)
    assert roomy == 1023
    small = num_pages(cache, 1 << 20, gpu=None, cpu_free_bytes=1 * GIB, **LIMITS)
    assert small == 511


def test_no_more_pages_than_all_sequences_could_ever_fill() -> None:
    pages = num_pages(
        CacheConfig(), 1024, max_model_len=64, max_num_seqs=3, gpu=None, cpu_free_bytes=64 * GIB
    )
    assert pages == 12


def test_a_cache_too_small_for_one_sequence_is_refused_with_the_numbers() -> None:
    cache = CacheConfig(kv_cache_memory_bytes=32 << 20)
    with pytest.raises(ConfigError, match=r"496 tokens.*max_model_len 1024.*68157440") as caught:
        num_pages(cache, 1 << 20, gpu=None, cpu_free_bytes=64 * GIB, **LIMITS)
    assert "--kv-cache-memory-bytes" in str(caught.value)


def test_a_cache_larger_than_memory_is_refused_with_both_figures() -> None:
    cache = CacheConfig(kv_cache_memory_bytes=4 * GIB)
    asked, most = 4 * GIB, 3 * GIB
    with pytest.raises(ConfigError, match=rf"{asked} .*more than the {most} bytes.*available"):
        num_pages(cache, 1 << 20, gpu=None, cpu_free_bytes=most, **LIMITS)
    gpu = MemoryReading(total=most, used=0)
    with pytest.raises(ConfigError, match=rf"{asked} .*more than the {most} bytes.*on the GPU"):
        num_pages(cache, 1 << 20, gpu=gpu, cpu_free_bytes=64 * GIB, **LIMITS)
