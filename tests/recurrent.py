"""Storage and rows of models that may have recurrent layers, for tests that run a decoder."""

from __future__ import annotations

import torch

from paceline.kernels.delta_rule.reference import DeltaRows
from paceline.layers.attention import ForwardInputs
from paceline.models.layout import add_storage, make_recurrent
from paceline.models.spec import ModelSpec
from paceline.state.pages import Pages
from paceline.state.recurrent import LayerStorage
from paceline.state.slots import Slots


def storage_of(spec: ModelSpec, slots: Slots, pages: Pages) -> list[LayerStorage]:
    recurrent = make_recurrent(spec, slots, 0, torch.float32)
    return add_storage(pages, spec, torch.float32, recurrent)


def with_rows(inputs: ForwardInputs) -> ForwardInputs:
    """All entries are final, and the states cover what is before them."""
    batch = inputs.attention
    start_B = batch.row_start_B[:-1].int()
    query_len_B = batch.row_start_B.diff().int()
    first_B = batch.length_B.int() - query_len_B
    none_BM = start_B.new_empty(len(start_B), 0)
    inputs.recurrent = DeltaRows(
        slot_B=batch.slot_B.int(),
        row_start_B=start_B,
        query_len_B=query_len_B,
        start_B=first_B,
        committed_B=query_len_B,
        state_len_B=first_B,
        mark_len_BM=none_BM,
        mark_entry_BM=none_BM,
        max_query_len=max(query_len_B.tolist(), default=0),
    )
    return inputs
