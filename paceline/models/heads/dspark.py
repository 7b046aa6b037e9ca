"""DSpark: DFlash's layers, and a low-rank bias of each draft's logits by the token before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.layers.linear import Linear
from paceline.layers.vocab import VocabShards
from paceline.models.heads.block_config import BlockConfig
from paceline.models.reader import Reader
from paceline.models.weight_source import NamedShape

_AT = "model.markov_head."
KINDS = ("vanilla", "gated")


def read_markov(config: BlockConfig) -> MarkovSpec | None:
    """None: rank 0, a head without this part."""
    kind = config.key("markov_head_type") or "vanilla"
    if kind not in KINDS:
        raise CheckpointError(
            f"the DSpark head {config.name!r} has a markov head of type {kind!r}, which is not "
            f"supported; {' and '.join(KINDS)} are."
        )
    return MarkovSpec(config.number("markov_rank"), kind) if config.key("markov_rank") else None


@dataclass(frozen=True, slots=True)
class MarkovSpec:
    """Its tensors."""

    rank: int
    kind: str

    def shapes(self, width: int, vocab_size: int, draft_vocab_size: int) -> list[NamedShape]:
        shapes: list[NamedShape] = [
            (f"{_AT}markov_w1.weight", (vocab_size, self.rank)),
            (f"{_AT}markov_w2.weight", (draft_vocab_size, self.rank)),
        ]
        if self.kind == "gated":
            shapes.append((f"{_AT}gate_proj.weight", (self.rank, width + self.rank)))
            shapes.append((f"{_AT}gate_proj.bias", (self.rank,)))
        return shapes

    def load(self, read: Reader, vocab: VocabShards) -> MarkovChain:
        """The rows of `markov_w2` are those of this rank's logits."""
        rows = read.tensor(f"{_AT}markov_w2.weight")[vocab.start : vocab.stop]
        return MarkovChain(
            table_VR=read.table(f"{_AT}markov_w1.weight"),
            bias=read.formats.linear(rows.contiguous(), None),
            gate=read.linear([f"{_AT}gate_proj"]) if self.kind == "gated" else None,
            vocab=vocab,
        )


@dataclass(frozen=True, slots=True)
class MarkovChain:
    """logits + w2(e), e = w1[previous]; gated: e * sigmoid(gate([hidden; e]))."""

    table_VR: Tensor
    bias: Linear
    gate: Linear | None
    vocab: VocabShards

    def __call__(self, logits_BV: Tensor, hidden_BD: Tensor, previous_B: Tensor) -> Tensor:
        token_BR = self.table_VR.index_select(0, previous_B).to(hidden_BD.dtype)
        if self.gate is not None:
            gate_BR = self.gate(torch.cat((hidden_BD, token_BR), dim=1))
            token_BR = token_BR * torch.sigmoid(gate_BR.float()).to(token_BR.dtype)
        return logits_BV + self.bias(token_BR).float()
