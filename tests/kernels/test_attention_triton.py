"""A query's attention has the same bits whatever else is in its batch, and however it is cut."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from paceline.kernels.attention.reference import AttentionBatch
from tests.gpu.engines import has_gluon_kernels
from tests.kernels.cases.attention import DEAD, Shape, arguments, attention_batch, cases
from tests.kernels.cases.pairs import TritonCase, check
from tests.kernels.interpreted import run_interpreted

SHAPE = Shape([(3, 300), (1, 2900), DEAD], (2, 1), 16, width=4)
# A long row, whose reaches are neither the shortest nor whole stretches, and 63 others.
CROWD = Shape([(3, 3300), *((1 + i % 4, 9 + 7 * i % 50) for i in range(63))], (2, 1), 16, width=4)
PROMPTS = [c for c in cases() if any(word in c.name for word in ("prompt", "chunk", "mixed"))]
WIDE_WINDOW = 1500  # begins in the middle of a reach
WINDOW = 43  # the first query of row 0 sees the last key of a stretch, and its last query does not


def outcome(
    device: torch.device,
    batch_rows: list[int],
    width: int = 4,
    window: int | None = None,
    shape: Shape = SHAPE,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """The last query of each of these rows, computed in a batch of them alone."""
    from paceline.kernels.attention.triton.attend import paged_attention

    qkv_TD, key, value, batch, scale = arguments(replace(shape, window=window))(device, dtype)
    rows = torch.tensor(batch_rows, device=device)
    query_len_B = batch.query_len_B[rows].clamp(max=width)
    last_B = (batch.row_start_B + batch.query_len_B.clamp(min=1))[rows] - 1
    part = AttentionBatch(
        row_start_B=torch.arange(len(rows), dtype=torch.int32, device=device) * width,
        query_len_B=query_len_B,
        length_B=batch.length_B[rows],
        slot_B=batch.slot_B[rows],
        table_SP=batch.table_SP,
        page_size=batch.page_size,
        group_size=batch.group_size,
        max_query_len=width,
        window=window,
    )
    query_TD = qkv_TD.new_zeros(len(rows) * width, qkv_TD.shape[1])
    count_B = query_len_B.long()
    for i, (count, last) in enumerate(zip(count_B.tolist(), last_B.tolist(), strict=True)):
        query_TD[i * width : i * width + count] = qkv_TD[last + 1 - count : last + 1]
    found = paged_attention(query_TD, key, value, part, scale)
    return found[part.row_start_B.long() + count_B.clamp(min=1) - 1]


def check_bits(device_name: str) -> None:
    from paceline.kernels.attention.triton import work

    device = torch.device(device_name)
    together = outcome(device, [0, 1, 2])
    assert not together[2].any(), "a row without a request is zero"
    assert torch.equal(outcome(device, [0])[0], together[0])
    assert torch.equal(outcome(device, [2, 0, 1], width=1)[1:], together[:2])
    assert torch.equal(outcome(device, [1, 2], width=32)[0], together[1])
    # Rows in blocks, stretches, reaches or one span; the last also where partials find no room.
    for name, value in (("LITTLE", 0), ("MOST_PARTIALS", 0), ("MOST_PARTIALS", 5)):
        was = getattr(work, name)
        setattr(work, name, value)
        assert torch.equal(outcome(device, [0, 1, 2]), together), (name, value)
        setattr(work, name, was)
        wide = outcome(device, [0, 1, 2], window=WIDE_WINDOW)
        setattr(work, name, value)
        assert torch.equal(outcome(device, [0, 1, 2], window=WIDE_WINDOW), wide), (name, value)
        setattr(work, name, was)
    narrow = outcome(device, [0, 1, 2], window=WINDOW)
    assert torch.equal(outcome(device, [2, 0, 1], width=1, window=WINDOW)[1:], narrow[:2])
    assert torch.equal(outcome(device, [1, 0], width=32, window=WINDOW)[1], narrow[0])
    assert not torch.equal(narrow, together)


def check_crowd(device_name: str) -> None:
    """A long row alone has the bits that it has among 63 others, however it is cut."""
    from paceline.kernels.attention.triton import work

    device = torch.device(device_name)

    def found(rows: list[int], reaches: int, **changes: Any) -> Tensor:
        """In fp32, whose bits hide no order of sums."""
        with mock.patch.multiple(work, most_reaches=lambda *_: reaches, **changes):
            return outcome(device, rows, shape=CROWD, dtype=torch.float32)

    together = found(list(range(64)), 3)
    assert torch.equal(found([0], 3)[0], together[0])
    for changes in ({"LITTLE": 0}, {"MOST_PARTIALS": 0}):  # reaches, or one span
        assert torch.equal(found([0, 1], 3, **changes), together[:2]), changes
    # A GPU with few multiprocessors: the row is one reach, even where there is little to do.
    alone = found([0], 1)[0]
    assert torch.equal(found([0, 1], 1, LITTLE=0)[0], alone)
    assert not torch.equal(alone, together[0]), "reaches are seen in these bits"


def check_room() -> None:
    """Partial results and items fit in what shapes alone make room for."""
    from paceline.kernels.attention.triton import work

    random = Random(1)
    for _ in range(30):
        lengths = [random.choice((0, 1, 70, 300, 1100, 2500, 9000)) for _ in range(6)]
        rows = [(min(n, random.randint(1, 4)), n) if n else DEAD for n in lengths]
        window = random.choice((None, None, 45, 700, 1500))
        shape = Shape(rows, (2, 1), 16, width=4, window=window)
        table_SP = torch.zeros(6, 9000 // 16 + 1, dtype=torch.int32)
        batch = attention_batch(shape, table_SP, torch.device("cpu"))
        most = mock.Mock(return_value=random.choice((1, 2, 5, 49)))
        changes: Any = {"LITTLE": random.choice((0, 8, 64)), "most_reaches": most}
        sizes: Any = random.choice(({}, {"reach": 256}))
        with mock.patch.multiple(work, **changes):
            made = work.make_work(batch, 24, 1, **sizes)
        items = made.span_E8[: made.count_2[0]]
        assert len(items) == made.count_2[0]
        cut = sorted(x for x in items[:, 6].tolist() if x >= 0)
        assert cut == list(range(len(cut))), "every partial result has one place"
        assert len(cut) <= made.num_partials, (rows, window, changes)


def test_partial_results_find_room_interpreted() -> None:
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:check_room")


def test_bits_are_the_rows_own_business_interpreted() -> None:
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:check_bits", "cpu")


def test_a_long_row_has_the_same_bits_alone_and_among_64_interpreted() -> None:
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:check_crowd", "cpu")


@pytest.mark.gpu
def test_a_long_row_has_the_same_bits_alone_and_among_64_on_the_gpu() -> None:
    check_crowd("cuda")


@pytest.mark.gpu
def test_bits_are_the_rows_own_business_on_the_gpu() -> None:
    check_bits("cuda")


def test_prompts_have_the_same_bits_however_they_are_cut_into_chunks_interpreted() -> None:
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:check_chunks", "cpu")


@pytest.mark.gpu
def test_prompts_have_the_same_bits_however_they_are_cut_into_chunks() -> None:
    check_chunks("cuda")
    check_chunks("cuda", window=100)
    check_chunks("cuda", heads=(3, 1), head_size=128)
    # More tiles than multiprocessors.
    check_chunks("cuda", heads=(32, 8), head_size=128)


@pytest.mark.gpu
def test_prompts_have_the_same_bits_by_the_kernel_of_other_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_no_hopper(monkeypatch)
    check_chunks("cuda")
    check_chunks("cuda", heads=(32, 8), head_size=128)


@pytest.mark.gpu
@pytest.mark.parametrize("case", PROMPTS, ids=str)
def test_the_kernel_of_other_gpus_agrees_with_the_reference_on_hopper(
    case: TritonCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_no_hopper(monkeypatch)
    for dtype in case.dtypes:
        check(case, torch.device("cuda"), dtype)


@pytest.mark.gpu
def test_who_computes_prompts_on_hopper() -> None:
    """What the copy engine cannot read is left to the kernel that reads everything."""
    from paceline.kernels.attention.triton import attend, tiles

    if not has_gluon_kernels():
        pytest.skip("made for another GPU, or another Triton")
    from paceline.kernels.attention.hopper import tiles as hopper_tiles

    device = torch.device("cuda")

    hoppers, all_others = hopper_tiles, tiles
    for changes, dtype, expected in (
        ({}, torch.bfloat16, hoppers),
        ({"heads": (3, 1)}, torch.float16, hoppers),
        ({}, torch.float32, all_others),
        ({"head_size": 64}, torch.bfloat16, all_others),
        ({"page_size": 32}, torch.bfloat16, all_others),
        ({"window": 20}, torch.bfloat16, all_others),
    ):
        shape = replace(Shape([(40, 40)], (4, 1), 128), **changes)
        qkv_TD, key, value, batch, _ = arguments(shape)(device, dtype)
        found = attend.tiles_kernel(qkv_TD, key, value, batch)
        assert found is expected.attend_tiles, (changes, dtype)


def use_no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.kernels.attention.triton import attend

    if not has_gluon_kernels():
        pytest.skip("it is this GPU's anyway")
    monkeypatch.setattr(attend, "is_hopper", lambda device: False)


def check_chunks(
    device_name: str,
    window: int | None = None,
    heads: tuple[int, int] = (4, 1),
    head_size: int = 64,
) -> None:
    """Chunks begin anywhere within blocks; those of few entries read their own keys in the pages,
    others in qkv_TD, where they lie between NaN."""
    from paceline.kernels.attention.triton.attend import paged_attention
    from paceline.kernels.attention.triton.tiles import MOST_FUSED_ROWS

    cuts = [(127, 500), (640, 700)]  # as many as an interpreter has time for
    if device_name == "cuda":
        cuts += [(0, 300), (300, 700), (100, 300)]
    shape = Shape([(700, 700)], heads, head_size, window=window)
    qkv_TD, key, value, batch, scale = arguments(shape)(torch.device(device_name), torch.float16)
    whole = paged_attention(qkv_TD, key, value, batch, scale)
    nan_TD = torch.full_like(qkv_TD[:150], float("nan"))
    for begin, end in cuts:
        count = end - begin
        for after in (1, 150):
            part = replace(
                batch,
                row_start_B=torch.full_like(batch.row_start_B, 5),
                query_len_B=torch.full_like(batch.query_len_B, count),
                length_B=torch.full_like(batch.length_B, end),
                max_query_len=count,
                work=None,
            )
            part_TD = torch.cat((nan_TD[:5], qkv_TD[begin:end], nan_TD[:after]))
            found = paged_attention(part_TD, key, value, part, scale)[5 : 5 + count]
            assert torch.equal(found, whole[begin:end]), (begin, end, after)
            if len(part_TD) > MOST_FUSED_ROWS and window is None:
                part_TD[5 : 5 + count, -2 * heads[1] * head_size :] *= 2
                found = paged_attention(part_TD, key, value, part, scale)[5 : 5 + count]
                assert not torch.equal(found, whole[begin:end]), "keys are read where they lie"
