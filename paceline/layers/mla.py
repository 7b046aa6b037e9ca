"""Multi-head latent attention in its absorbed form: all heads attend to one narrow KV row.

The KV projection is applied to queries and results, not to every cached latent:
(q Wk) . latent = q . (Wk latent), and the weighted sum of latents is multiplied by Wv once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.kv_codes.reference import KvScales
from paceline.kernels.mla.reference import LatentNorm
from paceline.kernels.table import LatentKernels
from paceline.layers.attention import ForwardInputs, WantedEntries
from paceline.layers.linear import Linear
from paceline.state.pages import LayerPages
from paceline.state.recurrent import LayerStorage


@dataclass(slots=True)
class QueryRank:
    """Low-rank queries: a narrow vector, its norm, and the projection up to all heads."""

    norm_Q: Tensor
    eps: float
    up: Linear

    @property
    def size(self) -> int:
        return len(self.norm_Q)


@dataclass(slots=True)
class LatentAttention:
    """An `Attention` block. Rotary parts hold interleaved pairs."""

    down: Linear  # gives the queries (or their narrow vector), then the latent, then the rotary key
    query: QueryRank | None  # None: `down` gives the queries themselves
    key_NQL: Tensor  # Wk by head: maps the part of a query without positions to a latent
    value_NLV: Tensor  # Wv by head: maps a latent to a value
    norm: LatentNorm
    o: Linear
    kernels: LatentKernels
    scale: float
    kv_scales: KvScales | None = None  # None: pages are not fp8

    def __call__(
        self,
        x_TD: Tensor,
        rotation_TH: Tensor,
        inputs: ForwardInputs,
        storage: LayerStorage,
        wanted: WantedEntries | None = None,
    ) -> Tensor:
        num_heads, latent_size, value_size = self.value_NLV.shape
        query_TNH, rows_TNH, key_NSH = self._place(x_TD, rotation_TH, inputs, storage)
        batch = inputs.attention
        if wanted is not None:
            query_TNH, rows_TNH = (x.index_select(0, wanted.entry_N) for x in (query_TNH, rows_TNH))
            batch = wanted.attention
        nope_NTQ = query_TNH[..., : self.key_NQL.shape[1]].transpose(0, 1)
        torch.bmm(nope_NTQ, self.key_NQL, out=rows_TNH[..., :latent_size].transpose(0, 1))
        sizes = (self.scale, latent_size, self.kv_scales)
        seen_TNL = self.kernels.mla_attention(rows_TNH, key_NSH, batch, *sizes)
        value_TNV = query_TNH.new_empty(len(query_TNH), num_heads, value_size)
        torch.bmm(seen_TNL.transpose(0, 1), self.value_NLV, out=value_TNV.transpose(0, 1))
        return self.o(value_TNV.flatten(1))

    def store(
        self, x_TD: Tensor, rotation_TH: Tensor, inputs: ForwardInputs, storage: LayerStorage
    ) -> None:
        self._place(x_TD, rotation_TH, inputs, storage)

    def _place(
        self, x_TD: Tensor, rotation_TH: Tensor, inputs: ForwardInputs, storage: LayerStorage
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write latents. Returns the queries, rows with their rotated part, and the pages."""
        assert isinstance(storage, LayerPages)
        num_heads, key_NSH = len(self.value_NLV), storage.key_NSH
        row_size = key_NSH.shape[-1]
        down_TD = self.down(x_TD)
        query_TD, kv_TH = down_TD.split((down_TD.shape[1] - row_size, row_size), dim=1)
        if self.query is not None:
            normed_TQ = self.kernels.rms_norm(query_TD, self.query.norm_Q, self.query.eps)
            query_TD = self.query.up(normed_TQ)
        query_TNH = query_TD.unflatten(1, (num_heads, -1))
        rows_TNH = query_TD.new_empty(len(x_TD), num_heads, row_size)
        places = (key_NSH, inputs.page_slot_T, self.kv_scales)
        self.kernels.place_latent(query_TNH, kv_TH, rotation_TH, self.norm, rows_TNH, *places)
        return query_TNH, rows_TNH, key_NSH

    @property
    def nbytes(self) -> int:
        linears = self.down.nbytes + self.o.nbytes + (self.query.up.nbytes if self.query else 0)
        return linears + self.key_NQL.nbytes + self.value_NLV.nbytes
