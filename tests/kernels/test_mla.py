"""Latent attention: absorbed equals expanded, and a query's bits are its row's own business."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from paceline.kernels.attention.reference import AttentionBatch
from paceline.kernels.mla.reference import LatentNorm
from paceline.kernels.table import pick_latent_kernels
from paceline.layers.attention import ForwardInputs
from paceline.layers.linear import DenseLinear
from paceline.layers.mla import LatentAttention, QueryRank
from paceline.state.pages import LayerPages
from tests.kernels.cases.attention import DEAD, Shape, arguments
from tests.kernels.interpreted import run_interpreted

CPU = torch.device("cpu")
HEADS, NOPE, ROPE, VALUE, LATENT, RANK, WIDTH = 5, 12, 8, 10, 24, 14, 40


def rand(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.4


DOWN, UP = rand(1, RANK + LATENT + ROPE, WIDTH), rand(2, HEADS * (NOPE + ROPE), RANK)
KV_B = rand(3, HEADS, NOPE + VALUE, LATENT)
OUT = rand(4, WIDTH, HEADS * VALUE)
NORM_Q, NORM_KV = 1 + rand(5, RANK), 1 + rand(6, LATENT)
SCALE = (NOPE + ROPE) ** -0.5


def rotation(count: int) -> Tensor:
    angle = torch.outer(torch.arange(count).float(), 100.0 ** -torch.arange(0, 1, 2 / ROPE))
    return torch.complex(angle.cos(), angle.sin())


def expanded(x_TD: Tensor) -> Tensor:
    """One whole sequence, as the definition reads: keys and values of every head spelled out."""
    query_TD, latent_TL, key_TR = (x_TD @ DOWN.T).split((RANK, LATENT, ROPE), dim=1)
    query_TNH = (rms_norm(query_TD, (RANK,), NORM_Q, 1e-6) @ UP.T).unflatten(1, (HEADS, -1))
    latent_TL = rms_norm(latent_TL, (LATENT,), NORM_KV, 1e-6)
    nope_TNQ, rope_TNR = query_TNH.split((NOPE, ROPE), dim=2)
    key_TNQ, value_TNV = torch.einsum("tl,nhl->tnh", latent_TL, KV_B).split((NOPE, VALUE), dim=2)
    scores = torch.einsum("qnh,knh->nqk", nope_TNQ, key_TNQ)
    scores += torch.einsum("qnr,kr->nqk", turned(rope_TNR), turned(key_TR.unsqueeze(1))[:, 0])
    hidden = torch.ones(len(x_TD), len(x_TD)).triu(1).bool()
    weight = (scores * SCALE).masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("nqk,knv->qnv", weight, value_TNV).flatten(1) @ OUT.T


def turned(x_TNR: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x_TNR.contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation(len(x_TNR)).unsqueeze(1)).flatten(-2)


def block() -> LatentAttention:
    return LatentAttention(
        down=DenseLinear(DOWN, None),
        query=QueryRank(NORM_Q, 1e-6, DenseLinear(UP, None)),
        key_NQL=KV_B[:, :NOPE].contiguous(),
        value_NLV=KV_B[:, NOPE:].transpose(1, 2).contiguous(),
        norm=LatentNorm(NORM_KV, 1e-6),
        o=DenseLinear(OUT, None),
        kernels=pick_latent_kernels(CPU),
        scale=SCALE,
    )


@pytest.mark.parametrize("pieces", [[50], [33, 1, 3, 13]])
def test_absorbed_equals_expanded(pieces: list[int]) -> None:
    """One sequence in pieces, over pages in no order, among entries and rows without a request."""
    x_TD = rand(7, 50, WIDTH)
    wanted = expanded(x_TD)
    attention, page_size = block(), 4
    pages = LayerPages(*[torch.full((1, 80, LATENT + ROPE), float("nan"))] * 2)
    order = torch.randperm(19, generator=torch.Generator().manual_seed(8)).int()
    table_SP = torch.full((3, 19), -1, dtype=torch.int32)
    table_SP[1] = order
    found, start = [], 0
    for piece in pieces:
        position = torch.arange(start, start + piece)
        gap = 2  # entries of no row, before and behind
        slot_T = order[position // page_size].long() * page_size + position % page_size
        none = torch.full((gap,), -1)
        inputs = ForwardInputs(
            token_T=torch.zeros(piece + 2 * gap, dtype=torch.int64),
            position_T=torch.cat((none, position, none)).clamp(min=0),
            page_slot_T=torch.cat((none, slot_T, none)).int(),
            attention=AttentionBatch(
                row_start_B=torch.tensor([0, gap], dtype=torch.int32),
                length_B=torch.tensor([0, start + piece], dtype=torch.int32),
                slot_B=torch.tensor([2, 1], dtype=torch.int32),
                table_SP=table_SP,
                page_size=page_size,
                group_size=HEADS,
                query_len_B=torch.tensor([0, piece], dtype=torch.int32),
                max_query_len=piece,
            ),
        )
        zeros = torch.zeros(gap, WIDTH)
        rows_TD = torch.cat((zeros, x_TD[start : start + piece], zeros))
        turns = rotation(50)[inputs.position_T]
        out_TD = attention(rows_TD, turns, inputs, pages)
        assert not out_TD[:gap].any(), "entries of no row stay zero"
        found.append(out_TD[gap : gap + piece])
        start += piece
    torch.testing.assert_close(torch.cat(found), wanted, rtol=1e-5, atol=1e-5)
    written = pages.key_NSH.isfinite().all(-1).sum()
    assert written == 50, "entries of no row write nothing"


SHAPE = Shape([(3, 300), (1, 1500), DEAD], (4, 1), 24, width=4)


def outcome(device: torch.device, batch_rows: list[int], width: int = 4) -> Tensor:
    """The last query of each of these rows of SHAPE, computed in a batch of them alone."""
    from paceline.kernels.mla.triton.attend import mla_attention

    qkv_TD, page, _, batch, scale = arguments(SHAPE)(device, torch.float16)
    query_TNH = qkv_TD[:, : 4 * 24].unflatten(1, (4, 24))
    rows = torch.tensor(batch_rows, device=device)
    last_B = (batch.row_start_B + batch.query_len_B.clamp(min=1))[rows] - 1
    part = AttentionBatch(
        row_start_B=torch.arange(len(rows), dtype=torch.int32, device=device) * width,
        query_len_B=batch.query_len_B[rows].clamp(max=width),
        length_B=batch.length_B[rows],
        slot_B=batch.slot_B[rows],
        table_SP=batch.table_SP,
        page_size=batch.page_size,
        group_size=batch.group_size,
        max_query_len=width,
    )
    given_TNH = query_TNH.new_zeros(len(rows) * width, 4, 24)
    count_B = part.query_len_B.long()  # type: ignore[union-attr]
    for i, (count, last) in enumerate(zip(count_B.tolist(), last_B.tolist(), strict=True)):
        given_TNH[i * width : i * width + count] = query_TNH[last + 1 - count : last + 1]
    found = mla_attention(given_TNH, page, part, scale, 16)
    return found[part.row_start_B.long() + count_B.clamp(min=1) - 1]


def check_bits(device_name: str) -> None:
    from paceline.kernels.attention.triton import work

    device = torch.device(device_name)
    together = outcome(device, [0, 1, 2])
    assert not together[2].any(), "a row without a request is zero"
    assert torch.equal(outcome(device, [0])[0], together[0])
    assert torch.equal(outcome(device, [2, 0, 1], width=1)[1:], together[:2])
    assert torch.equal(outcome(device, [1, 2], width=32)[0], together[1])
    # Rows in stretches or in one span; the last also where partial results find no room.
    for name, value in (("LITTLE", 0), ("MOST_PARTIALS", 0), ("MOST_PARTIALS", 5)):
        was = getattr(work, name)
        setattr(work, name, value)
        assert torch.equal(outcome(device, [0, 1, 2]), together), (name, value)
        setattr(work, name, was)
    with mock.patch.object(work, "most_reaches", return_value=4):  # of 384, whatever the GPU
        long = outcome(device, [0, 1, 2])
        assert torch.equal(outcome(device, [1], width=1)[0], long[1])
        with mock.patch.object(work, "MOST_PARTIALS", 0):
            assert torch.equal(outcome(device, [0, 1, 2]), long)


def test_bits_are_the_rows_own_business_interpreted() -> None:
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:check_bits", "cpu")


@pytest.mark.gpu
def test_bits_are_the_rows_own_business_on_the_gpu() -> None:
    check_bits("cuda")
