"""A logits processor that needs the whole history of its sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sampling.custom import SlotView

NAME = f"{__name__}:NeverTwice"


class NeverTwice:
    """No output token comes twice. An engine that lost the history would repeat one."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        pass

    def __call__(self, logits_V: Tensor, slot: SlotView, position: int) -> Tensor:
        assert len(slot.tokens) == position
        logits_V[slot.tokens[slot.prompt_len :].long()] = -torch.inf
        return logits_V
