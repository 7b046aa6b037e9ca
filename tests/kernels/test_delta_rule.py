"""The gated delta rule: chunks are its tokens, and no history of drafts changes a result.

A replay of random steps stands beside one pass over the accepted tokens: windows of changing
length, accepted counts, prompt chunks, marks, dead rows, slots with a new owner.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.delta_rule.reference import (
    DeltaRows,
    DeltaSizes,
    DeltaState,
    DeltaWeights,
    delta_rule,
)
from paceline.kernels.table import operations
from paceline.state.recurrent import Recurrent
from tests.kernels.cases.delta_rule import Named, Row, arguments
from tests.kernels.delta_chunks import delta_rule_chunked
from tests.kernels.interpreted import run_interpreted
from tests.tiers import first_or_more

SIZES = DeltaSizes(1, 2, 16, 16)
NUM_SLOTS, NUM_SAVED = 3, 40
CPU = torch.device("cpu")
# Slot, first entry, query_len, start, committed, state_len, lengths and entries of marks.
PlannedRow = tuple[int, int, int, int, int, int, list[int], list[int]]
Apply = Callable[[Tensor, DeltaWeights, DeltaSizes, DeltaState, DeltaRows], Tensor]


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


@st.composite
def any_row(draw: st.DrawFn) -> Row:
    query_len = draw(st.sampled_from((0, 1, 2, 5, 8, 9, 63, 64, 65, 130, 200)))
    start = draw(st.integers(0, 150))
    drafts = draw(st.integers(0, min(3, max(query_len - 1, 0))))
    replayed = draw(st.integers(0, min(3, start)))
    end = start + query_len
    lengths = st.lists(st.integers(start - replayed, end + 2), max_size=3, unique=True)
    return Row(query_len, start, drafts, replayed, tuple(draw(lengths)))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(any_row(), min_size=2, max_size=4), st.sampled_from([(1, 2, 16, 16), (2, 2, 8, 24)])
)
def test_chunks_give_what_tokens_give(rows: list[Row], sizes: tuple[int, int, int, int]) -> None:
    make = arguments(Named("", rows, DeltaSizes(*sizes), max_k=3))
    one, other = make(CPU, torch.float32), make(CPU, torch.float32)
    assert_close(delta_rule_chunked(*one), delta_rule(*other))
    for x, y in zip(one[3], other[3], strict=True):
        assert_close(x, y)


def test_a_chunk_of_equal_keys_keeps_its_precision() -> None:
    """The inverse of the whole system by its powers would lose everything here."""
    named = Named("", [Row(256), Row(0)], DeltaSizes(1, 1, 16, 16))
    one, other = (arguments(named)(CPU, torch.float32) for _ in range(2))
    for input_TP, weights, sizes, *_ in (one, other):
        input_TP[:, : sizes.channels] = input_TP[0, : sizes.channels]
        input_TP[:, sizes.channels] = 4.0  # beta
        weights.decay_N.fill_(-1e-3)
    assert_close(delta_rule_chunked(*one), delta_rule(*other))


@dataclass
class Request:
    """A sequence whose tokens are all known here; a step is told of them as drafts."""

    input_LP: Tensor
    wanted_LV: Tensor  # of one pass over all of it, token by token
    states_LNVK: Tensor  # after each position
    num_prompt: int
    start: int = 0  # positions before it are known to be final
    state_len: int = 0
    marks: dict[int, int] = field(default_factory=dict)  # length: entry


class Story:
    """Random steps of a few slots."""

    def __init__(self, apply: Apply, seed: int, max_k: int) -> None:
        self.apply, self.max_k = apply, max_k
        self.random = random.Random(seed)
        self.torch_random = torch.Generator().manual_seed(seed)
        self.store = Recurrent(1, SIZES, NUM_SLOTS, max_k, NUM_SAVED, torch.float32, CPU)
        self.state = DeltaState(
            self.store.state_LSNVK[0],
            self.store.input_LSRP[0],
            self.store.saved_state_LENVK[0],
            self.store.saved_input_LEJP[0],
        )
        for tensor in self.state:  # nothing of it may be read before it is written
            tensor.fill_(float("nan"))
        self.weights = DeltaWeights(
            self._numbers(SIZES.channels, SIZES.conv_size) / 2,
            -self._numbers(2).exp() / 8,
            self._numbers(2),
        )
        self.requests = [self._new_request(slot) for slot in range(NUM_SLOTS)]
        self.num_checked = 0

    def _numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.torch_random)

    def _new_request(self, slot: int, prefix: Request | None = None) -> Request:
        """`prefix`: one that it shares a marked beginning with, from whose snapshot it goes on."""
        length = self.random.randint(4, 90)
        input_LP = self._numbers(length, SIZES.width)
        known, entry = 0, -1
        marks = [x for x in prefix.marks if x <= prefix.state_len] if prefix else []
        if prefix and marks:
            known = self.random.choice(marks)
            entry = prefix.marks[known]
            input_LP = torch.cat((prefix.input_LP[:known], input_LP))
        state = self.state._replace(
            state_SNVK=torch.zeros_like(self.state.state_SNVK[:1]),
            input_SRP=torch.zeros_like(self.state.input_SRP[:1]),
        )
        wanted, states = [], []
        for position in range(len(input_LP)):
            rows = self._rows([(0, 0, 1, position, 1, position, [-1], [0])], 1)
            wanted.append(
                delta_rule(input_LP[position : position + 1], self.weights, SIZES, state, rows)
            )
            states.append(state.state_SNVK[0].clone())
        if known:
            self.store.restore(slot, entry, known)
        num_prompt = self.random.randint(known + 1, len(input_LP) - 1)
        return Request(input_LP, torch.cat(wanted), torch.stack(states), num_prompt, known, known)

    def _rows(self, rows: list[PlannedRow], most: int) -> DeltaRows:
        columns = (torch.tensor(x, dtype=torch.int32) for x in zip(*rows, strict=True))
        return DeltaRows._make((*columns, most))

    def step(self, turn: int) -> None:
        slots = self.random.sample(range(NUM_SLOTS), self.random.randint(1, NUM_SLOTS))
        is_decode = self.random.random() < 0.5
        rows: list[PlannedRow] = []
        parts: list[Tensor] = []
        accepted: dict[int, int] = {}
        first = 0
        width = self.random.randint(0, self.max_k) + 1
        for slot in slots:
            request = self.requests[slot]
            left = len(request.input_LP) - request.start
            if request.start < request.num_prompt:
                final = self.random.randint(1, request.num_prompt - request.start)
                final, drafts = (min(final, width) if is_decode else final), 0
            else:
                final, drafts = 1, self.random.randint(0, min(width, left) - 1)
            accepted[slot] = self.random.randint(0, drafts)
            own_QP = self._numbers(final + drafts, SIZES.width)
            num_true = final + accepted[slot]
            own_QP[:num_true] = request.input_LP[request.start : request.start + num_true]
            # A mark may be passed now, by a later replay, or never.
            length = request.start + self.random.randint(0, final + drafts)
            entry = self.random.randrange(NUM_SAVED)
            query_len = final + drafts
            row = (slot, first, query_len, request.start, final, request.state_len)
            rows.append((*row, [length, -1], [entry, 0]))
            if request.state_len < length <= request.start + final:
                for other in self.requests:
                    other.marks = {k: v for k, v in other.marks.items() if v != entry}
                request.marks[length] = entry
            span = width if is_decode else query_len + self.random.randint(0, 2)
            parts.append(torch.cat((own_QP, self._numbers(span - query_len, SIZES.width))))
            first += span
        rows += [(NUM_SLOTS, first, 0, 0, 0, 0, [-1, -1], [0, 0])] * 2
        parts.append(self._numbers(3, SIZES.width))
        longest = width if is_decode else max(len(x) for x in parts)
        out_TV = self.apply(
            torch.cat(parts), self.weights, SIZES, self.state, self._rows(rows, longest)
        )
        for slot, planned in zip(slots, rows, strict=False):
            self._check(self.requests[slot], slot, planned, out_TV, accepted[slot])
        assert (out_TV[first:] == 0).all()
        assert all(self.state[i][NUM_SLOTS].isnan().all() for i in (0, 1)), "the padding slot"

    def _check(
        self, request: Request, slot: int, row: PlannedRow, out_TV: Tensor, accepted: int
    ) -> None:
        _, first, _, start, final, _, _, _ = row
        count = final + accepted
        assert_close(out_TV[first : first + count], request.wanted_LV[start : start + count])
        request.start, request.state_len = start + count, start + final
        assert_close(self.state.state_SNVK[slot], request.states_LNVK[request.state_len - 1])
        for length, entry in request.marks.items():
            assert_close(self.state.saved_state_ENVK[entry], request.states_LNVK[length - 1])
        self.num_checked += count
        if request.start == len(request.input_LP) or self.random.random() < 0.02:  # or an abort
            prefix = self.random.choice([None, request])
            self.requests[slot] = self._new_request(slot, prefix)


def play(apply: Apply, seed: int, num_steps: int) -> None:
    story = Story(apply, seed, max_k=seed % 5)
    for turn in range(num_steps):
        story.step(turn)
    assert story.num_checked >= num_steps


@pytest.mark.parametrize("seed", first_or_more(range(10), lambda seed: seed < 3))
def test_any_history_of_drafts_equals_one_pass(seed: int) -> None:
    play(delta_rule, seed, 120)


@pytest.mark.parametrize("seed", first_or_more(range(5), lambda seed: seed < 2))
def test_any_history_in_chunks_equals_one_pass(seed: int) -> None:
    play(delta_rule_chunked, seed, 120)


@pytest.mark.parametrize("seed", first_or_more(range(5), lambda seed: seed < 2))
def test_any_history_on_vector_units_equals_one_pass(seed: int) -> None:
    pytest.importorskip("numba")
    play(operations()["delta_rule"].by("numba"), seed, 120)


def test_any_history_on_a_gpu_equals_one_pass() -> None:
    pytest.importorskip("triton")
    run_interpreted(f"{__name__}:play_interpreted")


def play_interpreted() -> None:
    for seed in (2, 3, 5):
        play(operations()["delta_rule"].by("triton"), seed, 15)


@pytest.mark.more
def test_both_kernels_of_chunks_are_right_each_alone() -> None:
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.delta_chunks:check_interpreted")
