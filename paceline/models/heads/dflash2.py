"""DFlash2: convolutions over a block in every layer, and a choice among candidates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.layers.linear import Linear
from paceline.layers.vocab import WHOLE, VocabShards
from paceline.models.heads.block_config import BlockConfig
from paceline.models.reader import Reader
from paceline.models.weight_source import NamedShape

_AT = "model.candidate_selector."


def read_convs(config: BlockConfig, width: int) -> ConvSpec:
    size, group = config.number("conv_kernel_size"), config.number("conv_group_size")
    if width % group:
        raise CheckpointError(
            f"the DFlash2 head {config.name!r} is {width} wide, which its conv_group_size {group} "
            "does not divide."
        )
    return ConvSpec(size, group)


def read_selector(config: BlockConfig, vocab_size: int) -> SelectorSpec:
    if config.draft_vocab_size != vocab_size:
        raise CheckpointError(
            f"the DFlash2 head {config.name!r} drafts {config.draft_vocab_size} of {vocab_size} "
            "tokens; its candidates are of the whole vocabulary."
        )
    return SelectorSpec(config.number("selector_rank"), config.number("selector_top_k"))


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """Sizes of all convolutions."""

    num_taps: int
    group_size: int  # channels that share what is added to the kernels

    def shapes(self, width: int, num_layers: int) -> list[NamedShape]:
        shapes: list[NamedShape] = []
        for at in (f"model.layers.{i}.{x}_conv." for i in range(num_layers) for x in _PLACES):
            rows = 2 * self.num_taps * width // self.group_size
            shapes.append((f"{at}base_kernel", (2, self.num_taps, width)))
            shapes.append((f"{at}kernel_projection.weight", (rows, width)))
        return shapes

    def load(self, read: Reader, num_layers: int) -> list[tuple[BlockConv, BlockConv]]:
        """Of each layer: around attention, and around the MLP."""

        def conv(at: str) -> BlockConv:
            base_2TD = read.tensor(f"{at}base_kernel").to(read.formats.device, torch.float32)
            return BlockConv(base_2TD, read.linear([f"{at}kernel_projection"]), self.group_size)

        layers = (f"model.layers.{i}." for i in range(num_layers))
        return [(conv(f"{at}attention_conv."), conv(f"{at}mlp_conv.")) for at in layers]


_PLACES = ("attention", "mlp")


@dataclass(frozen=True, slots=True)
class BlockConv:
    """Convolves what goes into a part of a layer and what comes out of it, over a block's entries.

    Kernels are made from the entry itself: a base, and for each group of channels an addition.
    """

    base_2TD: Tensor
    projection: Linear
    group_size: int

    def around(self, x_ED: Tensor, offset_E: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        num_taps = self.base_2TD.shape[1]
        added_E2TG = self.projection(x_ED).float().unflatten(1, (2, num_taps, -1))
        kernel_E2TD = self.base_2TD + added_E2TG.repeat_interleave(self.group_size, dim=3)
        out_ED = part(_convolved(x_ED, kernel_E2TD[:, 0], offset_E))
        return _convolved(out_ED, kernel_E2TD[:, 1], offset_E)


def _convolved(x_ED: Tensor, kernel_ETD: Tensor, offset_E: Tensor) -> Tensor:
    """Entry by entry over the entries before it in its block."""
    sum_ED = kernel_ETD[:, 0] * x_ED
    for tap in range(1, kernel_ETD.shape[1]):
        before_ED = torch.roll(x_ED, tap, dims=0).float()
        before_ED = before_ED.masked_fill(offset_E[:, None] < tap, 0.0)
        sum_ED = sum_ED + kernel_ETD[:, tap] * before_ED
    return sum_ED.to(x_ED.dtype)


@dataclass(frozen=True, slots=True)
class SelectorSpec:
    """Its tensors."""

    rank: int
    top_k: int

    def shapes(self, width: int, vocab_size: int, draft_vocab_size: int) -> list[NamedShape]:
        return [
            (f"{_AT}predecessor_codebook", (vocab_size, self.rank)),
            (f"{_AT}successor_codebook", (vocab_size, self.rank)),
            (f"{_AT}hidden_projection.weight", (self.rank, width)),
        ]

    def load(self, read: Reader, vocab: VocabShards) -> Selector:
        return Selector(
            before_VR=read.table(f"{_AT}predecessor_codebook"),
            after_VR=read.table(f"{_AT}successor_codebook"),
            projection=read.linear([f"{_AT}hidden_projection"]),
            top_k=self.top_k,
            logits_vocab=vocab,
        )


@dataclass(frozen=True, slots=True)
class Selector:
    """Scores of the best candidates: their logit, and how well they follow the token before.

    Other tokens have no chance. All ranks hold the whole result.
    """

    before_VR: Tensor
    after_VR: Tensor
    projection: Linear
    top_k: int
    logits_vocab: VocabShards

    vocab = WHOLE

    def __call__(self, logits_BV: Tensor, hidden_BD: Tensor, previous_B: Tensor) -> Tensor:
        logits_BV = self.logits_vocab.gather(logits_BV)
        value_BC, token_BC = logits_BV.topk(min(self.top_k, logits_BV.shape[1]), dim=1)
        edge_BR = self.before_VR.index_select(0, previous_B).float()
        edge_BR = edge_BR * self.projection(hidden_BD).float()
        after_BCR = self.after_VR[token_BC].float()
        score_BC = value_BC + (after_BCR * edge_BR[:, None]).sum(dim=2)
        return torch.full_like(logits_BV, -torch.inf).scatter_(1, token_BC, score_BC)
