"""What a rank computes of tiny models and their drafters, whole or in parts: see tests/parallel.

The same functions run on one rank (`ALONE`) and on several, so that their results can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.checkpoint.source import locate
from paceline.drafters.autoregressive import (
    AutoregressiveDrafter,
    DraftHead,
    DraftModelHead,
    FeatureHead,
)
from paceline.drafters.base import DraftPass
from paceline.kernels.rows import WindowRows
from paceline.kernels.sampling.reference import greedy
from paceline.kernels.step_rows import BlockLayout, StepRows
from paceline.layers.attention import BlockPass, ForwardInputs
from paceline.layers.linear import exact_linear
from paceline.layers.vocab import Embedding, VocabShards
from paceline.models.decoder import Decoder
from paceline.models.families import read_spec
from paceline.models.heads.base import HeadModel
from paceline.models.layout import add_storage, lay_out, lay_out_one_each
from paceline.models.loading import load_decoder
from paceline.models.reader import WeightFormats
from paceline.models.weights import open_weights
from paceline.parallel.groups import Groups
from paceline.parallel.placement import Layout
from paceline.runner.prompt_logprobs import PromptScores, score_prompts
from paceline.sampling.verify import SamplingMode, verify
from paceline.state.pages import LayerPages, Pages
from paceline.state.recurrent import LayerStorage
from paceline.state.slots import Slots
from paceline.step import StepPlan
from tests.eagle import random_head, save_head
from tests.eagle3 import random_eagle3, save_eagle3
from tests.heads import read_head
from tests.mtp import random_mtp, save_mtp
from tests.parallel.ranks import open_checked
from tests.recurrent import storage_of, with_rows
from tests.tiny import save_noisy_draft, save_tiny

CPU = torch.device("cpu")
EXACT = WeightFormats(exact_linear(CPU), torch.float32, torch.float32, CPU)
LENGTH, DRAFTS = 24, 4
VOCAB = 97  # divides by nothing
# Eight heads in groups of four, which four ranks cut; biases that must be added once.
LLAMA: dict[str, Any] = {
    "num_attention_heads": 8,
    "attention_bias": True,
    "mlp_bias": True,
    "vocab_size": VOCAB,
}
# Four key heads, which four ranks cut, with two value heads each.
HYBRID: dict[str, Any] = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "one KV head": ("llama-tied-rope3", {"num_key_value_heads": 1, "vocab_size": 101}),
    "four KV heads": ("qwen2", {"num_key_value_heads": 4}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral-window", {}),
    "qwen3-moe": ("qwen3-moe", {}),
    "deepseek-v3": ("deepseek-v3", {}),
    "glm4-moe-lite": ("glm4-moe-lite", {"vocab_size": 98}),
    "qwen3.5": ("qwen3.5", HYBRID),
    "qwen3.5-moe": ("qwen3.5-moe", HYBRID),
    "qwen3-next": ("qwen3-next", HYBRID),
}
# The model that each drafter is for.
DRAFTERS = {
    "eagle": "llama",
    "eagle with a table": "llama",
    "eagle3": "llama",
    "eagle3 with a table": "llama",
    "mtp": "llama",
    "mtp with a head": "llama",
    "mtp of experts": "deepseek-v3",
    "mtp of a hybrid": "qwen3.5-moe",
    "model": "llama",
}


def save_all(folder: Path) -> None:
    """Every checkpoint that `compute` reads."""
    models = {n: save_tiny(folder / n, f, **more) for n, (f, more) in FAMILIES.items()}
    llama = models["llama"]
    save_noisy_draft(folder / "model", llama, noise=0.3)
    head = random_head(llama, vocab_size=VOCAB)
    save_head(folder / "eagle", head)
    head.weights["embed_tokens.weight"][-1] += 1.0  # in the last rank's part
    save_head(folder / "eagle with a table", head, as_safetensors=True)
    taps: dict[str, Any] = {"taps": (0, 1, 2)}
    save_eagle3(folder / "eagle3", random_eagle3(llama, draft_vocab=61, **taps))
    other = random_eagle3(llama, draft_vocab=None, model_type="qwen3", head_dim=12, **taps)
    other.weights["embed_tokens.weight"][-1] += 1.0
    save_eagle3(folder / "eagle3 with a table", other, form="nested")
    for name in ("mtp", "mtp of experts", "mtp of a hybrid"):
        target = DRAFTERS[name]
        save_mtp(folder / name, folder / target, random_mtp(models[target]))
    path = folder / "mtp with a head"
    save_mtp(path, folder / "llama", random_mtp(llama))
    tensors = load_file(path / "model.safetensors")
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"model.layers.2.{name}.weight"][-1] += 1.0
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def load(path: Path, groups: Groups) -> Decoder:
    files = locate(str(path))
    weights = open_weights(files)
    try:
        spec = read_spec(files.config)
        return load_decoder(spec, weights, EXACT, max_model_len=64, groups=groups)
    finally:
        weights.close()


def load_head(path: Path, target: Decoder, whole: Any, groups: Groups) -> Any:
    """The model of a drafter; `whole` is the target's spec, of all ranks together."""
    files, name = locate(str(path)), path.name
    weights = open_weights(files)
    given = (weights, EXACT, target)
    try:
        for method in ("mtp", "eagle3", "eagle"):
            if name.startswith(method):
                head = read_head(method, name, files.config, whole)
                return head.load(*given, groups)
        return load_decoder(
            read_spec(files.config), weights, EXACT, max_model_len=64, groups=groups
        )
    finally:
        weights.close()


def _state() -> tuple[Slots, Pages]:
    slots = Slots(2, 64, DRAFTS, VOCAB, CPU, draft_vocab_size=VOCAB)
    pages = Pages(8, 8, 2, 64, CPU)
    pages.table_SP[1] = torch.tensor([3, 1, 7, 2, 0, 4, 5, 6])
    generator = torch.Generator().manual_seed(5)
    token_T = torch.randint(3, 90, (LENGTH,), generator=generator)
    slots.tokens_SL[1, :LENGTH] = token_T.int()
    slots.temperature_S[1], slots.seed_S2[1] = 0.9, torch.tensor([3, 7])
    slots.prompt_len_S[1] = LENGTH
    return slots, pages


@dataclass
class OneSequence:
    """A `DraftStep` of one row whose prompt was computed at once; its last token is new."""

    slots: Slots
    pages: Pages
    feature_TD: Tensor
    k: int = DRAFTS
    is_joint = False
    drafts: Tensor | None = None

    @property
    def slot_B(self) -> Tensor:
        return torch.tensor([1])

    def num_drafting(self, j: int) -> int:
        return 1

    def shifted(self, group_size: int) -> DraftPass:
        return self._first(LENGTH - 1, group_size, 1)

    def own(self, group_size: int) -> DraftPass:
        return self._first(LENGTH, group_size, 0)

    def _first(self, count: int, group_size: int, shift: int) -> DraftPass:
        at, size, row = np.array([0]), np.array([count]), np.array([1])
        inputs = lay_out(self.slots, self.pages, row, at, size, group_size, shift=shift)
        return DraftPass(inputs, torch.tensor([count - 1]), torch.arange(count))

    def block(self, group_size: int, layout: BlockLayout) -> BlockPass:
        raise NotImplementedError

    def next(self, j: int, token_B: Tensor, group_size: int, *, is_shifted: bool) -> ForwardInputs:
        position_B = np.array([LENGTH + j - 1 - is_shifted])
        row = np.array([1])
        return lay_out_one_each(self.slots, self.pages, row, position_B, token_B, group_size)

    def position_B(self, j: int) -> Tensor:
        return torch.tensor([LENGTH + j])

    def store(self, draft_BK: Tensor, *, is_onehot: bool) -> None:
        self.drafts = draft_BK


def of_model(model: Decoder) -> dict[str, Any]:
    """Logits in two pieces, what greedy takes of them, and scores of the prompt."""
    slots, pages = _state()
    layers = storage_of(model.spec, slots, pages)
    row, hidden = np.array([1]), []
    for start, stop in ((0, 15), (15, LENGTH)):
        at, size = np.array([start]), np.array([stop - start])
        inputs = with_rows(lay_out(slots, pages, row, at, size, model.spec.group_size))
        hidden.append(model.forward(inputs, layers))
    hidden_TD = torch.cat(hidden)
    logits_TV = model.logits(hidden_TD)
    rows = SimpleNamespace(row_start_B=torch.tensor([0]), plan_row_B=None)
    plan = SimpleNamespace(query_len_B=[LENGTH], length_bound_B=[LENGTH])
    asked = PromptScores(slots.tokens_SL[1].numpy(), LENGTH - 1, 3)
    (scores,) = score_prompts(model, cast(StepPlan, plan), [asked], cast(StepRows, rows), hidden_TD)
    return {
        "logits": model.vocab.gather(logits_TV),
        "tokens": model.vocab.greedy(logits_TV)[0],
        "local vocabulary": logits_TV.shape[1],
        "scores": torch.from_numpy(scores.values),
        "verified": of_verification(model.vocab, logits_TV, slots),
        "is fused": model.fused is not None,
        "kv heads": next(x.key_NSH.shape[0] for x in layers if isinstance(x, LayerPages)),
        "shapes": shapes_of(model.layers),
    }


def of_verification(vocab: VocabShards, logits_TV: Tensor, slots: Slots) -> dict[str, list[Any]]:
    """What a window emits in every mode; the first drafts are right."""
    last_NV = logits_TV[-DRAFTS - 1 :]
    draft_BK = vocab.greedy(last_NV[:-1])[0][None].clone()
    draft_BK[0, -1] = 0
    slots.max_len_S[1] = 64
    row, width, length = torch.tensor([1]), torch.tensor([DRAFTS + 1]), torch.tensor([LENGTH])
    windows = WindowRows.packed(row, width, draft_BK, length)
    found = {}
    for mode in SamplingMode:
        verdicts = verify(last_NV.clone(), windows, slots, mode=mode, vocab=vocab)
        found[mode.name] = verdicts.token_N.tolist()
    return found


def of_drafter(head: Any, target: Decoder) -> dict[str, Any]:
    """Greedy drafts, sampled ones and what they were drawn from."""
    slots, pages = _state()
    layers = storage_of(target.spec, slots, pages)
    is_model = isinstance(head, Decoder)
    spec = head.spec if is_model else head.stack.spec
    own = add_storage(pages, spec, torch.float32)
    drafter_head = _draft_head(head, own)
    row, at, size = np.array([1]), np.array([0]), np.array([LENGTH])
    inputs = with_rows(lay_out(slots, pages, row, at, size, target.spec.group_size))
    _, feature_TD = target.forward_with_features(inputs, layers, drafter_head.tap_ids)
    step = OneSequence(slots, pages, feature_TD)
    found: dict[str, Any] = {}
    for key, method in (("drafts", "greedy"), ("sampled", "probabilistic")):
        AutoregressiveDrafter(drafter_head, DRAFTS, method).propose(step)
        found[key] = step.drafts
    assert slots.draft_probs_SKV is not None
    found["q"] = slots.draft_probs_SKV[1].clone()
    found["shapes"] = shapes_of(head.layers if is_model else head.stack.layers)
    found["shares the table"] = head.embedding is target.embedding
    found["shares the head"] = head.lm_head is target.lm_head
    return found


def _draft_head(head: Decoder | HeadModel, layers: list[LayerStorage]) -> DraftHead:
    if isinstance(head, Decoder):
        return DraftModelHead(head, layers)
    return FeatureHead(head, layers)


def shapes_of(found: Any) -> list[tuple[int, ...]]:
    """Of every tensor within, in order."""
    if isinstance(found, Tensor):
        return [tuple(found.shape)]
    if isinstance(found, list | tuple):
        return [shape for x in found for shape in shapes_of(x)]
    if is_dataclass(found):
        return [s for f in fields(found) for s in shapes_of(getattr(found, f.name))]
    inner = getattr(found, "__dict__", {})
    return [s for name in sorted(inner) for s in shapes_of(inner[name])]


def odd_rows() -> Tensor:
    """Ties within a part and across parts, and every kind of row that cannot be used."""
    generator = torch.Generator().manual_seed(9)
    rows = torch.randn(12, VOCAB, generator=generator)
    rows[1, [5, 6]] = 9.0
    rows[2, [24, 25, 96]] = 9.0  # the last of one part and the first of the next, of four
    rows[3, [48, 49]] = 9.0  # of two
    rows[4, 96] = 9.0
    rows[5, 60] = torch.nan
    rows[6, [70, 96]] = torch.nan
    rows[7, [3, 96]] = torch.inf
    rows[8] = -torch.inf
    rows[9, :50] = -torch.inf
    rows[10] = -torch.inf
    rows[10, 96] = -1e30
    rows[11, 2], rows[11, 80] = torch.inf, torch.nan
    return rows


def of_vocabulary(groups: Groups) -> dict[str, Any]:
    vocab, rows = VocabShards(VOCAB, groups.tp), odd_rows()
    local = rows[:, vocab.start : vocab.stop].contiguous()
    token_T = torch.tensor([0, 96, 24, 25, 48, 49, 50, 96])
    table = torch.randn(VOCAB, 6, generator=torch.Generator().manual_seed(2))
    embedding = Embedding(table[vocab.start : vocab.stop].clone(), vocab)
    return {
        "greedy": vocab.greedy(local),
        "expected greedy": greedy(rows),
        "no rows": vocab.greedy(local[:0])[0],
        "gathered": vocab.gather(local),
        "no rows gathered": vocab.gather(local[:0]),
        "embedded": embedding(token_T),
        "expected embedded": table[token_T],
        "no tokens": embedding(token_T[:0]),
    }


def compute(folder: Path, groups: Groups) -> dict[str, Any]:
    """Everything, on this rank. Drafters at both layouts, where there are two."""
    found: dict[str, Any] = {"vocabulary": of_vocabulary(groups)}
    models = {name: load(folder / name, groups) for name in FAMILIES}
    for name, model in models.items():
        found[name] = of_model(model)
    for name, target in DRAFTERS.items():
        whole = read_spec(locate(str(folder / target)).config)
        for size in sorted({1, groups.tp.size}):
            head = load_head(folder / name, models[target], whole, groups.for_draft(size))
            found[f"{name} at {size}"] = of_drafter(head, models[target])
    found["records"] = list(groups.tp.contract.records)
    return found


def two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    found = compute(folder, open_checked(rank, Layout(2), folder / "two"))
    if rank == 0:  # a group of one that talks to itself
        forced = open_checked(0, Layout(), folder / "forced", forces=True)
        found["forced"] = compute(folder, forced)
    return found


def four_ranks(rank: int, folder: Path) -> dict[str, Any]:
    return compute(folder, open_checked(rank, Layout(4), folder / "four"))
