"""Codes of fp8 pages: one rule of rounding in torch, in numba and in Triton, bit by bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.kernels import table
from paceline.kernels.attention.reference import AttentionBatch
from paceline.kernels.elementwise.reference import HeadNorms
from paceline.kernels.kv_codes.reference import PAGE_DTYPE, KvScales, decode, encode
from tests.kernels.cases.attention import Shape, arguments
from tests.kernels.cases.cpu import attention_arguments
from tests.kernels.cases.kv_codes import coded_attention, coded_latents, scales_of, with_codes
from tests.kernels.interpreted import run_interpreted
from tests.kernels.test_cpu_pairs import cut

CPU = torch.device("cpu")


def every_number() -> Tensor:
    """All of bfloat16's and of float16's, and float32's around them: ties, subnormals, infinity,
    NaN of both signs."""
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    wide = torch.cat([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    wide = torch.where(wide >= 1 << 31, wide - (1 << 32), wide).to(torch.int32)
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    return torch.cat((wide.view(torch.float32), halves.float()))


def nearest(x: Tensor) -> Tensor:
    """Codes by the definition of the type: the nearest number, of two the one with an even code."""
    size = x.double().abs().clamp(max=448.0)
    exponent = size.clamp(min=2**-6).log2().floor()
    step = 2.0 ** (exponent - 3)
    rounded = (size / step).round() * step  # torch rounds ties to even
    code = decode(torch.arange(127, dtype=PAGE_DTYPE)).double()
    code = torch.searchsorted(code, rounded)
    code = torch.where(x.isnan(), 0x7F, code)
    return (code + 128 * x.signbit()).to(PAGE_DTYPE)


def test_a_code_is_that_of_the_nearest_number() -> None:
    x = every_number()
    assert torch.equal(encode(x, torch.ones(())), nearest(x))
    codes = torch.arange(256, dtype=PAGE_DTYPE)
    assert torch.equal(encode(decode(codes), torch.ones(())), codes)


def test_beyond_the_range_is_the_largest_number() -> None:
    x = torch.tensor([448.0, 464.0, 465.0, 1e30, math.inf, -math.inf, math.nan])
    found = decode(encode(x, torch.ones(())))
    assert found[:6].tolist() == [448.0, 448.0, 448.0, 448.0, 448.0, -448.0]
    assert found[6].isnan()


def placed(place: Any, x: Tensor, scale: float, size: int) -> Tensor:
    """The codes that a kernel writes for these values, each in a head of `size`."""
    heads, device = x.numel() // size, x.device
    scales = torch.full((heads,), scale, device=device)
    qkv_TD = torch.stack((torch.zeros_like(x), x)).view(1, -1)
    pages = [torch.zeros(heads, 1, size, dtype=PAGE_DTYPE, device=device) for _ in "kv"]
    turn = torch.ones(1, size // 2, dtype=torch.complex64, device=device)
    slot_T = torch.zeros(1, dtype=torch.int64, device=device)
    place(qkv_TD, turn, None, *pages, slot_T, KvScales(scales, scales))
    return pages[1].flatten()


def read(attend: Any, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """What a query sees whose only value these are."""
    value, device = codes.view(1, 1, -1), codes.device
    batch = AttentionBatch(
        row_start_B=torch.tensor([0, 1], device=device),
        length_B=torch.tensor([1], device=device),
        slot_B=torch.tensor([0], device=device),
        table_SP=torch.zeros(1, 1, dtype=torch.int32, device=device),
        page_size=1,
        group_size=1,
    )
    qkv_TD = torch.zeros(1, 3 * codes.numel(), dtype=dtype, device=device)
    scales = KvScales(torch.ones(1, device=device), torch.ones(1, device=device))
    found: Tensor = attend(qkv_TD, torch.zeros_like(value), value, batch, 1.0, scales)
    return found[0]


def check_codes(
    backend: str,
    size: int,
    num_numbers: int,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> None:
    """In heads of `size` numbers."""
    place, attend = (table.operations()[n].by(backend) for n in ("place_heads", "paged_attention"))
    x = every_number()
    x = x[:: max(len(x) // num_numbers, 1)][:num_numbers].to(device, dtype)
    for scale in (1.0, 0.037):
        wanted = encode(x, torch.tensor(scale, device=device))
        assert torch.equal(placed(place, x, scale, size), wanted), scale
    codes = torch.arange(256, dtype=PAGE_DTYPE, device=device)
    found = read(attend, codes, dtype).float()
    torch.testing.assert_close(found, decode(codes), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [16, 14])
def test_numba_encodes_and_decodes_the_same_bits(size: int) -> None:
    pytest.importorskip("numba")
    check_codes("numba", size, 7 * (1 << 16))


def test_triton_encodes_and_decodes_the_same_bits() -> None:
    """Interpreted, in few and large heads; `numbers` decodes as GPUs before Ada do."""
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:check_codes_in_triton")


def check_codes_in_triton() -> None:
    check_codes("triton", 1024, 7 * (1 << 12))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_encodes_and_decodes_the_same_bits(dtype: torch.dtype) -> None:
    """Its own instructions decode 16-bit types."""
    check_codes("triton", 128, 7 * (1 << 16), torch.device("cuda"), dtype)


@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_keys_are_rounded_after_norm_and_rotation(backend: str) -> None:
    """The kernel leaves in `qkv` what it has rounded."""
    if backend == "numba":
        pytest.importorskip("numba")
    random = torch.Generator().manual_seed(3)
    qkv_TD = torch.randn(20, 8 * 12, generator=random)
    angle = torch.randn(20, 6, generator=random)
    weight_2H = torch.randn(2, 12, generator=random)
    norms = HeadNorms(weight_2H[0], weight_2H[1], 1e-6)
    pages = [torch.zeros(2, 30, 12, dtype=PAGE_DTYPE) for _ in "kv"]
    slot_T, scales = torch.arange(20) + 7, scales_of(2, CPU)
    place: Any = table.place_heads.by(backend)
    place(qkv_TD, torch.polar(torch.ones_like(angle), angle), norms, *pages, slot_T, scales)
    heads_NTH = qkv_TD.unflatten(1, (8, 12)).transpose(0, 1)
    for page, heads, scale in zip(pages, heads_NTH[4:].split(2), scales, strict=True):
        assert torch.equal(page[:, 7:27], encode(heads, scale[:, None, None]))
        assert not page[:, :7].any()


@pytest.mark.parametrize(("size", "page_size"), [(64, 16), (12, 4), (40, 16)])
def test_attention_of_a_query_does_not_depend_on_its_batch_or_width(
    size: int, page_size: int
) -> None:
    pytest.importorskip("numba")
    attend: Any = table.paged_attention.by("numba")
    rows = [(300, 300), (1, 70), (530, 530)]
    qkv_TD, key, value, batch, scale = attention_arguments(rows, (4, 2), size, page_size)()
    key, value, scales = with_codes(key, value)
    whole = attend(qkv_TD, key, value, batch, scale, scales)
    start = batch.row_start_B.tolist()
    for row, length in ((0, 300), (2, 530)):
        for width, end in ((1, 256), (1, 257), (6, 290), (33, length), (length, length)):
            part = slice(start[row] + end - width, start[row] + end)
            found = attend(qkv_TD[part], key, value, cut(batch, row, width, end), scale, scales)
            assert torch.equal(found, whole[part]), (row, width, end)


def latent_arguments(shape: Shape) -> Any:
    """Of latent attention, with 16 numbers of a row that are its value."""

    def make(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        qkv_TD, page_NSH, _, batch, scale = arguments(shape)(device, dtype)
        query_TNH = qkv_TD[:, : 4 * 24].unflatten(1, (4, 24)).contiguous()
        return query_TNH, page_NSH, batch, scale, 16

    return make


def check_rows(device_name: str) -> None:
    """However rows are cut, values are scaled once, after all parts of a row are merged."""
    from paceline.kernels.attention.triton import work

    device, was = torch.device(device_name), work.LITTLE
    pages = Shape([(3, 300), (1, 1300)], (2, 1), 16, width=4)
    latents = Shape([(3, 300), (1, 700)], (4, 1), 24, width=4)
    for name, shape, make in (
        ("paged_attention", pages, coded_attention(arguments(pages))),
        ("mla_attention", latents, coded_latents(latent_arguments(latents))),
    ):
        attend: Any = table.operations()[name].by("triton")
        given = make(device, torch.float16)
        at = next(i for i, x in enumerate(given) if isinstance(x, AttentionBatch))
        whole = attend(*given)
        alone = replace(given[at], work=None, max_query_len=1)
        for field in ("row_start_B", "query_len_B", "length_B", "slot_B"):
            setattr(alone, field, getattr(alone, field)[1:])
        assert torch.equal(attend(*given[:at], alone, *given[at + 1 :])[4], whole[4]), name
        work.LITTLE = 0
        given[at].work = None
        assert torch.equal(attend(*given), whole), name
        work.LITTLE = was
        assert whole[:3].isfinite().all()
        assert len(whole) == shape.num_entries


def test_a_row_has_the_same_bits_however_it_is_cut_interpreted() -> None:
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:check_rows", "cpu")


@pytest.mark.gpu
def test_a_row_has_the_same_bits_however_it_is_cut_on_the_gpu() -> None:
    check_rows("cuda")


def check_chunks(device_name: str) -> None:
    """A prompt's own keys are read from the pages, where they are rounded: in qkv they are NaN."""
    from paceline.kernels.attention.triton.attend import paged_attention

    given = coded_attention(arguments(Shape([(300, 300)], (2, 1), 64)))
    qkv_TD, key, value, batch, *scales = given(torch.device(device_name), torch.float16)
    whole = paged_attention(qkv_TD, key, value, batch, *scales)
    assert whole.isfinite().all()
    for begin, end in ((127, 290), (250, 300)):
        count = end - begin
        part = replace(
            batch,
            query_len_B=torch.full_like(batch.query_len_B, count),
            length_B=torch.full_like(batch.length_B, end),
            max_query_len=count,
            work=None,
        )
        found = paged_attention(qkv_TD[begin:end], key, value, part, *scales)
        assert torch.equal(found, whole[begin:end]), (begin, end)


@pytest.mark.more
def test_a_prompt_has_the_same_bits_however_it_is_cut_into_chunks_interpreted() -> None:
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:check_chunks", "cpu")


@pytest.mark.gpu
def test_a_prompt_has_the_same_bits_however_it_is_cut_into_chunks_on_the_gpu() -> None:
    check_chunks("cuda")


@pytest.mark.gpu
def test_prompts_in_fp8_pages_run_by_the_kernel_of_all_gpus() -> None:
    from paceline.kernels.attention.triton import attend, tiles

    make = coded_attention(arguments(Shape([(40, 40)], (4, 1), 128)))
    given = make(torch.device("cuda"), torch.bfloat16)
    assert attend.tiles_kernel(*given[:4]) is tiles.attend_tiles
