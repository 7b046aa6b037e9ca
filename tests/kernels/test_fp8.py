"""Products of e4m3 numbers: a row has the same bits alone and among others; who multiplies."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.e4m3 import DTYPE
from paceline.kernels.fp8.reference import fp8_linear, quantise_rows, quantise_weight
from paceline.kernels.linear.tiles import default_fp8_tile, pick_tile
from tests.kernels.interpreted import run_interpreted

CPU = torch.device("cpu")


def check_rows(device: torch.device = CPU, num_outputs: int = 40, num_inputs: int = 144) -> None:
    """Rows of products of few rows, against the product of 128."""
    from paceline.kernels.fp8.triton.products import fp8_linear
    from paceline.kernels.fp8.triton.rows import quantise_rows

    torch.manual_seed(0)
    x_TK = torch.randn(128, num_inputs, device=device)
    x_TK[5] = float("nan")
    weight_NK = torch.randn(num_outputs, num_inputs, device=device)
    for is_blocked in (False, True):
        weight = quantise_weight(weight_NK, is_blocked)
        whole = quantise_rows(x_TK, is_blocked)
        all_TN = fp8_linear(whole, weight, None, torch.float32)
        assert all_TN[5].isnan().all()
        assert not all_TN[6:].isnan().any()
        for first, count in ((0, 1), (3, 2), (7, 8), (9, 16), (20, 33), (60, 60)):
            part = quantise_rows(x_TK[first : first + count], is_blocked)
            part_TN = fp8_linear(part, weight, None, torch.float32)
            same = all_TN[first : first + count]
            torch.testing.assert_close(part_TN, same, rtol=0, atol=0, equal_nan=True)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:check_rows")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (960, 576)], ids=str)
def test_a_row_has_the_same_bits_on_the_gpu(shape: tuple[int, int]) -> None:
    check_rows(torch.device("cuda"), *shape)


def check_fused(device: torch.device = CPU) -> None:
    from paceline.kernels.elementwise.triton import add_rms_norm, rms_norm, silu_and_mul
    from paceline.kernels.fp8.triton import rows

    torch.manual_seed(0)
    sizes = ((5, 600), (300,), (5, 300), (5, 300))
    gate_up_TI, weight_D, delta_TD, residual_TD = (
        torch.randn(size, device=device).half() for size in sizes
    )
    residual_TD = residual_TD.float()
    for is_blocked in (False, True):
        rest = weight_D, 1e-5, torch.float16
        own, other = residual_TD.clone(), residual_TD.clone()
        pairs = (
            (rows.norm_rows(own, None, *rest, is_blocked), rms_norm(other, *rest)),
            (
                rows.norm_rows(own, delta_TD, *rest, is_blocked),
                add_rms_norm(other, delta_TD, *rest),
            ),
            (rows.silu_rows(gate_up_TI, is_blocked), silu_and_mul(gate_up_TI)),
        )
        assert torch.equal(own, other)
        for fused, x_TK in pairs:
            apart = rows.quantise_rows(x_TK, is_blocked)
            assert torch.equal(fused.codes_TK.float(), apart.codes_TK.float())
            assert torch.equal(fused.scale_TG, apart.scale_TG)


def test_fused_rows_have_the_bits_of_separate_kernels() -> None:
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:check_fused")


@pytest.mark.gpu
def test_fused_rows_have_those_bits_on_the_gpu() -> None:
    check_fused(torch.device("cuda"))


def check_torchs_product() -> None:
    from paceline.kernels.fp8.triton import products

    torch.manual_seed(0)
    for num_outputs, dtype in ((48, torch.bfloat16), (40, torch.bfloat16), (48, torch.float16)):
        rows = quantise_rows(torch.randn(130, 64), False)
        weight = quantise_weight(torch.randn(num_outputs, 64) / 8, False)
        is_torchs = products._is_torchs(weight, None, dtype)
        assert is_torchs is (num_outputs == 48 and dtype == torch.bfloat16)
        if not is_torchs and dtype == torch.bfloat16:
            continue  # not for the interpreter
        found = products.fp8_linear(rows, weight, None, dtype).float()
        wanted = fp8_linear(rows, weight, None, torch.float32)
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


def test_torch_multiplies_many_rows_if_it_can() -> None:
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:check_torchs_product")


@pytest.mark.parametrize("end", ["fp8", "fp8-blocks"])
def test_few_rows_of_a_shape_are_cut_alike(end: str) -> None:
    tiles = [pick_tile(end, 4096, 4096, rows, DTYPE, CPU) for rows in (1, 8, 16, 33, 64, 128)]
    assert all(tile is not None for tile in tiles)
    assert len({tile._replace(block_t=0) for tile in tiles if tile is not None}) == 1
    assert pick_tile(end, 4096, 4096, 129, DTYPE, CPU) is None, "torch's, if it has one"
    tile = default_fp8_tile(4096, 4096, 9999, CPU)
    assert tile.block_t == 128
    assert tile.splits == 1


def test_a_row_of_codes_is_that_row() -> None:
    """Within half a step of the type."""
    x_TK = torch.randn(5, 200) * 100
    for is_blocked in (False, True):
        codes_TK, scale_TG = quantise_rows(x_TK, is_blocked)
        scale_TK = scale_TG.repeat_interleave(128, 1)[:, :200] if is_blocked else scale_TG
        wrong = (codes_TK.float() * scale_TK - x_TK).abs()
        assert (wrong <= x_TK.abs() / 16 + scale_TK * 2**-10).all()


def test_a_gpu_without_e4m3_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from paceline.kernels.fp8.triton import rows

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(RuntimeError, match=r"A100 has 8\.0\. Leave out --quantization"):
        rows._check(torch.device("cuda", 7))
