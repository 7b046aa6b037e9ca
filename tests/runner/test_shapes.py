"""Every plan has a fixed shape that holds it, and few shapes serve all plans."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.kernels.step_rows import StepShape
from paceline.runner.shapes import Buckets, draft_rows, row_starts
from paceline.step import HostDrafts, StepPlan, StepSize


def plan(k_B: list[int], chunks: list[tuple[int, bool]], k: int | None = None) -> StepPlan:
    """Decoding rows with k drafts each, then chunks of (length, samples)."""
    rows = len(k_B) + len(chunks)
    lengths = [x + 1 for x in k_B] + [length for length, _ in chunks]
    return StepPlan(
        step=1,
        k=max(k_B, default=0) if k is None else k,
        uid_B=np.arange(rows, dtype=np.int64),
        slot_B=np.arange(rows, dtype=np.int32),
        query_len_B=np.array(lengths, np.int32),
        k_B=np.array(k_B + [0] * len(chunks), np.int32),
        samples_B=np.array([True] * len(k_B) + [samples for _, samples in chunks]),
        length_bound_B=np.full(rows, 9, np.int32),
    )


BUCKETS = Buckets.of(max_rows=64, max_tokens=512, max_k=3)


@pytest.mark.trap("D8")
@pytest.mark.parametrize("num_rows", range(1, 65))
@pytest.mark.parametrize("k", [0, 1, 3])
def test_every_decode_batch_has_a_captured_shape(num_rows: int, k: int) -> None:
    shape = BUCKETS.shape_of(plan([k] * num_rows, []).step_size())
    assert shape.is_uniform
    assert BUCKETS.is_captured(shape)
    assert shape.rows >= num_rows
    assert shape.k >= k
    assert shape.tokens == shape.rows * shape.width
    assert shape in set(BUCKETS.decode_shapes(shape.k))


@pytest.mark.trap("C4", "C5")
@pytest.mark.parametrize("busy", [plan([3, 1], []), plan([0], []), plan([2], [(40, False)])])
def test_an_idle_replica_leaves_the_others_their_shape_and_their_graph(busy: StepPlan) -> None:
    agreed = StepSize.joined([StepSize(), busy.step_size(), StepSize()])
    assert agreed == busy.step_size()
    assert agreed.has_graph
    assert BUCKETS.is_captured(BUCKETS.shape_of(agreed))


def test_a_step_without_drafts_pays_for_none() -> None:
    assert BUCKETS.shape_of(plan([0, 0], []).step_size()) == StepShape(2, 2, 0, True)


def test_a_chunk_makes_a_step_mixed_and_packs_its_rows() -> None:
    mixed = plan([3, 1], [(40, False), (7, True)])
    shape = BUCKETS.shape_of(mixed.step_size())
    assert not mixed.step_size().is_uniform
    assert shape == StepShape(4, 64, 3, False)
    assert row_starts(mixed, shape).tolist() == [0, 4, 6, 46]
    # Two tokens to decode, a chunk as it is, a last chunk with its sample.
    assert [x.tolist() for x in draft_rows(mixed, shape)] == [[0, 2, 4, 44], [2, 2, 40, 8]]


def test_a_chunk_of_one_token_is_a_decoding_row() -> None:
    assert plan([2], [(1, True)]).step_size().is_uniform


def test_uniform_rows_are_as_far_apart_as_the_tier_is_wide() -> None:
    uniform = plan([1, 0, 3], [])
    shape = BUCKETS.shape_of(uniform.step_size())
    assert row_starts(uniform, shape).tolist() == [0, 4, 8]
    assert [x.tolist() for x in draft_rows(uniform, shape)] == [[0, 2, 4], [2, 2, 2]]


def test_drafts_of_the_host_are_new_to_a_draft_model() -> None:
    """Only the row that may have them computes them all. Other drafters need no other shapes."""
    windows = plan([3, 3, 2], [])
    none, least = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    windows.host_drafts = HostDrafts(np.array([1], np.int32), least, none, least)
    size = StepSize.joined([StepSize(), windows.step_size(), plan([3] * 9, []).step_size()])
    assert windows.step_size().draft_tokens == 2 + 5 + 2
    assert BUCKETS.shape_of(size) == StepShape(16, 64, 3, True)
    buckets = Buckets.of(64, 512, 3, window_k=7, has_draft_model=True)
    shape = buckets.shape_of(size)
    assert shape == StepShape(16, 64, 3, True, own_width=5)
    assert [x.tolist() for x in draft_rows(windows, shape)] == [[0, 5, 10], [2, 5, 2]]
    assert {s.own_width for s in buckets.decode_shapes(3)} == {2}
    assert {s.own_width for s in buckets.decode_shapes(7)} == {9}


def test_steps_above_the_largest_bucket_get_a_shape_of_their_own() -> None:
    buckets = Buckets.of(max_rows=8, max_tokens=8192, max_k=0)
    shape = buckets.shape_of(plan([], [(5000, True)]).step_size())
    assert shape.tokens == 5056
    assert not buckets.is_captured(shape)


def test_small_models_have_graphs_of_large_steps() -> None:
    """There the host would need longer to launch the kernels than the GPU to run them."""
    small = Buckets.of(max_rows=8, max_tokens=8192, max_k=0, weight_bytes=270_000_000)
    assert small.mixed_tokens[-2:] == (6144, 8192)
    shape = small.shape_of(plan([], [(5000, True)]).step_size())
    assert shape.tokens == 5120
    assert small.is_captured(shape)
    medium = Buckets.of(max_rows=8, max_tokens=8192, max_k=0, weight_bytes=7_000_000_000)
    assert medium.mixed_tokens[-1] == 4096
    large = Buckets.of(max_rows=8, max_tokens=8192, max_k=0, weight_bytes=140_000_000_000)
    assert large.mixed_tokens == Buckets.of(8, 8192, 0).mixed_tokens
    assert large.mixed_tokens[-1] == 2048


def test_the_largest_bucket_is_what_the_engine_may_plan() -> None:
    assert BUCKETS.mixed_tokens[-1] == 512
    assert BUCKETS.rows[-1] == 64
    assert BUCKETS.is_captured(BUCKETS.shape_of(plan([], [(512, True)]).step_size()))
