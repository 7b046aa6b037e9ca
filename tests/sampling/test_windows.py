"""Windows with unused logits rows between them, as CUDA has them, emit what packed ones do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.kernels.processors.reference import LateBits
from paceline.kernels.rows import WindowRows
from paceline.request import EngineRequest, SamplingParams
from paceline.sampling.params import slot_rows
from paceline.sampling.processors import features_of
from paceline.sampling.verify import SamplingMode, Synthetic
from paceline.state.slots import Slots
from tests.sampling.verifying import accept

CPU = torch.device("cpu")
VOCAB = 23
LONGEST = 40
EOS = 3
MAX_K = 3

FEATURES: list[dict[str, Any]] = [
    {"presence_penalty": 0.8, "frequency_penalty": -0.3, "repetition_penalty": 1.4},
    {"logit_bias": {1: 4.0, 5: -100.0}},
    {"bad_words": ((4,), (2, 6), (1, 2, 3))},
    {"allowed_token_ids": [1, 2, 5, 7, 11, 13]},
    {"min_tokens": 9, "stop_token_ids": [5, 6]},
    {"logprobs": 4},
    {"logprobs": 0, "repetition_penalty": 0.7, "min_tokens": 16, "bad_words": ((9, 9),)},
    {},
]


def request(generator: np.random.Generator, mode: SamplingMode, index: int) -> EngineRequest:
    params: dict[str, Any] = {"seed": int(generator.integers(0, 2**62))}
    if mode is not SamplingMode.GREEDY and generator.random() < 0.8:
        params["temperature"] = float(generator.choice([0.5, 1.0, 1.6]))
        params["top_k"] = int(generator.choice([0, 1, 5, 30]))
        params["top_p"] = float(generator.choice([0.3, 0.9, 1.0]))
        params["min_p"] = float(generator.choice([0.0, 0.15]))
    else:
        params["temperature"] = 0.0
    words: tuple[tuple[int, ...], ...] = ()
    if mode is SamplingMode.FULL:
        wanted = dict(FEATURES[index % len(FEATURES)])
        words = wanted.pop("bad_words", ())
        params |= wanted
    prompt = generator.integers(0, 9, int(generator.integers(1, 8))).tolist()
    return EngineRequest(
        uid=index,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        eos_token_ids=(EOS,),
        bad_word_ids=words,
    )


class State:
    """Slots in random states and one step over some of them, with windows of all widths."""

    def __init__(
        self, seed: int, mode: SamplingMode, k: int, *, samples_drafts: bool = False
    ) -> None:
        generator = np.random.default_rng(seed)
        count = 10
        self.k = k
        self.slots = Slots(
            count,
            LONGEST,
            MAX_K,
            VOCAB,
            CPU,
            draft_vocab_size=VOCAB + 2 if samples_drafts else 0,
        )
        slots = self.slots
        length = generator.integers(1, LONGEST - MAX_K - 1, count)
        for slot in range(count):
            asked = request(generator, mode, slot)
            prompt_len = len(asked.prompt_token_ids)
            length[slot] = max(length[slot], prompt_len)
            for name, value in slot_rows(asked, LONGEST, prompt_len, vocab_size=VOCAB).items():
                getattr(slots, name)[slot] = torch.as_tensor(value)
            slots.features_S[slot] = features_of(asked)
        slots.tokens_SL.copy_(torch.from_numpy(generator.integers(0, 9, slots.tokens_SL.shape)))
        slots.num_tokens_S[:count] = torch.from_numpy(length).int()
        # Some slots have no row, some rows do not sample, two are padding; slot 5 wants logprobs.
        order = generator.permutation(count)
        slot_B = np.concatenate(([5], order[order != 5][:7], [count, count]))
        width_B = np.append(generator.integers(0, k + 2, 8), [0, 0])
        width_B[0] = k + 1
        draft_BK = generator.integers(0, 9, (len(slot_B), k))
        draft_BK[np.arange(k) >= width_B[:, None] - 1] = -1
        if samples_drafts:
            assert slots.draft_probs_SKV is not None
            slots.draft_probs_SKV.copy_(
                torch.from_numpy(generator.dirichlet(np.ones(VOCAB + 2), (count + 1, MAX_K)))
            )
            slots.drafts_onehot_S[:count] = torch.from_numpy(generator.integers(0, 2, count)).int()
        self._windows = WindowRows(
            _ints(slot_B),
            _ints(np.arange(len(slot_B)) * (k + 1)),
            _ints(width_B),
            slots.num_tokens_S[torch.from_numpy(slot_B)],
            _ints(draft_BK),
        )
        shape = (len(slot_B) * (k + 1), VOCAB)
        self.logits_NV = torch.from_numpy(generator.normal(0, 2, shape)).float()
        masks = (len(slot_B), k + 1, 1)
        bits_RWX = torch.from_numpy(generator.integers(-(2**31), 2**31, masks)).int()
        self.late = LateBits(_ints(np.arange(len(slot_B))), bits_RWX)

    @property
    def windows(self) -> WindowRows:
        """At fixed shapes: unused logits rows lie between the windows, as CUDA has them."""
        return self._windows

    def packed(self) -> tuple[Tensor, WindowRows, Tensor]:
        """The same windows without gaps, of the rows that sample alone; and their late masks."""
        windows, samples_B = self._windows, self._windows.width_B > 0
        row_M = windows.logit_rows.row_M
        parts = (windows.slot_B, windows.width_B, windows.draft_BK, windows.length_B)
        packed = WindowRows.packed(*(t[samples_B] for t in parts))
        return self.logits_NV[row_M], packed, samples_B


def _ints(values: Any) -> Tensor:
    return torch.from_numpy(np.asarray(values)).int()


def assert_same(state: State, mode: SamplingMode, **more: Any) -> None:
    """Padded windows emit what packed ones do."""
    padded = accept(state.logits_NV, state.windows, state.slots, mode=mode, **more)
    logits_NV, windows, samples_B = state.packed()
    if "late" in more:
        late = more.pop("late")
        more["late"] = LateBits(late.index_B[samples_B], late.bits_RWX)
    packed = accept(logits_NV, windows, state.slots, mode=mode, **more)
    for name in ("count_B", "token_BW", "done_B", "num_drafts_B", "num_accepted_B"):
        assert torch.equal(getattr(padded, name)[samples_B], getattr(packed, name)), name
        assert (getattr(padded, name)[~samples_B] == (-1 if name == "token_BW" else 0)).all(), name
    for row, count in enumerate(packed.count_B.tolist()):
        at = samples_B.nonzero()[row, 0]
        for name in ("ids_BWT", "values_BWT", "rank_BW"):
            mine, theirs = getattr(padded, name)[at, :count], getattr(packed, name)[row, :count]
            assert torch.equal(mine, theirs), name


MODES = pytest.mark.parametrize("mode", list(SamplingMode))


@pytest.mark.parametrize("k", [0, 1, MAX_K])
@MODES
@pytest.mark.parametrize("seed", range(6))
def test_gaps_between_windows_change_no_token(seed: int, mode: SamplingMode, k: int) -> None:
    assert_same(State(seed, mode, k), mode)


@pytest.mark.parametrize("seed", range(12))
def test_sampled_drafts_are_judged_alike(seed: int) -> None:
    assert_same(State(seed, SamplingMode.FULL, MAX_K, samples_drafts=True), SamplingMode.FULL)


@MODES
def test_broken_rows_end_the_same_requests(mode: SamplingMode) -> None:
    for seed in range(4):
        state = State(seed, mode, 2, samples_drafts=mode is SamplingMode.FULL)
        state.logits_NV[::4, 1] = torch.nan
        state.logits_NV[1::7] = -torch.inf
        assert_same(state, mode)


@pytest.mark.parametrize("seed", range(4))
def test_late_masks_bind_wherever_the_window_lies(seed: int) -> None:
    state = State(seed, SamplingMode.FULL, 2)
    assert_same(state, SamplingMode.FULL, late=state.late)


@MODES
@pytest.mark.parametrize("seed", range(4))
def test_synthetic_acceptance_takes_the_same_drafts(seed: int, mode: SamplingMode) -> None:
    assert_same(State(seed, mode, MAX_K), mode, synthetic=Synthetic(torch.full((64, MAX_K), 0.7)))
