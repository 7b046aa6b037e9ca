"""Tiny P-EAGLE heads and PARD models, and their plain arithmetic: one sequence from its start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.eagle import train
from tests.eagle3 import PlainEagle3, random_eagle3, save_eagle3

MASK = 7


@dataclass
class PlainPEagle:
    """An EAGLE-3 head with a feature for masks."""

    eagle: PlainEagle3
    mask_1D: Tensor

    kind = "peagle"

    def features(self, target: Any, tokens: Sequence[int]) -> Tensor:
        return self.eagle.features(target, tokens)

    def drafts(self, feature_ND: Tensor, tokens: Sequence[int], k: int, limit: int) -> list[int]:
        eagle, count = self.eagle, len(tokens) - 1
        num_masks = min(k - 1, limit - count)
        own_ND = eagle.read(feature_ND[:count])
        mask_MD = eagle.read(self.mask_1D).expand(num_masks, -1)
        fed = torch.tensor([*tokens[1:], *[MASK] * num_masks])
        out_ND = eagle.forward(torch.cat((own_ND, mask_MD)), fed)[count - 1 :]
        return [eagle.token_of(i) for i in eagle.logits(out_ND).argmax(-1).tolist()]

    def first_logits(self, feature_ND: Tensor, tokens: Sequence[int], k: int) -> Tensor:
        """Of the first draft, over the target's vocabulary."""
        eagle = self.eagle
        out_ND = eagle.forward(eagle.read(feature_ND[:-1]), torch.tensor(tokens[1:]))
        wide_V = torch.full((eagle.config["vocab_size"],), -1e9)
        own_V = eagle.logits(out_ND[-1:])[0]
        wide_V[[eagle.token_of(i) for i in range(len(own_V))]] = own_V
        return wide_V

    def save(self, folder: Path, form: str) -> None:
        save_eagle3(folder, self.eagle, form="flat" if form == "z-lab" else "nested")
        config = json.loads((folder / "config.json").read_text())
        stored = folder / "pytorch_model.bin"
        if form == "z-lab":
            config["ptd_token_id"] = MASK
            tensors = torch.load(stored)
            torch.save(tensors | {"mask_hidden": self.mask_1D[None].clone()}, stored)
        else:
            config |= {"speculators_model_type": "peagle", "mask_token_id": MASK}
            stored = folder / "model.safetensors"
            save_file(load_file(stored) | {"mask_hidden": self.mask_1D.clone()}, stored)
        (folder / "config.json").write_text(json.dumps(config))


def trained_peagle(target: Any, sequences: Sequence[Sequence[int]]) -> PlainPEagle:
    eagle = train(random_eagle3(target, num_hidden_layers=2), target, sequences)
    width = len(eagle.taps) * target.config.hidden_size
    generator = torch.Generator().manual_seed(3)
    return PlainPEagle(eagle, torch.randn(1, width, generator=generator))


@dataclass
class PlainPard:
    """A causal LM of transformers that is given masks."""

    folder: str  # of a draft model

    kind = "pard"

    @cached_property
    def model(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder).eval()

    def features(self, target: Any, tokens: Sequence[int]) -> Tensor:
        return torch.empty(len(tokens), 0)

    def drafts(self, feature_ND: Tensor, tokens: Sequence[int], k: int, limit: int) -> list[int]:
        num_masks = min(k - 1, limit - len(tokens))
        given = torch.tensor([[*tokens, *[MASK] * num_masks]])
        with torch.no_grad():
            logits_NV = self.model(given).logits[0, len(tokens) - 1 :]
        return logits_NV.argmax(-1).tolist()  # type: ignore[no-any-return]

    def first_logits(self, feature_ND: Tensor, tokens: Sequence[int], k: int) -> Tensor:
        """Of the first draft."""
        with torch.no_grad():
            logits_V: Tensor = self.model(torch.tensor([list(tokens)])).logits[0, -1]
        return logits_V

    def save(self, folder: Path, form: str) -> None:
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        config |= {"pard_token": MASK, "spd_type": "pard"}
        (folder / "config.json").write_text(json.dumps(config))
