"""Plans as bytes: what the leader of a replica sends to its tensor parallel peers.

Plain numbers and arrays, no pickle. An admitted request has the encoding of its submit message.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from paceline.engine.messages import decode_submit, encode_submit
from paceline.step import (
    MARKS,
    HostDrafts,
    Ints,
    LateMasks,
    PageAppends,
    SlotInit,
    SnapshotMarks,
    StepPlan,
    StepSize,
)

_HEAD = struct.Struct("<7i")  # step, k, draft_k, rows, admissions, page appends, flags
_STEP_SIZE = struct.Struct("<10i")
# slot, prompt_len, num_cached, max_len, snapshot, tokens, pages, request bytes
_INIT = struct.Struct("<8i")
_HOST_SIZE = struct.Struct("<2i")  # continuations, the longest of them
_LATE, _AGREED, _MARKS, _HOST_DRAFTS, _DRAFT_K = 1, 2, 4, 8, 16


def encode_plan(plan: StepPlan) -> bytes:
    rows, appends, agreed = plan.num_rows, plan.page_appends, plan.agreed
    num_appends = 0 if appends is None else len(appends.slot)
    flags = _LATE * (plan.late_B is not None) | _AGREED * (agreed is not None)
    flags |= _MARKS * (plan.marks is not None) | _HOST_DRAFTS * (plan.host_drafts is not None)
    flags |= _DRAFT_K * (plan.draft_k_B is not None)
    draft_k = -1 if plan.draft_k is None else plan.draft_k
    parts = [
        _HEAD.pack(plan.step, plan.k, draft_k, rows, len(plan.admissions), num_appends, flags),
        plan.uid_B.astype(np.int64).tobytes(),
        *(_ints(x) for x in (plan.slot_B, plan.query_len_B, plan.k_B, plan.length_bound_B)),
        plan.samples_B.tobytes(),
    ]
    if plan.late_B is not None:
        parts.append(plan.late_B.tobytes())
    if plan.draft_k_B is not None:
        parts.append(_ints(plan.draft_k_B))
    if agreed is not None:
        parts.append(_STEP_SIZE.pack(*agreed.packed()))
    if appends is not None:
        parts += [_ints(x) for x in (appends.slot, appends.index, appends.page)]
    if plan.marks is not None:
        parts += [_ints(x) for x in (plan.marks.length_BM, plan.marks.entry_BM)]
    if plan.host_drafts is not None:
        parts.append(_pack_host_drafts(plan.host_drafts))
    parts += [_pack_init(init) for init in plan.admissions]
    return b"".join(parts)


def decode_plan(data: bytes) -> StepPlan:
    step, k, draft_k, rows, num_inits, num_appends, flags = _HEAD.unpack_from(data)
    read = _Cursor(data, _HEAD.size)
    uid_B = read.array(np.int64, rows)
    slot_B, query_len_B, k_B, bound_B = (read.array(np.int32, rows) for _ in range(4))
    samples_B = read.array(np.bool_, rows)
    late_B = read.array(np.bool_, rows) if flags & _LATE else None
    draft_k_B = read.array(np.int32, rows) if flags & _DRAFT_K else None
    agreed = StepSize.unpacked(read.struct(_STEP_SIZE)) if flags & _AGREED else None
    appends = None
    if num_appends:
        appends = PageAppends(*(read.array(np.int32, num_appends) for _ in range(3)))
    marks = None
    if flags & _MARKS:
        mark_words = (read.array(np.int32, rows * MARKS) for _ in range(2))
        marks = SnapshotMarks(*(words.reshape(rows, MARKS) for words in mark_words))
    host_drafts = _unpack_host_drafts(read) if flags & _HOST_DRAFTS else None
    return StepPlan(
        step=step,
        k=k,
        uid_B=uid_B,
        slot_B=slot_B,
        query_len_B=query_len_B,
        k_B=k_B,
        samples_B=samples_B,
        length_bound_B=bound_B,
        admissions=[_unpack_init(read) for _ in range(num_inits)],
        page_appends=appends,
        late_B=late_B,
        host_drafts=host_drafts,
        draft_k=None if draft_k < 0 else draft_k,
        draft_k_B=draft_k_B,
        marks=marks,
        agreed=agreed,
    )


def encode_late(late: LateMasks) -> bytes:
    count, width, words = late.mask_RWV.shape
    return struct.pack("<3i", count, width, words) + _ints(late.row_R) + _ints(late.mask_RWV)


def decode_late(data: bytes) -> LateMasks:
    count, width, words = struct.unpack_from("<3i", data)
    read = _Cursor(data, 12)
    row_R = read.array(np.int32, count)
    return LateMasks(row_R, read.array(np.int32, count * width * words).reshape(-1, width, words))


def _pack_host_drafts(host: HostDrafts) -> bytes:
    head = _HOST_SIZE.pack(*host.token_RC.shape)
    return head + b"".join(
        _ints(x) for x in (host.row_R, host.length_R, host.least_R, host.token_RC)
    )


def _unpack_host_drafts(read: _Cursor) -> HostDrafts:
    count, width = read.struct(_HOST_SIZE)
    row_R, length_R, least_R = (read.array(np.int32, count) for _ in range(3))
    token_RC = read.array(np.int32, count * width).reshape(count, width)
    return HostDrafts(row_R, length_R, token_RC, least_R)


def _pack_init(init: SlotInit) -> bytes:
    request = encode_submit(init.request)
    sizes = (len(init.tokens), len(init.pages), len(request))
    numbers = (init.slot, init.prompt_len, init.num_cached, init.max_len, init.snapshot)
    head = _INIT.pack(*numbers, *sizes)
    return b"".join((head, _ints(init.tokens), _ints(init.pages), request))


def _unpack_init(read: _Cursor) -> SlotInit:
    slot, prompt_len, num_cached, max_len, snapshot, num_tokens, num_pages, size = read.struct(
        _INIT
    )
    tokens, pages = read.array(np.int32, num_tokens), read.array(np.int32, num_pages)
    request = decode_submit(read.take(size))
    return SlotInit(slot, request, tokens, prompt_len, num_cached, max_len, pages, snapshot)


def _ints(values: Ints) -> bytes:
    return np.ascontiguousarray(values, np.int32).tobytes()


class _Cursor:
    """Reads one part after another."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    def take(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]

    def struct(self, kind: struct.Struct) -> tuple[Any, ...]:
        return kind.unpack(self.take(kind.size))

    def array(self, kind: type[np.generic], count: int) -> Any:
        """A copy, because a plan is writable."""
        return np.frombuffer(self.take(count * np.dtype(kind).itemsize), kind).copy()
