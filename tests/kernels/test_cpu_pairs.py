"""Vector kernels agree with their torch references, and no row changes the bits of another."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline.kernels import table
from paceline.kernels.attention.reference import AttentionBatch
from paceline.kernels.elementwise.reference import HeadNorms
from paceline.kernels.panels.reference import pack_blocks, unpack
from tests.kernels.cases.cpu import (
    Case,
    all_cases,
    attention_arguments,
    pairs,
    panel_weight,
    random_blocks,
)

pytest.importorskip("numba")

CPU = torch.device("cpu")
SMALL = [case for case in all_cases() if not case.is_large]


@pytest.fixture(scope="module")
def twins() -> dict[str, tuple[Any, Any]]:
    return pairs(CPU)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_pair_agrees(case: Case, twins: dict[str, tuple[Any, Any]]) -> None:
    reference, fast = twins[case.kernel]
    assert fast is not reference
    found, expected = case.outcome(fast), case.outcome(reference)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=case.tolerance, atol=case.tolerance, equal_nan=True)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "f16", "bf16", "f32"])
def test_every_row_count_gives_each_row_the_same_bits(
    kind: str, twins: dict[str, tuple[Any, Any]]
) -> None:
    _, product = twins["matmul"]
    weight = panel_weight(kind, 96, 832)
    x = torch.randn(128, weight.num_inputs, generator=torch.Generator().manual_seed(0))
    whole = product(x, weight)
    for count in range(1, 129):
        assert torch.equal(product(x[:count], weight), whole[:count]), count
        assert torch.equal(product(x[128 - count :], weight), whole[128 - count :]), count


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantised_weights_are_exactly_what_the_gguf_package_reads(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    rows = random_blocks(kind, 70, 96)
    expected = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(unpack(pack_blocks(kind, rows, None)), torch.from_numpy(expected))


def cut(batch: AttentionBatch, row: int, width: int, end: int) -> AttentionBatch:
    """`width` queries of one row, the last of them at position end - 1."""
    return AttentionBatch(
        row_start_B=torch.tensor([0, width]),
        length_B=torch.tensor([end]),
        slot_B=batch.slot_B[row : row + 1],
        table_SP=batch.table_SP,
        page_size=batch.page_size,
        group_size=batch.group_size,
    )


@pytest.mark.parametrize(("heads", "size", "page_size"), [((9, 3), 64, 16), ((4, 2), 12, 4)])
def test_attention_of_a_query_does_not_depend_on_its_batch_or_width(
    heads: tuple[int, int], size: int, page_size: int, twins: dict[str, tuple[Any, Any]]
) -> None:
    _, attend = twins["paged_attention"]
    make = attention_arguments([(300, 300), (1, 70), (530, 530)], heads, size, page_size)
    qkv_TD, key, value, batch, scale = make()
    whole = attend(qkv_TD, key, value, batch, scale)
    start = batch.row_start_B.tolist()
    for row, length in ((0, 300), (2, 530)):
        for width in (1, 2, 5, 6, 13, 33, 97, 256, length):
            for end in {width, 256, 257, 290, length}:
                if not width <= end <= length:
                    continue
                part = slice(start[row] + end - width, start[row] + end)
                found = attend(qkv_TD[part], key, value, cut(batch, row, width, end), scale)
                assert torch.equal(found, whole[part]), (row, width, end)


def test_norms_gates_and_rotations_of_a_row_do_not_depend_on_the_others(
    twins: dict[str, tuple[Any, Any]],
) -> None:
    x, delta = torch.randn(70, 104), torch.randn(70, 104)
    weight, norms = torch.randn(104), HeadNorms(torch.randn(26), torch.randn(26), 1e-6)
    rotation = torch.polar(torch.ones(70, 13), torch.randn(70, 13))
    pages = [torch.zeros(1, 70, 26) for _ in range(2)]
    add_norm, gate, place = (twins[n][1] for n in ("add_rms_norm", "silu_and_mul", "place_heads"))
    whole_norm = add_norm(x.clone(), delta, weight, 1e-5)
    whole_gate, whole_heads = gate(x), x.clone()
    place(whole_heads, rotation, norms, *pages, torch.arange(70))
    for count in (1, 2, 7, 16, 17, 69):
        rows = slice(70 - count, 70)
        assert torch.equal(add_norm(x[rows].clone(), delta[rows], weight, 1e-5), whole_norm[rows])
        assert torch.equal(gate(x[rows]), whole_gate[rows])
        heads = x[rows].clone()
        place(heads, rotation[rows], norms, *pages, torch.arange(count))
        assert torch.equal(heads, whole_heads[rows])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_the_number_of_threads(
    threads: int, twins: dict[str, tuple[Any, Any]]
) -> None:
    from paceline.kernels.vector.team import team

    cases = [c for c in SMALL if c.kernel in ("matmul", "paged_attention", "add_rms_norm")]
    team.set_threads(1)
    alone = [case.outcome(twins[case.kernel][1]) for case in cases]
    team.set_threads(threads)
    try:
        for case, expected in zip(cases, alone, strict=True):
            for x, y in zip(case.outcome(twins[case.kernel][1]), expected, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    finally:
        table.set_threads()


def test_a_nan_in_a_row_reaches_that_row_only(twins: dict[str, tuple[Any, Any]]) -> None:
    """NaN must stay visible, so that sampling can answer for the request that has it."""
    _, attend = twins["paged_attention"]
    qkv_TD, key, value, batch, scale = attention_arguments([(1, 300), (1, 40)], (2, 1), 16, 16)()
    qkv_TD[0, 0] = math.nan
    found = attend(qkv_TD, key, value, batch, scale)
    assert found[0, :16].isnan().all()
    assert found[1].isfinite().all()
    _, gate = twins["silu_and_mul"]
    x = torch.zeros(2, 64)
    x[0, 3] = math.nan
    assert gate(x).isnan().nonzero().tolist() == [[0, 3]]


def test_without_numba_the_references_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_numba_works", lambda: False)
    assert table.pick_kernels(CPU, 64, 1) == table.REFERENCE
    assert table.pick_kernels(torch.device("meta"), 64, 1) == table.REFERENCE


def test_heads_beyond_the_scratch_take_the_reference() -> None:
    kernels = table.pick_kernels(CPU, 512, 1)
    assert kernels.paged_attention is table.REFERENCE.paged_attention
    assert kernels.rms_norm is not table.REFERENCE.rms_norm
