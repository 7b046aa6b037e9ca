"""Logits processors that tests load by name."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sampling.custom import SlotView


class BanLastToken:
    """Never the same token twice in a row; depends on drafts before the position."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size

    def __call__(self, logits_V: Tensor, slot: SlotView, position: int) -> Tensor:
        assert len(slot.tokens) == position
        logits_V[int(slot.tokens[-1])] = -torch.inf
        return logits_V


class Only:
    """Only `extra_args["token"]`, as a new tensor."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.floor = torch.full((vocab_size,), -torch.inf, device=device)

    def __call__(self, logits_V: Tensor, slot: SlotView, position: int) -> Tensor:
        forced_V = self.floor.clone()
        forced_V[slot.extra_args["token"]] = 0.0
        return forced_V


class Broken:
    """Fails in the way that `extra_args["how"]` says."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        pass

    def __call__(self, logits_V: Tensor, slot: SlotView, position: int) -> Tensor:
        if slot.extra_args["how"] == "shape":
            return logits_V[:-1]
        raise KeyError("nothing here")


class NeedsMore:
    def __init__(self, vocab_size: int) -> None:
        pass


class NotCallable:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        pass
