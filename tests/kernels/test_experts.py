"""A row's experts give it the same bits whoever its neighbours are, and however many."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.experts.reference import ExpertWeights, Routing, route
from paceline.kernels.fp8.reference import Fp8Weight, fp8_linear, quantise_rows, quantise_weight
from tests.kernels.cases.experts import in_e4m3
from tests.kernels.interpreted import run_interpreted


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [(1, 16), (17, 32), (33, 64), (65, 300)], ids=str)
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", "channels", "blocks"])
def test_a_row_has_the_same_bits_among_any_neighbours(counts: tuple[int, int], kind: str) -> None:
    from paceline.kernels.experts.triton.products import apply_experts

    torch.manual_seed(0)
    few, many = counts
    num_experts, width, inner = 24, 512, 384
    gate_up = torch.randn(num_experts + 1, 2 * inner, width, device="cuda") * width**-0.5
    down = torch.randn(num_experts + 1, width, inner, device="cuda") * inner**-0.5
    dtype = getattr(torch, kind, torch.bfloat16)
    experts = ExpertWeights(gate_up.to(dtype), down.to(dtype))
    if kind in ("channels", "blocks"):
        experts = in_e4m3(gate_up, down, kind == "blocks")
    x_TD = torch.randn(many, width, device="cuda").to(dtype)
    logits_TE = torch.randn(many, num_experts, device="cuda")
    chosen_TK, weight_TK = route(logits_TE, None, Routing(4, num_shared=1))
    whole = apply_experts(x_TD, chosen_TK, weight_TK, experts)
    order = torch.randperm(many, device="cuda")[:few]
    part = apply_experts(x_TD[order], chosen_TK[order], weight_TK[order], experts)
    assert torch.equal(part, whole[order])


def check_fp8_products(num_rows: str) -> None:
    """Each product of the same e4m3 rows agrees with fp8_linear: no rounding lies in between."""
    from paceline.kernels.experts.triton.layout import lay_out
    from paceline.kernels.experts.triton.products import ExpertTile, multiply_rows

    torch.manual_seed(0)
    count, inner, num_inputs, taken = int(num_rows), 72, 208, 2
    chosen_TK = torch.rand(count, 4).argsort(1)[:, :taken].int()
    weight_TK = torch.rand(count, taken)
    tile = ExpertTile(16, 32, 64, 4, 2)
    for is_blocked in (False, True):
        pairs = [quantise_weight(torch.randn(2 * inner, num_inputs), is_blocked) for _ in range(4)]
        codes = torch.stack([x.codes_NK for x in pairs])
        scale = torch.stack([x.scale for x in pairs])
        for is_gated in (True, False):
            x_PK = torch.randn(count if is_gated else count * taken, num_inputs) / 8
            x_PK[1] = float("nan")
            rows = quantise_rows(x_PK, is_blocked)
            out_PN = torch.zeros(count * taken, inner if is_gated else 2 * inner)
            places = chosen_TK if count <= tile.rows else lay_out(chosen_TK, 4, tile.rows)
            weights = None if is_gated else weight_TK
            multiply_rows(rows, places, taken, weights, codes, out_PN, tile, scale)
            for entry, expert in enumerate(chosen_TK.flatten().tolist()):
                row = entry // taken if is_gated else entry
                own = type(rows)(*(x[row : row + 1] for x in rows))
                matrix = Fp8Weight(codes[expert], scale[expert], is_blocked)
                (wanted,) = fp8_linear(own, matrix, None, torch.float32)
                if is_gated:
                    gate, up = wanted.chunk(2)
                    wanted = torch.nn.functional.silu(gate) * up
                else:
                    wanted *= weight_TK.flatten()[entry]
                torch.testing.assert_close(
                    out_PN[entry], wanted, rtol=2e-5, atol=2e-5, equal_nan=True
                )


@pytest.mark.parametrize("num_rows", [5, 40])
def test_products_of_e4m3_experts_agree_with_those_of_a_linear(num_rows: int) -> None:
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:check_fp8_products", str(num_rows))
