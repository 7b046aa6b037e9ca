"""Admission on the GPU: a program per admission and chunk of its lists.

Runs before a step's graph, on the same stream; never inside one.
"""

from __future__ import annotations

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


def admit(record_W: Tensor, num_admissions: int, tensors: AdmitTensors) -> None:
    if not num_admissions:
        return
    fields_FS, ids_SE, tokens_SL, drafts_SK, table_SP = tensors
    num_fields, num_ids, num_drafts = len(fields_FS), ids_SE.shape[1], drafts_SK.shape[1]
    # No list is longer than the record; the table is written to its end.
    longest = max(min(tokens_SL.shape[1], len(record_W)), table_SP.shape[1])
    _admit_kernel[(num_admissions, triton.cdiv(longest, _CHUNK))](
        *(record_W, fields_FS, ids_SE, tokens_SL, drafts_SK, table_SP),
        *(num_fields, num_ids, num_drafts, table_SP.shape[1]),
        *(fields_FS.stride(0), ids_SE.stride(0), tokens_SL.stride(0)),
        *(drafts_SK.stride(0), table_SP.stride(0)),
        FIELDS=triton.next_power_of_2(num_fields),
        IDS=triton.next_power_of_2(num_ids),
        DRAFTS=triton.next_power_of_2(num_drafts),
        CHUNK=_CHUNK,
    )


@triton.jit
def _admit_kernel(  # noqa: PLR0913
    record_W,
    fields_FS,
    ids_SE,
    tokens_SL,
    drafts_SK,
    table_SP,
    num_fields,
    num_ids,
    num_drafts,
    num_table_pages,
    fields_stride,
    ids_stride,
    tokens_stride,
    drafts_stride,
    table_stride,
    FIELDS: tl.constexpr,
    IDS: tl.constexpr,
    DRAFTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    record = record_W + tl.program_id(0) * (_FIELDS + num_fields + num_ids)
    slot = tl.load(record + _SLOT).to(tl.int64)
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    is_token = place < tl.load(record + _NUM_TOKENS)
    token = tl.load(record_W + tl.load(record + _TOKEN_OFFSET) + place, mask=is_token, other=0)
    tl.store(tokens_SL + slot * tokens_stride + place, token, mask=is_token)
    is_page = place < tl.load(record + _NUM_PAGES)
    page = tl.load(record_W + tl.load(record + _PAGE_OFFSET) + place, mask=is_page, other=-1)
    tl.store(table_SP + slot * table_stride + place, page, mask=place < num_table_pages)
    if tl.program_id(1) == 0:
        field = tl.arange(0, FIELDS)
        value = tl.load(record + _FIELDS + field, mask=field < num_fields, other=0)
        tl.store(fields_FS + field * fields_stride + slot, value, mask=field < num_fields)
        index = tl.arange(0, IDS)
        id_of = tl.load(record + _FIELDS + num_fields + index, mask=index < num_ids, other=-1)
        tl.store(ids_SE + slot * ids_stride + index, id_of, mask=index < num_ids)
        step = tl.arange(0, DRAFTS)
        none = tl.full([DRAFTS], -1, tl.int32)
        tl.store(drafts_SK + slot * drafts_stride + step, none, mask=step < num_drafts)
