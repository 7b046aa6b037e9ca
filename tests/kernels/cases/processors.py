"""Cases of the processors and of logprobs: every feature mixed, windows with and without drafts.

Slots without a feature lie between those that have it, and some rows belong to no slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.logprobs.reference import LogprobResults
from paceline.kernels.processors.reference import LateBits, Penalties, Stops
from paceline.kernels.rows import FeatureMask
from paceline.kernels.verify.reference import Verdicts
from tests.kernels.cases.pairs import FLOATS, Arguments, TritonCase
from tests.kernels.cases.sampling import Scene, on

BIT = 4
LONGEST = 40


@dataclass(frozen=True)
class Sequences(Scene):
    """A scene whose slots have a history, of few distinct tokens."""

    longest: int = LONGEST

    def mask(self) -> FeatureMask:
        features_S = torch.arange(self.num_slots, dtype=torch.int32) * 5
        features_S[self.rows().slot_B[0]] |= BIT
        return FeatureMask(features_S, BIT)

    def tokens(self) -> Tensor:
        shape = (self.num_slots, self.longest)
        few = torch.randint(0, min(self.vocab, 9), shape, generator=self.generator())
        some = torch.randint(0, self.vocab, shape, generator=self.generator())
        return torch.where(some % 3 == 0, some, few).int()

    def ids(self, count: int, *, unused: float = 0.4) -> Tensor:
        """[S, count] ids without repetition, -1 here and there."""
        generator = self.generator()
        order = torch.rand(self.num_slots, max(self.vocab, count), generator=generator).argsort(1)
        is_used = torch.rand(self.num_slots, count, generator=generator) >= unused
        ids_SE = order[:, :count].masked_fill(order[:, :count] >= self.vocab, -1)
        return torch.where(is_used, ids_SE, -1).int()


SCENES = {
    "tiny": Sequences(7, batch=4, k=0, seed=40),
    "windows": Sequences(97, batch=5, k=3, seed=41),
    "broken": Sequences(97, batch=4, k=1, has_broken=True, seed=42),
    "chunks": Sequences(5000, batch=3, k=1, seed=43),
    "large": Sequences(128256, batch=64, k=3, seed=44, longest=3000),
}


def logits_after(arguments: Arguments, _: Any) -> list[Tensor]:
    return [arguments[0]]


def cases() -> Iterator[TritonCase]:
    makers: dict[str, tuple[str, Callable[[Sequences], tuple[Any, ...]]]] = {
        "keep_allowed": ("processors", _allowed),
        "ban_early_stops": ("processors", _early),
        "add_bias": ("processors", _bias),
        "ban_bad_words": ("processors", _bad_words),
        "apply_penalties": ("processors", _penalties),
    }
    for function, (module, maker) in makers.items():
        for name, scene in SCENES.items():

            def make(
                device: torch.device,
                dtype: torch.dtype,
                scene: Sequences = scene,
                maker: Callable[[Sequences], tuple[Any, ...]] = maker,
            ) -> Arguments:
                rows = scene.rows()
                if scene.longest > LONGEST:  # a history of several blocks
                    rows = rows._replace(length_B=rows.length_B * 90)
                values = (scene.logits(dtype), rows, scene.mask(), *maker(scene))
                return on(device, *values)

            yield _case(function, name, module, make, logits_after, is_large=name == "large")
    yield from _late_cases()
    yield from _logprob_cases()


def _case(
    function: str,
    name: str,
    module: str,
    make: Callable[[torch.device, torch.dtype], Arguments],
    outputs: Callable[[Arguments, Any], list[Tensor]],
    **rest: Any,
) -> TritonCase:
    return TritonCase(
        operation=function,
        name=name,
        make=make,
        outputs=outputs,
        **rest,
    )


def _bits(scene: Scene, rows: int) -> Tensor:
    shape = (rows, (scene.vocab + 31) // 32)
    return torch.randint(-(2**31), 2**31, shape, generator=scene.generator()).int()


def _allowed(scene: Sequences) -> tuple[Any, ...]:
    return (_bits(scene, scene.num_slots),)


def _early(scene: Sequences) -> tuple[Any, ...]:
    min_len_S = torch.randint(1, 34, (scene.num_slots,), generator=scene.generator()).int()
    # Views of one table, as slots keep them.
    table_SE = scene.ids(7)
    return (Stops(min_len_S, table_SE[:, 1:3], table_SE[:, 2:]),)


def _bias(scene: Sequences) -> tuple[Any, ...]:
    ids_SE = scene.ids(20)
    return ids_SE, torch.randn(ids_SE.shape, generator=scene.generator())


def _bad_words(scene: Sequences) -> tuple[Any, ...]:
    """Words that the histories really end with, and others; also of one token."""
    tokens_SL, rows = scene.tokens(), scene.rows()
    length = 3
    words_SEC = torch.full((scene.num_slots, 6, length), -1, dtype=torch.int32)
    generator = scene.generator()
    words_SEC[:, 0] = torch.randint(0, scene.vocab, words_SEC[:, 0].shape, generator=generator)
    words_SEC[:, 1, -1] = scene.ids(1)[:, 0]
    committed = zip(rows.slot_B.tolist(), rows.length_B.tolist(), strict=True)
    for b, (slot, count) in enumerate(committed):
        history = torch.cat((tokens_SL[slot, : max(count, 2)], rows.draft_BK[b]))
        for entry, end in enumerate((count, count + 1, count + 2), start=2):
            prefix = history[max(end - 2, 0) : end][:2]
            words_SEC[slot, entry, 2 - len(prefix) : 2] = prefix
            words_SEC[slot, entry, 2] = entry
    return tokens_SL, words_SEC


def _penalties(scene: Sequences) -> tuple[Any, ...]:
    generator = scene.generator()
    prompt_len_S = torch.randint(0, 20, (scene.num_slots,), generator=generator).int()

    def some(scale: float, start: float) -> Tensor:
        return start + scale * torch.rand(scene.num_slots, generator=generator)

    return scene.tokens(), prompt_len_S, Penalties(some(1.0, 0.6), some(2.0, -1.0), some(0.5, -0.2))


def _late_cases() -> Iterator[TritonCase]:
    for name, scene in SCENES.items():

        def make(device: torch.device, dtype: torch.dtype, scene: Sequences = scene) -> Arguments:
            logits_NV, windows = scene.logits(dtype), scene.rows()
            bits_NX = _bits(scene, len(logits_NV))
            index_B = torch.arange(scene.batch, dtype=torch.int32) - 1
            late = LateBits(index_B, bits_NX.view(scene.batch, scene.k + 1, -1))
            return on(device, logits_NV, windows, late)

        function = "keep_late"
        yield _case(function, name, "processors", make, logits_after, is_large=name == "large")


def _logprob_cases() -> Iterator[TritonCase]:
    scenes = SCENES | {"ties": replace(SCENES["windows"], step=1.0)}
    scenes["forbidden"] = replace(SCENES["windows"], allowed=6)
    for name, scene in scenes.items():

        def make(
            device: torch.device, dtype: torch.dtype, scene: Sequences = scene, name: str = name
        ) -> Arguments:
            logits_NV, rows = scene.logits(dtype), scene.rows()
            size = (len(logits_NV),)
            token_N = torch.randint(0, scene.vocab, size, generator=scene.generator()).int()
            is_odd_N = torch.arange(len(logits_NV)) % 2 == 1
            ok_N = is_odd_N if name in ("windows", "large") else None
            draft_BK = rows.draft_BK.clamp(min=0)
            if ok_N is not None:  # a window's last position has no draft to accept
                ok_N = ok_N & (torch.arange(len(ok_N)) % (scene.k + 1) < scene.k)
            rows = rows._replace(draft_BK=draft_BK)
            verdicts = Verdicts(token_N, torch.zeros_like(is_odd_N), ok_N)
            # The part of a ring for more and wider rows that a step of this shape writes.
            shape = (3, scene.batch + 2, scene.k + 3, 6)
            num_top_S = torch.arange(scene.num_slots, dtype=torch.int32) % 6
            rings = (
                torch.full(shape, -7, dtype=torch.int32, device=device),
                torch.full(shape, -7.0, device=device),
                torch.full(shape[:3], -7, dtype=torch.int32, device=device),
            )
            ids, values, rank = (ring[:, : scene.batch, : scene.k + 1] for ring in rings)
            results = LogprobResults(ids, values, rank, torch.tensor([4], dtype=torch.int32))
            return on(device, logits_NV, verdicts, rows, scene.mask(), num_top_S, results)

        def outputs(arguments: Arguments, _: Any) -> list[Tensor]:
            return list(arguments[-1][:3])

        yield _case(
            *("write_logprobs", name, "logprobs", make, outputs),
            dtypes=FLOATS,
            is_large=name == "large",
        )
