"""Admission: requests take their slots, all of a step's in one record and one launch.

Owns the record's layout, its packing on the host and the torch reference of its unpacking; never
decides which requests are admitted.

Shape letters: W words of a record, F fields of a slot, E ids of a slot, S slots, L longest
sequence, K drafts, P pages of a slot, A admissions, M most of a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int32]


class AdmitTensors(NamedTuple):
    """What an admission writes. All int32."""

    fields_FS: Tensor  # floats by their bits
    ids_SE: Tensor
    tokens_SL: Tensor
    drafts_SK: Tensor
    table_SP: Tensor


class Admission(NamedTuple):
    """One request's part of a record."""

    slot: int
    fields_F: Ints  # floats by their bits, in the order of fields_FS
    ids_E: Ints
    tokens: Ints
    pages: Ints


@dataclass(frozen=True, slots=True)
class AdmitRecord:
    """Where an admission's words lie: a row of `stride` words each, then token and page lists."""

    num_fields: int
    num_ids: int

    SLOT, NUM_TOKENS, TOKEN_OFFSET, NUM_PAGES, PAGE_OFFSET = range(5)  # offsets are in words
    FIELDS = 5

    @property
    def ids(self) -> int:
        return self.FIELDS + self.num_fields

    @property
    def stride(self) -> int:
        return self.ids + self.num_ids

    @classmethod
    def of(cls, tensors: AdmitTensors) -> AdmitRecord:
        return cls(len(tensors.fields_FS), tensors.ids_SE.shape[1])


def pack_admissions(layout: AdmitRecord, admissions: Sequence[Admission]) -> Ints:
    """The record of these admissions."""
    offset = len(admissions) * layout.stride
    num_words = offset + sum(len(a.tokens) + len(a.pages) for a in admissions)
    record_W = np.empty(num_words, np.int32)
    for row, admission in zip(
        record_W[:offset].reshape(-1, layout.stride), admissions, strict=True
    ):
        page_offset = offset + len(admission.tokens)
        end = page_offset + len(admission.pages)
        row[layout.SLOT] = admission.slot
        row[layout.NUM_TOKENS], row[layout.TOKEN_OFFSET] = len(admission.tokens), offset
        row[layout.NUM_PAGES], row[layout.PAGE_OFFSET] = len(admission.pages), page_offset
        row[layout.FIELDS : layout.ids] = admission.fields_F
        row[layout.ids :] = admission.ids_E
        record_W[offset:page_offset] = admission.tokens
        record_W[page_offset:end] = admission.pages
        offset = end
    return record_W


def admit(record_W: Tensor, num_admissions: int, tensors: AdmitTensors) -> None:
    """Fill the slots of a record. Nothing of a former owner survives but tokens past the length.

    The fields hold the length of the sequence; `num_tokens` of the record counts the list.
    """
    layout = AdmitRecord.of(tensors)
    table_AR = record_W[: num_admissions * layout.stride].view(num_admissions, layout.stride)
    slot_A = table_AR[:, layout.SLOT].long()
    tensors.fields_FS[:, slot_A] = table_AR[:, layout.FIELDS : layout.ids].T
    tensors.ids_SE[slot_A] = table_AR[:, layout.ids :]
    tensors.drafts_SK[slot_A] = -1
    token_AM, is_token_AM = _lists(record_W, table_AR, layout.NUM_TOKENS, tensors.tokens_SL)
    tensors.tokens_SL[slot_A] = token_AM.where(is_token_AM, tensors.tokens_SL[slot_A])
    page_AM, is_page_AM = _lists(record_W, table_AR, layout.NUM_PAGES, tensors.table_SP)
    tensors.table_SP[slot_A] = page_AM.where(is_page_AM, -1)


def _lists(
    record_W: Tensor, table_AR: Tensor, column: int, into_SM: Tensor
) -> tuple[Tensor, Tensor]:
    """Each list at full width, and which of it is real; its offset stands behind its count."""
    step_M = torch.arange(into_SM.shape[1], device=record_W.device)
    index_AM = (table_AR[:, column + 1, None] + step_M).clamp(max=len(record_W) - 1)
    return record_W[index_AM], step_M < table_AR[:, column, None]
