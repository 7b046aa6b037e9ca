"""Cases of the kernels around a step: admission, the rows of drafters, n-gram proposals.

Drafters' rows are tried on what a whole step of kernels/triton_cases_step has left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from paceline.kernels.admit.reference import Admission, AdmitRecord, AdmitTensors, pack_admissions
from paceline.kernels.finish.reference import finish_step
from paceline.kernels.host_drafts.reference import LEAST, LENGTH, SLOT, TOKENS
from paceline.kernels.step_rows import BlockLayout, PaddedRows, Ring, SlotTensors
from tests.kernels.cases.pairs import Arguments, TritonCase
from tests.kernels.cases.sampling import moved
from tests.kernels.cases.step import (
    PAGE_SIZE,
    STORED_DRAFTS,
    VOCAB,
    Scene,
    batch_rows,
    mixed_scenes,
    state_outputs,
    tensors_of,
    unwritten,
)

Make = Callable[[torch.device, torch.dtype], Arguments]


def finished(scene: Scene, device: torch.device) -> tuple[Ring, SlotTensors, PaddedRows]:
    """The scene after its step."""
    cpu = torch.device("cpu")
    ring, state, padded = scene.begun(cpu)
    verdicts = scene.verdicts(padded, cpu)._replace(ok_N=None)
    finish_step(verdicts, padded.rows, state, ring)
    return moved(device, ring), moved(device, state), moved(device, padded)


def _shifted(scene: Callable[[], Scene]) -> Make:
    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        _, state, rows = finished(scene(), device)
        return rows, state, unwritten(device, rows.shape.tokens)

    return make


def _own(scene: Callable[[], Scene]) -> Make:
    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        made = scene()
        ring, state, rows = finished(made, device)
        batch = batch_rows(device, rows.shape.rows, made.num_draft_entries)
        last_B = unwritten(device, rows.shape.rows)
        return ring, made.layout, rows, state, batch, last_B, PAGE_SIZE

    return make


def _block(scene: Callable[[], Scene], layout: BlockLayout, width: int) -> Make:
    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        _, state, rows = finished(scene(), device)
        num_rows = rows.shape.rows
        batch = batch_rows(device, 2 * num_rows, rows.shape.tokens + num_rows * width)
        return rows, state, layout, width, batch, PAGE_SIZE

    return make


def _next(scene: Callable[[], Scene], j: int, *, is_shifted: bool) -> Make:
    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        made = scene()
        _, state, rows = finished(made, device)
        num_rows = rows.shape.rows
        generator = np.random.default_rng(made.seed)
        # One column of a chain's tokens, as argmax gives them; -1 where nothing was drafted.
        draft_BK = torch.from_numpy(generator.integers(-1, VOCAB, (num_rows, 2))).to(device)
        batch = batch_rows(device, num_rows, num_rows)
        return draft_BK[:, 1], j, rows, state, batch, PAGE_SIZE, is_shifted

    return make


def _store(scene: Callable[[], Scene], k: int, *, is_onehot: bool) -> Make:
    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        made = scene()
        _, state, rows = finished(made, device)
        generator = np.random.default_rng(made.seed)
        drafts = generator.integers(-1, VOCAB, (k, rows.shape.rows)).astype(np.int32)
        return torch.from_numpy(drafts).to(device).T, rows, state, is_onehot

    return make


def _publish(scene: Callable[[], Scene]) -> Make:
    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        ring, state, padded = finished(scene(), device)
        return ring, padded.rows, state

    return make


def _published(arguments: Arguments, _: None) -> list[torch.Tensor]:
    """Of the rows that the step has; those behind them are never read."""
    ring, rows, _ = arguments
    return [ring.draft_EBK[:, : len(rows.start_B)], ring.draft_stamp_E, ring.ticket_1]


def _host_drafts(scene: Callable[[], Scene], width: int) -> Make:
    """Continuations that begin up to four tokens ago: right, wrong somewhere, or used up."""

    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        made = scene()
        state = made.state(device)
        generator = np.random.default_rng(made.seed + width)
        tokens_SL, length_S = made.numbers["tokens_SL"], made.numbers["num_tokens_S"]
        record = np.full((len(made.slot_B), TOKENS + width), -1, np.int32)
        for words, slot in zip(record, made.slot_B, strict=True):
            length = int(length_S[slot])
            begin = length - int(generator.integers(0, min(5, length)))
            words[SLOT], words[LENGTH], words[LEAST] = slot, begin, generator.integers(1, 3)
            count = int(generator.integers(0, width + 1))
            words[TOKENS : TOKENS + count] = generator.integers(0, VOCAB, count)
            known = min(count, length - begin)
            words[TOKENS : TOKENS + known] = tokens_SL[slot, begin : begin + known]
            if count and generator.random() < 0.3:
                words[TOKENS + generator.integers(0, count)] = VOCAB
        return torch.from_numpy(record).to(device), state

    return make


def _draft_cases() -> Iterator[TritonCase]:
    for name, scene in mixed_scenes():
        for width in (1, 4, 2 * STORED_DRAFTS + 1):
            yield TritonCase(
                "take_host_drafts",
                f"{name}-{width}",
                _host_drafts(scene, width),
                lambda args, _: state_outputs(args[1]),
            )
    for name, scene in mixed_scenes():
        yield TritonCase("publish_drafts", name, _publish(scene), _published)
        yield TritonCase("shifted_tokens", name, _shifted(scene), lambda args, _: [args[2]])
        yield TritonCase(
            "own_rows", name, _own(scene), lambda args, _: [*tensors_of(args[4]), args[5]]
        )
        for layout in (BlockLayout(3, 7, 1), BlockLayout(5, 9, 0), BlockLayout(3, 7, -1)):
            for width in (layout.width, 0):
                yield TritonCase(
                    "block_rows",
                    f"{name}-{layout.first_output}-{width}",
                    _block(scene, layout, width),
                    lambda args, _: tensors_of(args[4]),
                )
        for j, is_shifted in ((1, True), (1, False), (3, True), (3, False)):
            yield TritonCase(
                "next_rows",
                f"{name}-{j}{'-shifted' if is_shifted else ''}",
                _next(scene, j, is_shifted=is_shifted),
                lambda args, _: tensors_of(args[4]),
            )
        for k, is_onehot in ((0, True), (3, False), (5, True)):
            yield TritonCase(
                "store_drafts",
                f"{name}-{k}",
                _store(scene, k, is_onehot=is_onehot),
                lambda args, _: state_outputs(args[2]),
            )
    kinds = ("chunk", "final", "verify", "done")
    long = _own(partial(Scene, 2, kinds, max_model_len=3000, seed=5))
    yield TritonCase("own_rows", "long", long, lambda args, _: [*tensors_of(args[4]), args[5]])


def _admit(lengths: tuple[int, ...], longest: int) -> Make:
    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        generator = np.random.default_rng(len(lengths))
        num_slots, num_fields, num_ids, num_pages = 7, 18, 42, -(-longest // PAGE_SIZE)
        tensors = AdmitTensors(
            unwritten(device, num_fields, num_slots),
            unwritten(device, num_slots, num_ids),
            unwritten(device, num_slots, longest),
            unwritten(device, num_slots, 3),
            unwritten(device, num_slots, num_pages),
        )

        def draw(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
            return generator.integers(-(2**31), 2**31 - 1, count).astype(np.int32)

        record_W = pack_admissions(
            AdmitRecord.of(tensors),
            [
                Admission(
                    slot,
                    draw(num_fields),
                    draw(num_ids),
                    draw(length),
                    draw(min(-(-length // PAGE_SIZE) + i % 2, num_pages)),
                )
                for i, (slot, length) in enumerate(
                    zip(generator.permutation(num_slots), lengths, strict=False)
                )
            ],
        )
        return torch.from_numpy(record_W).to(device), len(lengths), tensors

    return make


def _admit_case(name: str, lengths: tuple[int, ...], longest: int) -> TritonCase:
    return TritonCase(
        "admit",
        name,
        _admit(lengths, longest),
        lambda arguments, _: list(arguments[2]),
    )


def _ngram_case(name: str, longest: int, vocab: int, num_drafts: int) -> TritonCase:
    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        generator = np.random.default_rng(longest + vocab)
        num_rows = 3 if longest > 1000 else 14
        tokens_SL = generator.integers(0, vocab, (num_rows, longest), np.int32)
        length_S = generator.integers(1, longest + 1, num_rows).astype(np.int32)
        length_S[:3] = longest, max(longest - 1, 1), 0  # the last of them is padding
        if longest > 1000:
            # Only early in the row is there what stands at its end.
            tokens_SL[0, longest - 5 :] = tokens_SL[0, 40:45]
            tokens_SL[1, 7:] = vocab + np.arange(longest - 7)
        slot_B = generator.permutation(num_rows).astype(np.int32)
        numbers = (torch.from_numpy(a).to(device) for a in (tokens_SL, length_S, slot_B))
        return (*numbers, num_drafts, 2, 4)

    return TritonCase(
        "ngram_propose",
        name,
        make,
        lambda _, result: [result],
    )


def cases() -> Iterator[TritonCase]:
    yield from _draft_cases()
    yield _admit_case("one", (9,), 12)
    yield _admit_case("several", (5, 0, 40, 1), 44)
    yield _admit_case("long", (1300, 20, 2900), 3000)
    yield _admit_case("no admission", (), 12)
    yield _ngram_case("periods", 21, 2, 7)
    yield _ngram_case("words", 60, 5, 3)
    yield _ngram_case("short", 3, 2, 1)
    yield _ngram_case("blocks", 5000, 300, 5)
    yield _ngram_case("chunks", 40_000, 5000, 5)
