"""Attention blocks: normed activations in, the update of the residual stream out.

A block writes KV to the pages of its own layer. It knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.kernels.attention.reference import AttentionBatch
from paceline.kernels.elementwise.reference import HeadNorms
from paceline.kernels.table import Kernels
from paceline.layers.linear import Linear
from paceline.state.pages import LayerPages
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
    unwanted: Longs | None = None  # see step.StepPlan; None: the pass is never ended early

    def check_wanted(self) -> None:
        """Between two layers. Raises Unwanted when no output of the pass is read any more."""
        if self.unwanted is not None and self.unwanted[0]:
            raise Unwanted


class Attention(Protocol):
    """`rotation_TH` are the rotations of the step's positions, complex64. KV is written for all
    entries; results are computed for `wanted` only."""

    def __call__(
        self,
        x_TD: Tensor,
        rotation_TH: Tensor,
        inputs: ForwardInputs,
        pages: LayerPages,
        wanted: WantedEntries | None = None,
    ) -> Tensor: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True)
class GroupedAttention:
    """Query heads in groups that share a KV head. q and k rows hold interleaved rotary pairs."""

    qkv: Linear
    o: Linear
    kernels: Kernels
    scale: float
    head_norms: HeadNorms | None = None

    def __call__(
        self,
        x_TD: Tensor,
        rotation_TH: Tensor,
        inputs: ForwardInputs,
        pages: LayerPages,
        wanted: WantedEntries | None = None,
    ) -> Tensor:
        key, value, batch = pages.key_NSH, pages.value_NSH, inputs.attention
        qkv_TD = self.qkv(x_TD)
        self.kernels.place_heads(
            qkv_TD, rotation_TH, self.head_norms, key, value, inputs.page_slot_T
        )
        if wanted is not None:
            qkv_TD, batch = qkv_TD.index_select(0, wanted.entry_N), wanted.attention
        return self.o(self.kernels.paged_attention(qkv_TD, key, value, batch, self.scale))

    @property
    def nbytes(self) -> int:
        return self.qkv.nbytes + self.o.nbytes
