"""Cases of argmax, draws, drafts with their q, and rejection: every knob, broken rows, ties.

`Scene` builds logits and the slots they meet; the processors' cases build on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.rows import WindowRows
from paceline.kernels.sampling.reference import SlotKnobs, distributions
from paceline.kernels.verify.reference import Limits, SampledDrafts, Verdicts, settle
from tests.kernels.cases.pairs import FLOATS, Arguments, TritonCase

OFF = {"top_k": 0.0, "top_p": 0.0, "min_p": 0.0}


@dataclass(frozen=True)
class Scene:
    """Logits of every window position, and slots with random knobs. The same seed, the same scene.

    `filters` are the chances that a slot limits its tokens by each knob.
    """

    vocab: int
    batch: int = 4
    k: int = 0
    seed: int = 0
    spread: float = 2.0  # of the logits
    step: float = 0.0  # logits are multiples of it: ties
    allowed: int = 0  # > 0: how many tokens of a row are possible
    has_broken: bool = False
    is_unlike_its_sample: bool = False
    greedy: float = 0.2
    filters: dict[str, float] | None = None

    @property
    def num_slots(self) -> int:
        return self.batch + 2

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def logits(self, dtype: torch.dtype) -> Tensor:
        generator = self.generator()
        rows = self.batch * (self.k + 1)
        logits = torch.randn(rows, self.vocab, generator=generator) * self.spread
        if self.step:
            logits = (logits / self.step).round() * self.step
        if self.allowed:
            order = torch.rand(rows, self.vocab, generator=generator).argsort(1)
            logits = logits.masked_fill(order >= self.allowed, -torch.inf)
        if self.has_broken:
            logits[0, self.vocab // 2] = torch.nan
            logits[1 % rows] = -torch.inf
            logits[2 % rows, -1] = torch.inf
        if self.is_unlike_its_sample:
            place_V = torch.arange(self.vocab)
            logits[:, place_V % (self.vocab // 32) < 32] = -20.0
        return logits.to(dtype)

    def rows(self) -> WindowRows:
        generator, width = self.generator(), self.k + 1

        def ints(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

        width_B = ints(0, width + 1, self.batch)
        width_B[0] = width
        return WindowRows(
            slot_B=torch.randperm(self.num_slots, generator=generator)[: self.batch].int(),
            first_B=torch.arange(self.batch, dtype=torch.int32) * width,
            width_B=width_B,
            length_B=ints(1, 30, self.batch),
            draft_BK=ints(-1, self.vocab, self.batch, self.k),
        )

    def knobs(self) -> SlotKnobs:
        generator = self.generator()

        def unit() -> Tensor:
            return torch.rand(self.num_slots, generator=generator)

        chance = self.filters or {"top_k": 0.5, "top_p": 0.7, "min_p": 0.3}
        most = max(2, self.vocab // 2)
        top_k = 1 + (unit() * most).int()
        seed_S2 = torch.randint(-(2**31), 2**31, (self.num_slots, 2), generator=generator)
        return SlotKnobs(
            temperature_S=torch.where(unit() < self.greedy, 0.0, 0.3 + unit()),
            top_k_S=torch.where(unit() < chance["top_k"], top_k, 0).int(),
            top_p_S=torch.where(unit() < chance["top_p"], 0.2 + 0.79 * unit(), 1.0),
            min_p_S=torch.where(unit() < chance["min_p"], 0.2 * unit(), 0.0),
            seed_S2=seed_S2.int(),
        )

    def drafts(self, width: int, *, likeness: float) -> SampledDrafts:
        """q of each slot's drafts: this share of p. With 1 all are accepted."""
        generator = self.generator()
        prob_SKV = torch.rand(self.num_slots, max(self.k, 1), width, generator=generator).pow(4)
        prob_SKV /= prob_SKV.sum(-1, keepdim=True)
        rows = self.rows()
        if likeness:
            slot_N = rows.slot_B.long().repeat_interleave(self.k + 1)
            p_NV = distributions(self.logits(torch.float32), self.knobs().at(slot_N))
            p_BWV = p_NV.view(self.batch, self.k + 1, -1)
            q_BKV = prob_SKV[rows.slot_B.long()]
            q_BKV += (p_BWV[:, : max(self.k, 1)] - q_BKV) * likeness
            prob_SKV[rows.slot_B.long()] = q_BKV
        onehot_S = (torch.arange(self.num_slots) % 4 == 3).int()
        return SampledDrafts(onehot_S, prob_SKV)


def on(device: torch.device, *values: Any) -> Arguments:
    """Tensors, and tuples and dataclasses of tensors, moved."""
    return tuple(moved(device, value) for value in values)


def moved(device: torch.device, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return type(value)(*(moved(device, v) for v in value))
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: moved(device, getattr(value, f.name)) for f in fields(value)}
        return replace(value, **parts)
    return value


def both(_: Arguments, result: Any) -> list[Tensor]:
    return list(result)


def usable(_: Arguments, result: Any) -> list[Tensor]:
    """Tokens of broken rows are any valid ids."""
    token_N, bad_N = result
    return [token_N.masked_fill(bad_N, 0), bad_N]


def usable_in_windows(arguments: Arguments, result: Any) -> list[Tensor]:
    """The same, of the logits rows that a window has."""
    row_M = arguments[1].on_cpu().logit_rows.row_M
    return usable(arguments, tuple(value_N.cpu()[row_M] for value_N in result))


def emitted(arguments: Arguments, result: Any) -> list[Tensor]:
    """What the windows come to with these verdicts: later ones may differ unseen."""
    verdicts, windows = Verdicts(*(t.cpu() for t in result)), arguments[1].on_cpu()
    none_SE = np.full((len(windows.slot_B) + 2, 1), -1, np.int32)
    far_S = np.full(len(none_SE), 2**30, np.int32)
    settled = settle(verdicts, windows, Limits(none_SE, none_SE, np.zeros_like(far_S), far_S))
    is_broken_B1 = settled.done_B[:, None] != 0
    last_BW = np.arange(windows.width) == settled.count_B[:, None] - 1
    # The token of a broken row is any valid id.
    token_BW = np.where(is_broken_B1 & last_BW, 0, settled.token_BW)
    return [torch.from_numpy(a) for a in (token_BW, *settled[1:])]


def cases() -> Iterator[TritonCase]:
    yield from greedy_cases()
    yield from draw_cases()
    yield from draft_cases()
    yield from judge_cases()


def greedy_cases() -> Iterator[TritonCase]:
    scenes = {
        "tiny": Scene(7, batch=5, step=1.0, has_broken=True),
        "odd": Scene(97, batch=5, step=0.5, has_broken=True),
        "several_chunks": Scene(9000, batch=5, step=0.25, has_broken=True),
        "large": Scene(128256, batch=64, step=0.25, has_broken=True),
        "one_large_row": Scene(128256, batch=1, step=0.25),
    }
    for name, scene in scenes.items():

        def make(device: torch.device, dtype: torch.dtype, scene: Scene = scene) -> Arguments:
            return on(device, scene.logits(dtype))

        yield TritonCase(
            *("greedy", name),
            make=make,
            outputs=usable,
            dtypes=FLOATS,
            is_large=scene.vocab > 10000,
        )

    def strided(device: torch.device, dtype: torch.dtype) -> Arguments:
        return on(device, Scene(1000, batch=4).logits(dtype)[:, :963])

    yield TritonCase(
        *("greedy", "padded_rows"),
        make=strided,
        outputs=usable,
        dtypes=FLOATS,
    )


def draw_scenes() -> Iterator[tuple[str, Scene]]:
    yield "unlimited", Scene(1000, filters=OFF)
    yield "top_k", Scene(97, k=2, filters=OFF | {"top_k": 1.0}, seed=1)
    yield "top_p", Scene(97, k=2, filters=OFF | {"top_p": 1.0}, seed=2)
    yield "min_p", Scene(97, k=3, filters=OFF | {"min_p": 1.0}, seed=3)
    yield "tiny", Scene(7, seed=4)
    yield "mixed", Scene(1000, batch=6, seed=5)
    yield "windows", Scene(97, batch=3, k=3, seed=6)
    yield "ties", Scene(1000, step=0.5, filters=dict.fromkeys(OFF, 0.6), seed=7)
    yield "all_tie", Scene(97, spread=0.0, filters=dict.fromkeys(OFF, 0.6), seed=8)
    yield "broken", Scene(97, batch=5, has_broken=True, greedy=0.0, seed=9)
    yield "few_allowed", Scene(1000, allowed=5, filters=dict.fromkeys(OFF, 0.8), seed=10)
    yield "chunks", Scene(5000, batch=3, greedy=0.0, filters=dict.fromkeys(OFF, 0.7), seed=11)
    peaked = Scene(5000, batch=2, spread=9.0, greedy=0.0, seed=12)
    yield "chunks_peaked", peaked
    yield "chunks_that_tie", replace(peaked, spread=0.3, step=1.0)
    yield "chunks_nearly_equal", replace(peaked, spread=1e-6, filters=OFF | {"top_p": 1.0})
    # The sample says nothing about where the cut is, so the row itself is walked.
    unlike = Scene(9000, batch=1, is_unlike_its_sample=True, greedy=0.0)
    yield "chunks_walked", replace(unlike, filters=OFF | {"top_p": 1.0, "top_k": 1.0})
    large = Scene(49152, batch=64, spread=0.7, seed=13)
    yield "large", large
    yield "large_windows", replace(large, vocab=128256, batch=16, k=3, seed=14)
    yield "large_peaked", replace(large, spread=6.0, seed=15)
    yield "large_few_allowed", replace(large, allowed=9, seed=16)
    yield "large_ties", replace(large, spread=0.2, step=0.125, seed=17)


def draw_cases() -> Iterator[TritonCase]:
    for name, scene in draw_scenes():

        def make(device: torch.device, dtype: torch.dtype, scene: Scene = scene) -> Arguments:
            return on(device, scene.logits(dtype), scene.rows(), scene.knobs())

        yield TritonCase(
            *("draw", name),
            make=make,
            outputs=usable_in_windows,
            # What half precision adds is in how it is read: one case each is enough here.
            dtypes=FLOATS if name == "mixed" or "large" in name else FLOATS[:1],
            is_large=scene.vocab > 10000,
        )


def draft_cases() -> Iterator[TritonCase]:
    scenes = {
        "unlimited": Scene(97, filters=OFF, seed=20),
        "mixed": Scene(97, seed=21),
        "broken": Scene(97, has_broken=True, greedy=0.0, seed=22),
        "chunks": Scene(5000, batch=2, greedy=0.0, seed=23),
        "large": Scene(49152, batch=16, spread=0.7, seed=24),
    }
    for name, scene in scenes.items():

        def make(device: torch.device, dtype: torch.dtype, scene: Scene = scene) -> Arguments:
            rows = scene.rows()
            prob_SKV = torch.zeros(scene.num_slots, 3, scene.vocab + 3)
            values = (scene.logits(dtype), rows.slot_B, rows.length_B, scene.knobs(), prob_SKV, 1)
            return on(device, *values)

        def outputs(arguments: Arguments, result: Any) -> list[Tensor]:
            # Written rows relative to their largest probability, so that small ones count.
            prob_SKV = arguments[4]
            return [result, prob_SKV / prob_SKV.amax(-1, keepdim=True).clamp(min=1e-30)]

        is_large = scene.vocab > 10000
        yield TritonCase(
            *("draft", name),
            make=make,
            outputs=_tokens_of_usable(outputs) if name == "broken" else outputs,
            dtypes=FLOATS if is_large else FLOATS[:1],
            scale=5.0,
            is_large=is_large,
        )


def _tokens_of_usable(
    outputs: Callable[[Arguments, Any], list[Tensor]],
) -> Callable[[Arguments, Any], list[Tensor]]:
    """Leave out rows 0 to 2, which are broken: their argmax is any id, and q says which."""

    def compared(arguments: Arguments, result: Any) -> list[Tensor]:
        token_B, prob_SKV = outputs(arguments, result)
        slot_B = arguments[1].long()
        certain = prob_SKV[slot_B[:3], 1].gather(1, token_B[:3, None].long())
        sums = prob_SKV[slot_B[:3]].sum(-1)
        prob_SKV = prob_SKV.clone()
        prob_SKV[slot_B[:3]] = 0.0
        return [token_B[3:], prob_SKV, certain, sums]

    return compared


def judge_cases() -> Iterator[TritonCase]:
    usual = Scene(97, batch=4, k=2, greedy=0.2, seed=30)
    large = Scene(49152, batch=16, k=3, spread=0.7, seed=34)
    many = Scene(97, batch=12, k=4, greedy=0.1, spread=0.7, seed=36)
    scenes: dict[str, tuple[Scene, int, float]] = {
        "alike": (many, 97, 0.6),
        "alike_in_chunks": (replace(many, vocab=4500, batch=3, seed=37), 4500, 0.7),
        "mixed": (usual, 97, 0.0),
        "no_drafts": (replace(usual, k=0), 97, 0.0),
        "same": (replace(usual, greedy=0.0, filters=OFF, seed=31), 97, 1.0),
        "narrow_drafts": (replace(usual, seed=32), 64, 0.0),
        "wide_drafts": (replace(usual, seed=33), 120, 0.0),
        "broken": (replace(usual, has_broken=True), 97, 0.0),
        "chunks": (Scene(5000, batch=2, k=1, greedy=0.0, seed=35), 5000, 0.0),
        "large": (large, 49152, 0.0),
    }
    for (name, (scene, width, likeness)), is_block in product(scenes.items(), (False, True)):

        def make(
            device: torch.device,
            dtype: torch.dtype,
            scene: Scene = scene,
            width: int = width,
            likeness: float = likeness,
            is_block: bool = is_block,
        ) -> Arguments:
            rows = scene.rows()
            rows = rows._replace(draft_BK=rows.draft_BK.clamp(max=width - 1))
            drafts = scene.drafts(width, likeness=likeness)
            if 0 < likeness < 1:  # drawn from q, so that some are accepted
                q_NV = drafts.prob_SKV[rows.slot_B.long()].flatten(0, 1)
                draft_N1 = q_NV.multinomial(1, generator=scene.generator())
                rows = rows._replace(draft_BK=draft_N1.view_as(rows.draft_BK).int())
            return on(device, scene.logits(dtype), rows, scene.knobs(), drafts, is_block)

        yield TritonCase(
            *("judge", f"block_{name}" if is_block else name),
            make=make,
            outputs=emitted,
            dtypes=FLOATS[:1],
            is_large=scene.vocab > 10000,
        )
