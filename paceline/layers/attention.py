"""Attention blocks: normed activations in, what the block adds to the residual out.

KV goes to the pages of the block's own layer; a block never looks at requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.kernels.attention import AttentionBatch
from paceline.kernels.dispatch import Kernels
from paceline.kernels.rope import HeadNorms
from paceline.layers.linear import Linear
from paceline.state.pages import LayerPages


@dataclass(slots=True)
class WantedEntries:
    """The entries of a pass whose outputs anybody reads. Of the others a last layer computes keys
    and values alone: nearly a whole layer less for the tokens of a prompt."""

    entry_N: Tensor  # some may be there more than once
    attention: AttentionBatch  # each is a row with one query, or none if nobody reads it after all


@dataclass(slots=True)
class ForwardInputs:
    """What a forward needs of the step: one entry per token of the varlen batch."""

    token_T: Tensor  # ids, all valid
    position_T: Tensor  # clamped to the rotary table
    page_slot_T: Tensor  # flat slot to write KV to; -1 writes nothing
    attention: AttentionBatch
    num_rows: int | None = (
        None  # most entries that any rank has in this pass; None: as many as here
    )
    wanted: WantedEntries | None = None  # None: all outputs are read


class Attention(Protocol):
    """`rotation_TH` are the rotations of the step's positions, complex64. KV is that of all
    entries, results are of those that are wanted."""

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
