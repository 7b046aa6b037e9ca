"""Admission on the GPU: a program per admission and chunk of its lists.

Runs before a step's graph, on the same stream; never inside one.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.admit.reference import AdmitRecord, AdmitTensors

_SLOT = tl.constexpr(AdmitRecord.SLOT)
_NUM_TOKENS = tl.constexpr(AdmitRecord.NUM_TOKENS)
_TOKEN_OFFSET = tl.constexpr(AdmitRecord.TOKEN_OFFSET)
_NUM_PAGES = tl.constexpr(AdmitRecord.NUM_PAGES)
_PAGE_OFFSET = tl.constexpr(AdmitRecord.PAGE_OFFSET)
_FIELDS = tl.constexpr(AdmitRecord.FIELDS)
_CHUNK = 1024


class _Widths(NamedTuple):
    fields: int
    ids: int
    drafts: int
    pages: int


class _Strides(NamedTuple):
    """Steps between rows, by the names of AdmitTensors."""

    fields_FS: int
    ids_SE: int
    tokens_SL: int
    drafts_SK: int
    table_SP: int


def admit(record_W: Tensor, num_admissions: int, tensors: AdmitTensors) -> None:
    if not num_admissions:
        return
    fields_FS, ids_SE, tokens_SL, drafts_SK, table_SP = tensors
    widths = (len(fields_FS), *(table.shape[1] for table in (ids_SE, drafts_SK, table_SP)))
    # No list is longer than the record; the table is written to its end.
    longest = max(min(tokens_SL.shape[1], len(record_W)), table_SP.shape[1])
    _admit_kernel[(num_admissions, triton.cdiv(longest, _CHUNK))](
        *(record_W, tensors, _Widths(*widths), _Strides(*(t.stride(0) for t in tensors))),
        FIELDS=triton.next_power_of_2(widths[0]),
        IDS=triton.next_power_of_2(widths[1]),
        DRAFTS=triton.next_power_of_2(widths[2]),
        CHUNK=_CHUNK,
    )


@triton.jit
def _admit_kernel(
    record_W,
    tensors,
    num,
    strides,
    FIELDS: tl.constexpr,
    IDS: tl.constexpr,
    DRAFTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    record = record_W + tl.program_id(0) * (_FIELDS + num.fields + num.ids)
    slot = tl.load(record + _SLOT).to(tl.int64)
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    is_token = place < tl.load(record + _NUM_TOKENS)
    token = tl.load(record_W + tl.load(record + _TOKEN_OFFSET) + place, mask=is_token, other=0)
    tl.store(tensors.tokens_SL + slot * strides.tokens_SL + place, token, mask=is_token)
    is_page = place < tl.load(record + _NUM_PAGES)
    page = tl.load(record_W + tl.load(record + _PAGE_OFFSET) + place, mask=is_page, other=-1)
    tl.store(tensors.table_SP + slot * strides.table_SP + place, page, mask=place < num.pages)
    if tl.program_id(1) == 0:
        field = tl.arange(0, FIELDS)
        value = tl.load(record + _FIELDS + field, mask=field < num.fields, other=0)
        field_at = tensors.fields_FS + field * strides.fields_FS + slot
        tl.store(field_at, value, mask=field < num.fields)
        index = tl.arange(0, IDS)
        id_of = tl.load(record + _FIELDS + num.fields + index, mask=index < num.ids, other=-1)
        tl.store(tensors.ids_SE + slot * strides.ids_SE + index, id_of, mask=index < num.ids)
        step = tl.arange(0, DRAFTS)
        none = tl.full([DRAFTS], -1, tl.int32)
        draft_at = tensors.drafts_SK + slot * strides.drafts_SK + step
        tl.store(draft_at, none, mask=step < num.drafts)
