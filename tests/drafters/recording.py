"""Sees every draft that an engine makes, and what the sequence was when it was made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor

from paceline.engine.engine import Engine
from paceline.request import EngineRequest
from paceline.runner.compact_rows import CompactRows
from paceline.runner.padded_rows import PaddedBuilder
from paceline.runner.platform_cuda import CudaPlatform
from paceline.runner.startup import build_on
from paceline.step import Runner
from tests.e2e.ladder import Workshop
from tests.e2e.loop import add_all, finish, listened_to, tiny_engine, tiny_engine_config
from tests.eagle import PlainHead, drafts_of

LLAMA_LIMIT = 256


class PlainDrafts:
    """What one head drafts by plain arithmetic, once for all tests that meet the same tokens."""

    _of: ClassVar[dict[int, tuple[PlainHead, PlainDrafts]]] = {}  # by id, with whose id it is

    def __init__(self, head: PlainHead) -> None:
        self._head = head
        self._known: dict[tuple[int, ...], tuple[list[int], Iterator[int]]] = {}

    @classmethod
    def of(cls, head: PlainHead) -> PlainDrafts:
        return cls._of.setdefault(id(head), (head, cls(head)))[1]

    def first(
        self, k: int, tokens: list[int], features: Callable[[list[int]], Tensor]
    ) -> list[int]:
        """K drafts; `features` are the target's of the tokens."""
        if tuple(tokens) not in self._known:
            self._known[tuple(tokens)] = [], drafts_of(self._head, features(tokens), tokens)
        drafts, more = self._known[tuple(tokens)]
        drafts += islice(more, max(k - len(drafts), 0))
        return drafts[:k]


@dataclass
class Drafted:
    """One row of one step: committed tokens, the row's K, and the slot's drafts after it."""

    tokens: list[int]
    k: int
    drafts: list[int]


@dataclass
class Recording:
    """An engine whose drafts are written down."""

    engine: Engine
    runner: Runner
    published: dict[int, list[int]]
    seen: list[Drafted] = field(default_factory=list)
    prompts: dict[int, list[int]] = field(default_factory=dict)

    def run(
        self, requests: Sequence[EngineRequest], grammars: dict[int, Any] | None = None
    ) -> None:
        """`grammars`: by request."""
        self.prompts |= {r.uid: list(r.prompt_token_ids) for r in requests}
        add_all(self.engine, requests, grammars or {})
        finish(self.engine)

    def sequences(self) -> list[list[int]]:
        return [[*prompt, *self.published[uid]] for uid, prompt in self.prompts.items()]

    def check(self, target: Any, head: PlainHead, limit: int = LLAMA_LIMIT) -> None:
        """Every draft is what the plain arithmetic makes of the committed tokens, and no other."""
        known = {tuple(s): head.features(target, s) for s in self.sequences()}
        plain = PlainDrafts.of(head)

        def features(tokens: list[int]) -> Tensor:
            return next(f for s, f in known.items() if list(s[: len(tokens)]) == tokens)

        self.compare(lambda tokens, k: plain.first(k, tokens, features), limit)

    def compare(self, drafts: Callable[[list[int], int], list[int]], limit: int) -> None:
        """`drafts(tokens, k)` are those that should have been made."""
        assert self.seen
        for row in self.seen:
            count = min(row.k, limit - len(row.tokens))
            wanted = drafts(row.tokens, count) + [-1] * (len(row.drafts) - count)
            assert row.drafts == wanted, f"after {len(row.tokens)} tokens, K = {row.k}"


@contextmanager
def recorded(
    workshop: Workshop, spec: dict[str, Any], *, is_fixed: bool = False, **options: Any
) -> Iterator[Recording]:
    """An engine on the tiny llama; closed, and no longer listened to, at the end.

    `is_fixed`: with the fixed-shape steps of a GPU, on CPU tensors.
    """
    if is_fixed:
        config = tiny_engine_config(workshop, spec, **options)
        platform = CudaPlatform(torch.device("cpu"))
        built: Runner = build_on(platform, config, lambda name, share: None)
        engine, published = listened_to(built, config)
        recording = Recording(engine, built, published)
    else:
        recording = Recording(*tiny_engine(workshop, spec, **options))
    kind: Any = PaddedBuilder if is_fixed else CompactRows
    store = kind.store

    def listening(step: Any, draft_BK: Tensor, *, is_onehot: bool) -> None:
        store(step, draft_BK, is_onehot=is_onehot)
        slots, slot_B = step.slots, step.slot_B
        if is_fixed:
            goes_on_B = (step.rows.windows.width_B > 0) & (slots.done_S[slot_B.long()] == 0)
            slot_B = slot_B[goes_on_B]
        ks = [step.k] * len(slot_B) if is_fixed else step.k_D.tolist()
        for slot, k in zip(slot_B.tolist(), ks, strict=True):
            tokens = slots.tokens_SL[slot, : int(slots.num_tokens_S[slot])].tolist()
            recording.seen.append(Drafted(tokens, k, slots.drafts_SK[slot].tolist()))

    with patch.object(kind, "store", listening):
        try:
            yield recording
        finally:
            recording.runner.close()
