"""Attention blocks: normed activations in, the update of the residual stream out.

A block writes KV to the pages of one layer. It knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.kernels.attention.reference import AttentionBatch
from paceline.kernels.delta_rule.reference import DeltaRows
from paceline.kernels.elementwise.reference import HeadNorms
from paceline.kernels.kv_codes.reference import KvScales
from paceline.kernels.table import Kernels
from paceline.layers.linear import Linear
from paceline.state.pages import LayerPages
from paceline.state.recurrent import LayerStorage
from paceline.step import Longs


@dataclass(slots=True)
class WantedEntries:
    """The entries of a pass whose outputs are used. For the others the last layer computes only
    keys and values, which saves most of a layer for the tokens of a prompt."""

    entry_N: Tensor  # may hold an entry more than once
    attention: AttentionBatch  # a row per entry, with one query, or none if it is not used


class Unwanted(Exception):
    """No output of this pass will be read: all of its requests were aborted."""


@dataclass(slots=True)
class ForwardInputs:
    """What a forward needs to know of the step: one entry per token of the varlen batch."""

    token_T: Tensor  # ids, all valid
    position_T: Tensor  # clamped to the rotary table
    page_slot_T: Tensor  # flat index into the pages where KV is written; -1: nowhere
    attention: AttentionBatch
    num_rows: int | None = None  # the most entries of any rank in this pass; None: as many as here
    wanted: WantedEntries | None = None  # None: all outputs are used
    recurrent: DeltaRows | None = None  # of models with recurrent layers
    unwanted: Longs | None = None  # see step.StepPlan; None: the pass is never ended early

    @property
    def longest(self) -> int:
        """Queries that a row has at most: a bound where lengths live on the device."""
        batch = self.attention
        if batch.max_query_len:
            return batch.max_query_len
        return int(batch.row_start_B.diff().max()) if len(batch.slot_B) else 0

    def check_wanted(self) -> None:
        """Between two layers. Raises Unwanted when no output of the pass is read any more."""
        if self.unwanted is not None and self.unwanted[0]:
            raise Unwanted


@dataclass(slots=True)
class BlockPass:
    """The one pass of a block drafter: committed entries, then the blocks of the drafting rows."""

    inputs: ForwardInputs  # its attention: rows of committed entries, then a row for each block
    num_committed: int  # entries in front of the blocks
    block: AttentionBatch  # the rows of blocks alone; entries are counted from the first block on
    offset_E: Tensor  # of each entry of a block within it
    output_N: Tensor  # the entry of each draft, all drafts of a row in order
    target_T: Tensor | None = None  # the target's entries that are committed; None: all

    def of_target(self, feature_TD: Tensor) -> Tensor:
        """The target's features at the committed entries."""
        return feature_TD if self.target_T is None else feature_TD.index_select(0, self.target_T)

    def of_outputs(self, hidden_TD: Tensor) -> Tensor:
        """The hidden states from which drafts are made."""
        is_selected = self.inputs.wanted is not None
        return hidden_TD if is_selected else hidden_TD.index_select(0, self.output_N)


class Attention(Protocol):
    """`rotation_TH` are the rotations of the step's positions, complex64. KV is written for all
    entries; results are computed for `wanted` only."""

    def __call__(
        self,
        x_TD: Tensor,
        rotation_TH: Tensor,
        inputs: ForwardInputs,
        storage: LayerStorage,
        wanted: WantedEntries | None = None,
    ) -> Tensor: ...

    def store(
        self, x_TD: Tensor, rotation_TH: Tensor, inputs: ForwardInputs, storage: LayerStorage
    ) -> None:
        """Write KV only: no result is read."""

    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True)
class HeadGate:
    """Scales what heads return by a sigmoid of their gates, which are behind q, k and v."""

    qkv_width: int
    sigmoid_mul: Callable[[Tensor, Tensor], Tensor]

    def qkv(self, product_TD: Tensor) -> Tensor:
        return product_TD[:, : self.qkv_width]

    def __call__(self, attended_TD: Tensor, product_TD: Tensor) -> Tensor:
        return self.sigmoid_mul(attended_TD, product_TD[:, self.qkv_width :])


@dataclass(slots=True)
class GroupedAttention:
    """Query heads in groups that share a KV head. q and k rows hold interleaved rotary pairs."""

    qkv: Linear  # and the gates, if there are any
    o: Linear
    kernels: Kernels
    scale: float
    head_norms: HeadNorms | None = None
    gate: HeadGate | None = None
    kv_scales: KvScales | None = None  # None: pages are not fp8

    def __call__(
        self,
        x_TD: Tensor,
        rotation_TH: Tensor,
        inputs: ForwardInputs,
        storage: LayerStorage,
        wanted: WantedEntries | None = None,
    ) -> Tensor:
        return self.o(self.mix(self.qkv(x_TD), rotation_TH, inputs, storage, wanted))

    def mix(
        self,
        product_TD: Tensor,
        rotation_TH: Tensor,
        inputs: ForwardInputs,
        storage: LayerStorage,
        wanted: WantedEntries | None = None,
    ) -> Tensor:
        """Everything between the two projections."""
        key, value = self._place(product_TD, rotation_TH, inputs, storage)
        batch, gate = inputs.attention, self.gate
        if wanted is not None:
            product_TD, batch = product_TD.index_select(0, wanted.entry_N), wanted.attention
        scales = (self.scale, self.kv_scales)
        out_TD = self.kernels.paged_attention(product_TD, key, value, batch, *scales)
        return out_TD if gate is None else gate(out_TD, product_TD)

    def store(
        self, x_TD: Tensor, rotation_TH: Tensor, inputs: ForwardInputs, storage: LayerStorage
    ) -> None:
        self._place(self.qkv(x_TD), rotation_TH, inputs, storage)

    def _place(
        self, product_TD: Tensor, rotation_TH: Tensor, inputs: ForwardInputs, storage: LayerStorage
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys, write KV. Returns the pages."""
        assert isinstance(storage, LayerPages)
        caches = (storage.key_NSH, storage.value_NSH)
        qkv_TD = product_TD if self.gate is None else self.gate.qkv(product_TD)
        places = (*caches, inputs.page_slot_T, self.kv_scales)
        self.kernels.place_heads(qkv_TD, rotation_TH, self.head_norms, *places)
        return caches

    @property
    def nbytes(self) -> int:
        return self.qkv.nbytes + self.o.nbytes
