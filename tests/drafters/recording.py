"""Sees every draft that an engine makes, and what the sequence was when it was made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch import Tensor

from paceline.engine.engine import Engine
from paceline.request import EngineRequest
from paceline.runner.runner import CpuRunner
from paceline.runner.varlen_drafts import VarlenDraftStep
from tests.e2e.ladder import Workshop
from tests.e2e.loop import add_all, finish, tiny_engine
from tests.eagle import PlainEagle, features

LLAMA_LIMIT = 256


@dataclass
class Drafted:
    """One row of one step: committed tokens, the step's K, and the slot's drafts after it."""

    tokens: list[int]
    k: int
    drafts: list[int]


@dataclass
class Recording:
    """An engine whose drafts are written down."""

    engine: Engine
    runner: CpuRunner
    published: dict[int, list[int]]
    seen: list[Drafted] = field(default_factory=list)
    prompts: dict[int, list[int]] = field(default_factory=dict)

    def run(self, requests: Sequence[EngineRequest]) -> None:
        self.prompts |= {r.uid: list(r.prompt_token_ids) for r in requests}
        add_all(self.engine, requests)
        finish(self.engine)

    def sequences(self) -> list[list[int]]:
        return [[*prompt, *self.published[uid]] for uid, prompt in self.prompts.items()]

    def check(self, target: Any, head: PlainEagle, limit: int = LLAMA_LIMIT) -> None:
        """Every draft is what the plain arithmetic makes of the committed tokens, and no other."""
        known = {tuple(s): features(target, s) for s in self.sequences()}

        def drafts(tokens: list[int], k: int) -> list[int]:
            feature_ND = next(f for s, f in known.items() if list(s[: len(tokens)]) == tokens)
            return head.drafts(feature_ND, tokens, k)

        self.compare(drafts, limit)

    def compare(self, drafts: Callable[[list[int], int], list[int]], limit: int) -> None:
        """`drafts(tokens, k)` are those that should have been made."""
        assert self.seen
        for row in self.seen:
            count = min(row.k, limit - len(row.tokens))
            wanted = drafts(row.tokens, count) + [-1] * (len(row.drafts) - count)
            assert row.drafts == wanted, f"after {len(row.tokens)} tokens, K = {row.k}"


@contextmanager
def recorded(workshop: Workshop, spec: dict[str, Any], **options: Any) -> Iterator[Recording]:
    """An engine on the tiny llama; closed, and no longer listened to, at the end."""
    recording = Recording(*tiny_engine(workshop, spec, **options))
    store = VarlenDraftStep.store

    def listening(step: VarlenDraftStep, draft_BK: Tensor, *, is_onehot: bool) -> None:
        store(step, draft_BK, is_onehot=is_onehot)
        slots = step.slots
        for slot in step.slot_B.tolist():
            tokens = slots.tokens_SL[slot, : int(slots.num_tokens_S[slot])].tolist()
            recording.seen.append(Drafted(tokens, step.k, slots.drafts_SK[slot].tolist()))

    with patch.object(VarlenDraftStep, "store", listening):
        try:
            yield recording
        finally:
            recording.runner.close()
