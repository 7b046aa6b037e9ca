"""Cache sizing: pages from bytes, draft layers included, on GPU shares and CPU budgets alike."""

from __future__ import annotations

import re

import pytest

from paceline.config import GIB, CacheConfig
from paceline.errors import ConfigError
from paceline.runner.sizing import (
    MemoryReading,
    StateBytes,
    kv_budget,
    num_pages,
    page_bytes,
    share_state,
)

LIMITS = {"max_model_len": 1024, "max_num_seqs": 1000}


def test_draft_layers_count_in_every_page() -> None:
    assert page_bytes(16, [1000]) == 16_000
    assert page_bytes(16, [1000, 250]) == 20_000


def test_on_a_gpu_the_share_minus_what_is_used_is_paged() -> None:
    gpu = MemoryReading(total=10 * GIB, used=4 * GIB)
    cache = CacheConfig(gpu_memory_utilization=0.5)
    assert num_pages(cache, 1 << 20, budget=kv_budget(cache, gpu, 0), **LIMITS) == 1023
    explicit = CacheConfig(kv_cache_memory_bytes=2 * GIB)
    assert num_pages(explicit, 1 << 20, budget=kv_budget(explicit, gpu, 0), **LIMITS) == 2047


def test_on_cpu_the_default_is_a_gib_but_never_more_than_half_of_what_is_free() -> None:
    cache = CacheConfig()
    roomy = num_pages(cache, 1 << 20, budget=kv_budget(cache, None, 64 * GIB), **LIMITS)
    assert roomy == 1023
    small = num_pages(cache, 1 << 20, budget=kv_budget(cache, None, 1 * GIB), **LIMITS)
    assert small == 511


def test_no_more_pages_than_all_sequences_could_ever_fill() -> None:
    pages = num_pages(CacheConfig(), 1024, budget=GIB, max_model_len=64, max_num_seqs=3)
    assert pages == 12


def test_a_cache_too_small_for_one_sequence_is_refused_with_the_numbers() -> None:
    cache = CacheConfig(kv_cache_memory_bytes=32 << 20)
    with pytest.raises(ConfigError, match=r"496 tokens.*max_model_len 1024.*68157440") as caught:
        num_pages(cache, 1 << 20, budget=kv_budget(cache, None, 64 * GIB), **LIMITS)
    assert "--kv-cache-memory-bytes" in str(caught.value)


def test_a_cache_larger_than_memory_is_refused_with_both_figures() -> None:
    cache = CacheConfig(kv_cache_memory_bytes=4 * GIB)
    asked, most = 4 * GIB, 3 * GIB
    with pytest.raises(ConfigError, match=rf"{asked} .*more than the {most} bytes.*available"):
        num_pages(cache, 1 << 20, budget=kv_budget(cache, None, most), **LIMITS)
    gpu = MemoryReading(total=most, used=0)
    with pytest.raises(ConfigError, match=rf"{asked} .*more than the {most} bytes.*on the GPU"):
        num_pages(cache, 1 << 20, budget=kv_budget(cache, gpu, 64 * GIB), **LIMITS)


MIB = 1 << 20
STATE = StateBytes(slot=144 * MIB, snapshot=140 * MIB)  # a model of 27B
PAGE = 1 * MIB  # 64 KiB a token
SHAPE = {"max_model_len": 4096, "default": 256}


def test_states_that_do_not_fit_are_refused_with_both_figures_and_what_would() -> None:
    with pytest.raises(
        ConfigError, match=r"256 running requests need 36\.14 GiB.*19\.75 GiB are left"
    ) as e:
        share_state(CacheConfig(), 20 * GIB, STATE, PAGE, asked=256, **SHAPE)
    most = int(re.findall(r"lower --max-num-seqs to (\d+)", str(e.value))[0])
    enough = int(re.findall(r"--kv-cache-memory-bytes to (\d+)", str(e.value))[0])
    assert share_state(CacheConfig(), 20 * GIB, STATE, PAGE, asked=most, **SHAPE).num_slots == most
    assert share_state(CacheConfig(), enough, STATE, PAGE, asked=256, **SHAPE).num_slots == 256
    for budget, asked in ((20 * GIB, most + 1), (enough - 1, 256)):
        with pytest.raises(ConfigError):
            share_state(CacheConfig(), budget, STATE, PAGE, asked=asked, **SHAPE)


def test_a_default_number_of_requests_is_lowered_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    share = share_state(CacheConfig(), 20 * GIB, STATE, PAGE, asked=None, **SHAPE)
    assert share.num_slots == 70  # half of the budget, with the one for padding
    assert "--max-num-seqs is 70 instead of 256" in caplog.text
    caplog.clear()
    roomy = share_state(CacheConfig(), 200 * GIB, STATE, PAGE, asked=None, **SHAPE)
    assert roomy.num_slots == 256
    assert not caplog.text


def test_snapshots_have_a_quarter_of_the_budget_or_what_was_asked_for() -> None:
    budget = 40 * GIB
    quarter = share_state(CacheConfig(), budget, STATE, PAGE, asked=8, **SHAPE)
    assert quarter.num_snapshots == budget // 4 // STATE.snapshot
    cache = CacheConfig(state_snapshot_memory_bytes=1 * GIB)
    asked = share_state(cache, budget, STATE, PAGE, asked=8, **SHAPE)
    assert asked.num_snapshots == 7
    for none in (
        CacheConfig(state_snapshot_memory_bytes=0),
        CacheConfig(enable_prefix_caching=False),
    ):
        assert share_state(none, budget, STATE, PAGE, asked=8, **SHAPE).num_snapshots == 0


def test_snapshots_take_less_than_a_quarter_where_states_need_the_room() -> None:
    share = share_state(CacheConfig(), 20 * GIB, STATE, PAGE, asked=130, **SHAPE)
    assert share.num_snapshots == 9
    cache = CacheConfig(kv_cache_memory_bytes=20 * GIB)
    budget = 20 * GIB - share.taken
    pages = num_pages(cache, PAGE, budget=budget, max_model_len=4096, max_num_seqs=130)
    assert pages * 16 >= 4096, "one sequence always fits"


def test_a_page_has_at_most_one_snapshot() -> None:
    tiny = StateBytes(slot=1000, snapshot=1000)
    shape = {"max_model_len": 64, "default": 4}
    assert share_state(CacheConfig(), GIB, tiny, 1024, asked=None, **shape).num_snapshots == 16
    few = CacheConfig(num_gpu_blocks_override=5)
    assert share_state(few, GIB, tiny, 1024, asked=None, **shape).num_snapshots == 5


def test_a_budget_without_room_for_one_state_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1 running requests need 0\.28 GiB.*0\.00 GiB are left"):
        share_state(CacheConfig(), 200 * MIB, STATE, PAGE, asked=None, **SHAPE)
