"""Windows settle as if their tokens came one by one: accept, close, cut, count."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.rows import WindowRows
from paceline.kernels.verify import reference as verify
from paceline.kernels.verify.reference import (
    Limits,
    Settled,
    Verdicts,
    accept_sampled,
    residual_logits,
    settle,
)
from paceline.request import Done

Batch = tuple[Verdicts, WindowRows, Limits]
Case = tuple[Batch, tuple[list[int], Done, int, int]]


def ints(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def limits(*tables: Tensor) -> Limits:
    return Limits(*(table.numpy() for table in tables))


def one_window(
    tokens: list[int],
    drafts: list[int],
    *,
    length: int = 10,
    eos: int = -1,
    stop: int = -1,
    min_len: int = 0,
    max_len: int = 100,
    bad: tuple[int, ...] = (),
) -> Batch:
    flags = torch.zeros(len(tokens), dtype=torch.bool)
    flags[list(bad)] = True
    return (
        Verdicts(ints(*tokens), flags, None),
        WindowRows(
            ints(0),
            ints(0),
            ints(len(tokens)),
            ints(length),
            ints(drafts) if drafts else torch.empty((1, 0), dtype=torch.int32),
        ),
        limits(ints([eos, -1]), ints([-1, stop, -1]), ints(min_len), ints(max_len)),
    )


def emitted(settled: Settled) -> tuple[list[int], Done, int, int]:
    count = int(settled.count_B[0])
    assert (settled.token_BW[0, count:] == -1).all()
    return (
        settled.token_BW[0, :count].tolist(),
        Done(int(settled.done_B[0])),
        int(settled.num_drafts_B[0]),
        int(settled.num_accepted_B[0]),
    )


def test_done_codes_are_those_of_the_request() -> None:
    codes = (verify.DONE_EOS, verify.DONE_STOP_TOKEN, verify.DONE_LENGTH, verify.DONE_ERROR)
    assert codes == (Done.EOS, Done.STOP_TOKEN, Done.LENGTH, Done.ERROR)


CASES: dict[str, Case] = {
    "no drafts": (one_window([5], []), ([5], Done.RUNNING, 0, 0)),
    "all accepted": (one_window([5, 6, 7], [5, 6]), ([5, 6, 7], Done.RUNNING, 2, 2)),
    "first rejected": (one_window([9, 6, 7], [5, 6]), ([9], Done.RUNNING, 2, 0)),
    "second rejected": (one_window([5, 9, 7], [5, 6]), ([5, 9], Done.RUNNING, 2, 1)),
    "eos as a draft": (one_window([5, 6, 7], [5, 6], eos=5), ([5], Done.EOS, 2, 1)),
    "eos as the bonus": (one_window([5, 6, 7], [5, 6], eos=7), ([5, 6, 7], Done.EOS, 2, 2)),
    "eos after a rejection": (one_window([9, 6, 7], [5, 6], eos=6), ([9], Done.RUNNING, 2, 0)),
    "eos as the replacement": (one_window([9, 6], [5], eos=9), ([9], Done.EOS, 1, 0)),
    "stop token": (one_window([5, 6, 7], [5, 6], stop=6), ([5, 6], Done.STOP_TOKEN, 2, 2)),
    "eos before stop": (one_window([5], [], eos=5, stop=5), ([5], Done.EOS, 0, 0)),
    "length": (one_window([5, 6, 7], [5, 6], max_len=12), ([5, 6], Done.LENGTH, 2, 2)),
    "length at once": (one_window([5, 6], [5], max_len=11), ([5], Done.LENGTH, 1, 1)),
    "stop wins at the limit": (
        one_window([5, 6], [5], eos=6, max_len=12),
        ([5, 6], Done.EOS, 1, 1),
    ),
    "too short to stop": (
        one_window([5, 6, 7], [5, 6], eos=5, min_len=11),
        ([5, 6, 7], Done.RUNNING, 2, 2),
    ),
    "just long enough": (
        one_window([5, 6, 7], [5, 6], eos=6, min_len=11),
        ([5, 6], Done.EOS, 2, 2),
    ),
    "unusable at once": (one_window([5, 6], [5], bad=(0,)), ([5], Done.ERROR, 1, 0)),
    "unusable later": (one_window([5, 6, 7], [5, 6], bad=(1,)), ([5, 6], Done.ERROR, 2, 1)),
    "unusable behind a rejection": (one_window([9, 6], [5], bad=(1,)), ([9], Done.RUNNING, 1, 0)),
    "unusable beats eos": (one_window([5], [], eos=5, bad=(0,)), ([5], Done.ERROR, 0, 0)),
    "only padding": (one_window([3, 6, 7], [-1, -1]), ([3], Done.RUNNING, 0, 0)),
    "padding after a draft": (one_window([5, 4, 7], [5, -1]), ([5, 4], Done.RUNNING, 1, 1)),
    "narrow window": (one_window([5], [5, 6]), ([5], Done.RUNNING, 0, 0)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_window_settles(case: Case) -> None:
    arguments, expected = case
    assert emitted(settle(*arguments)) == expected


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    k, num_slots = draw(st.integers(0, 4)), 5
    slots = draw(st.lists(st.integers(0, num_slots - 1), min_size=0, max_size=6))
    widths = [draw(st.integers(0, k + 1)) for _ in slots]  # 0: samples nothing
    small = st.integers(0, 5)
    total = sum(widths)
    rows = st.lists(small, min_size=total, max_size=total)

    def table(width: int) -> Tensor:
        entry = st.lists(st.integers(-1, 5), min_size=width, max_size=width)
        return ints(*[draw(entry) for _ in range(num_slots)])

    drafts = [draw(st.lists(st.integers(-1, 5), min_size=k, max_size=k)) for _ in slots]
    ok = torch.tensor(draw(st.lists(st.booleans(), min_size=total, max_size=total))).bool()
    starts = torch.tensor([sum(widths[:i]) for i in range(len(slots))], dtype=torch.int32)
    return (
        Verdicts(
            torch.tensor(draw(rows), dtype=torch.int32),
            torch.tensor([v == 0 for v in draw(rows)]).bool(),
            ok if draw(st.booleans()) else None,
        ),
        WindowRows(
            torch.tensor(slots, dtype=torch.int32),
            starts,
            torch.tensor(widths, dtype=torch.int32),
            torch.tensor([draw(st.integers(1, 9)) for _ in slots], dtype=torch.int32),
            torch.tensor(drafts, dtype=torch.int32).reshape(len(slots), k),
        ),
        limits(
            table(2),
            table(3),
            ints(*[draw(st.integers(0, 12)) for _ in range(num_slots)]),
            ints(*[draw(st.integers(10, 16)) for _ in range(num_slots)]),
        ),
    )


def settle_one_by_one(verdicts: Verdicts, windows: WindowRows, limits: Limits, b: int) -> object:
    """Plain Python: one token, one decision, and so on."""
    slot, length = int(windows.slot_B[b]), int(windows.length_B[b])
    start, width = int(windows.first_B[b]), int(windows.width_B[b])
    drafts = windows.draft_BK[b].tolist()
    tokens: list[int] = []
    accepted = 0
    for j in range(width):
        token, bad = int(verdicts.token_N[start + j]), bool(verdicts.bad_N[start + j])
        draft = drafts[j] if j < width - 1 else -1
        ok = token == draft if verdicts.ok_N is None else bool(verdicts.ok_N[start + j])
        goes_on = ok and draft >= 0 and not bad
        tokens.append(draft if goes_on else token)
        accepted += goes_on
        may_stop = length + j >= int(limits.min_len_S[slot])
        if not goes_on and bad:
            return tokens, Done.ERROR, accepted
        if may_stop and tokens[-1] in limits.eos_SE[slot].tolist():
            return tokens, Done.EOS, accepted
        if may_stop and tokens[-1] in limits.stop_SE[slot].tolist():
            return tokens, Done.STOP_TOKEN, accepted
        if length + j + 1 >= int(limits.max_len_S[slot]):
            return tokens, Done.LENGTH, accepted
        if not goes_on:
            break
    return tokens, Done.RUNNING, accepted


@settings(max_examples=150, deadline=None)
@given(batches())
def test_batches_settle_like_tokens_one_by_one(batch: Batch) -> None:
    settled = settle(*batch)
    for b in range(len(settled.count_B)):
        row = Settled(*(t[b : b + 1] for t in settled))
        tokens, done, _, accepted = emitted(row)
        assert (tokens, done, accepted) == settle_one_by_one(*batch, b)


@pytest.mark.trap("E15")
def test_results_are_int32() -> None:
    settled = settle(*one_window([5, 6], [5]))
    assert {array.dtype for array in settled} == {np.dtype(np.int32)}


def test_residual_is_what_p_has_over_q() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]])
    q = torch.tensor([[0.2, 0.7, 0.1]])
    assert torch.allclose(residual_logits(p, q).exp(), torch.tensor([[0.3, 0.0, 0.1]]))


def test_residual_of_equal_distributions_falls_back_to_p() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]])
    assert torch.allclose(residual_logits(p, p.clone()).exp(), p)


@pytest.mark.trap("E5")
@pytest.mark.parametrize("draft_vocab_size", [3, 7])
def test_draft_vocabulary_may_be_narrower_or_wider(draft_vocab_size: int) -> None:
    p = torch.full((2, 5), 0.2)
    q = torch.full((2, draft_vocab_size), 1 / draft_vocab_size)
    left = residual_logits(p, q).exp()
    expected = (p - torch.nn.functional.pad(q, (0, 9))[:, :5]).clamp(min=0)
    assert torch.allclose(left, expected)
    draft = ints(0, draft_vocab_size - 1)
    accepted = accept_sampled(p, q, draft, torch.tensor([0.59, 0.59]))
    assert accepted.tolist() == ([True, True] if draft_vocab_size == 3 else [True, False])


@pytest.mark.trap("E6")
def test_coin_decides_at_ratios_near_one_in_a_hundred_thousand() -> None:
    p = torch.tensor([[1e-5, 1 - 1e-5]])
    q = torch.tensor([[1.0, 0.0]])
    for unit, accepted in ((0.99e-5, True), (1.01e-5, False)):
        assert accept_sampled(p, q, ints(0), torch.tensor([unit])).tolist() == [accepted]
