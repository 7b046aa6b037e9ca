"""The vocabulary over tensor-parallel ranks: the embedding table, and logits of one rank's part.

All ranks get the same bits. On one rank nothing is exchanged and nothing is copied.

Shape letters: T tokens, D hidden, N logits rows, V vocabulary or a part of it, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.errors import ConfigError
from paceline.kernels.table import greedy
from paceline.parallel.collectives import SOLO, Group


@dataclass(frozen=True, slots=True)
class VocabShards:
    """Which token ids each rank of a group holds: equal parts in order; the last may be shorter."""

    size: int
    group: Group = SOLO

    def __post_init__(self) -> None:
        if self.group.size > 1 and (self.group.size - 1) * self.most >= self.size:
            raise ConfigError(
                f"a vocabulary of {self.size} tokens cannot be divided over tensor_parallel_size "
                f"{self.group.size}; use fewer ranks."
            )

    @property
    def most(self) -> int:
        """The number of ids of every rank but the last."""
        return -(-self.size // self.group.size)

    @property
    def start(self) -> int:
        return self.group.rank * self.most

    @property
    def stop(self) -> int:
        return min(self.start + self.most, self.size)

    def gather(self, local_NV: Tensor) -> Tensor:
        """The logits of all ids, gathered from all ranks."""
        group, most = self.group, self.most
        if not group.is_active:
            return local_NV
        missing = most - local_NV.shape[1]
        if missing:
            local_NV = pad(local_NV, (0, missing), value=-torch.inf)
        parts_RNV = group.all_gather(local_NV)
        last = self.size - (group.size - 1) * most
        return torch.cat([*parts_RNV[:-1], parts_RNV[-1, :, :last]], dim=1)

    def greedy(self, local_NV: Tensor) -> tuple[Tensor, Tensor]:
        """`greedy` of the whole rows. Each rank sends one value and one id."""
        token_N, bad_N = greedy(local_NV)
        if not self.group.is_active:
            return token_N, bad_N
        value_N = local_NV.gather(1, token_N.to(torch.int64)[:, None])[:, 0].float()
        # If this part is invalid for any reason but masking, poison the row with NaN.
        value_N = torch.where(bad_N & value_N.isfinite(), torch.nan, value_N)
        mine_2N = torch.stack((value_N.view(torch.int32), token_N + self.start))
        all_R2N = self.group.all_gather(mine_2N)
        value_RN = all_R2N[:, 0].contiguous().view(torch.float32)
        # argmax takes NaN for the largest and the first of equals, as in a whole row.
        rank_1N = value_RN.argmax(0, keepdim=True)
        best_N = value_RN.gather(0, rank_1N)[0]
        return all_R2N[:, 1].gather(0, rank_1N)[0], ~best_N.isfinite()


WHOLE = VocabShards(0)  # one rank holds everything; the size does not matter


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Token embeddings. Each rank holds the rows of its ids."""

    table_VD: Tensor
    vocab: VocabShards

    def __call__(self, token_T: Tensor) -> Tensor:
        vocab = self.vocab
        if not vocab.group.is_active:
            return self.table_VD.index_select(0, token_T)
        is_here_T = (token_T >= vocab.start) & (token_T < vocab.stop)
        row_T = torch.where(is_here_T, token_T - vocab.start, 0)
        rows_TD = self.table_VD.index_select(0, row_T)
        # All ranks but one add zeros, so the sum has exactly the bits of the table.
        return vocab.group.all_reduce(rows_TD.masked_fill_(~is_here_T[:, None], 0.0))

    def is_same(self, other: Embedding) -> bool:
        """Whether both have equal rows on all of `other`'s ranks. All of them must call this.

        `self` is whole, or divided as `other` is.
        """
        mine_VD, theirs_VD = self.table_VD, other.table_VD
        if self.vocab.size != other.vocab.size or mine_VD.shape[1] != theirs_VD.shape[1]:
            return False
        if self.vocab.group.size < other.vocab.group.size:
            mine_VD = mine_VD[other.vocab.start : other.vocab.stop]
        is_alike = mine_VD.dtype == theirs_VD.dtype and torch.equal(mine_VD, theirs_VD)
        return all_agree(other.vocab.group, is_alike, theirs_VD.device)

    @property
    def nbytes(self) -> int:
        return self.table_VD.nbytes


def all_agree(group: Group, mine: bool, device: torch.device) -> bool:
    """Whether `mine` is true on every rank. Waits for the device: for loading only."""
    return bool(group.all_gather(torch.tensor([mine], device=device)).all())
