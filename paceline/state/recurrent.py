"""Recurrent state of gated delta net layers: one row per slot, and snapshots of known prefixes.

Only the step writes the state of slots and snapshots; only staging copies a snapshot into a slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.delta_rule.reference import DeltaRows, DeltaSizes, DeltaState, num_kept
from paceline.kernels.step_rows import StepRows
from paceline.state.pages import LayerPages

# What a layer keeps of its sequences.
LayerStorage = LayerPages | DeltaState


class Recurrent:
    """All layers in two tensors, so that a snapshot is copied by two calls."""

    def __init__(
        self,
        num_layers: int,
        sizes: DeltaSizes,
        num_slots: int,
        max_k: int,
        num_snapshots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.sizes = sizes
        self.num_snapshots = num_snapshots
        state = (sizes.num_value_heads, sizes.value_size, sizes.key_size)
        kept, taps = num_kept(max_k, sizes.conv_size), sizes.conv_size - 1

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_layers, *shape, dtype=dtype, device=device)

        f32 = torch.float32
        self.state_LSNVK = zeros(num_slots + 1, *state, dtype=f32)
        self.input_LSRP = zeros(num_slots + 1, kept, sizes.width, dtype=dtype)
        self.saved_state_LENVK = zeros(num_snapshots, *state, dtype=f32)
        self.saved_input_LEJP = zeros(num_snapshots, taps, sizes.width, dtype=dtype)

    def layers(self) -> list[DeltaState]:
        tensors = (
            self.state_LSNVK,
            self.input_LSRP,
            self.saved_state_LENVK,
            self.saved_input_LEJP,
        )
        return [DeltaState(*layer) for layer in zip(*tensors, strict=True)]

    def restore(self, slot: int, entry: int, length: int) -> None:
        """The slot continues from a snapshot of `length` positions. In stream order."""
        self.state_LSNVK[:, slot].copy_(self.saved_state_LENVK[:, entry])
        taps = self.sizes.conv_size - 1
        kept = self.input_LSRP.shape[2]
        for j in range(taps):
            position = length - taps + j
            if position >= 0:
                self.input_LSRP[:, slot, position % kept].copy_(self.saved_input_LEJP[:, entry, j])


def slot_bytes(num_layers: int, sizes: DeltaSizes, max_k: int, itemsize: int) -> int:
    """Bytes of one slot over all layers."""
    state = 4 * sizes.num_value_heads * sizes.value_size * sizes.key_size
    return num_layers * (state + num_kept(max_k, sizes.conv_size) * sizes.width * itemsize)


def snapshot_bytes(num_layers: int, sizes: DeltaSizes, itemsize: int) -> int:
    """Bytes of one snapshot over all layers."""
    state = 4 * sizes.num_value_heads * sizes.value_size * sizes.key_size
    return num_layers * (state + (sizes.conv_size - 1) * sizes.width * itemsize)


def delta_rows(
    rows: StepRows, state_len_S: Tensor, marks: tuple[Tensor, Tensor], max_query_len: int
) -> DeltaRows:
    """What the rows of a step are to recurrent layers. A window's first position is final."""
    windows, query_len_B = rows.windows, rows.query_len_B.int()
    drafts_B = (windows.width_B - 1).clamp(min=0)
    mark_len_BM, mark_entry_BM = marks
    return DeltaRows(
        slot_B=windows.slot_B.int(),
        row_start_B=rows.row_start_B.int(),
        query_len_B=query_len_B,
        start_B=rows.start_B.int(),
        committed_B=(query_len_B - drafts_B).int(),
        state_len_B=state_len_S.index_select(0, windows.slot_B),
        mark_len_BM=mark_len_BM,
        mark_entry_BM=mark_entry_BM,
        max_query_len=max_query_len,
    )


def advance_state(rows: DeltaRows, state_len_S: Tensor) -> None:
    """Every layer has run: the states cover the committed positions now."""
    is_live_B = rows.query_len_B > 0
    length_B = (rows.start_B + rows.committed_B).where(is_live_B, rows.state_len_B)
    state_len_S.index_copy_(0, rows.slot_B.long(), length_B)
