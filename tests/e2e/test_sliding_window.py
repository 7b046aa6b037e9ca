"""A sliding window gives back pages while a request runs, and no row reads what it gave back."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, RequestOutput, SamplingParams
from paceline.drafters.base import DraftStep
from paceline.runner import startup
from paceline.runner.load_models import Found, kv_window
from paceline.step import RunnerInfo
from tests.e2e.ladder import PROMPTS
from tests.e2e.test_fixed_steps import padded_on_cpu
from tests.tiny import VOCAB, greedy_reference, save_tiny

WINDOW = 27
K = 7
OUTPUT = 150
# Longer than the window, and in chunks; enough at once that a free page is soon taken.
STARTS = [PROMPTS[i] for i in (0, 3, 5, 7, 1, 2, 4, 8)]


class Alternating:
    """Knows every sequence: all drafts are right in one step, and all wrong in the next."""

    max_k = K
    lookahead = 0
    is_probabilistic = False
    reads_features = False
    tap_ids = ()

    def __init__(self, sequences: list[list[int]]) -> None:
        self._sequences = sequences
        self._turns = count()

    def propose(self, step: DraftStep) -> None:
        is_right = next(self._turns) % 2
        drafts = [self._drafts(step, slot, is_right) for slot in step.slot_B.tolist()]
        drafts_BK = torch.tensor(drafts, dtype=torch.int32).view(-1, K)
        step.store(drafts_BK[:, : step.k], is_onehot=True)

    def _drafts(self, step: DraftStep, slot: int, is_right: int) -> list[int]:
        length = int(step.slots.num_tokens_S[slot])
        known = step.slots.tokens_SL[slot, :length].tolist()
        whole = next((s for s in self._sequences if s[:length] == known), [])
        right = [*whole[length : length + K], *[5] * K][:K]
        return right if is_right else [3 + (t - 2) % (VOCAB - 3) for t in right]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[int]]]:
    """A checkpoint with a window, and what it says without end."""
    folder = tmp_path_factory.mktemp("window")
    model = save_tiny(folder, "mixtral-window", seed=2, eos_token_id=None)
    return str(folder), [greedy_reference(model, p, OUTPUT) for p in STARTS]


def generate(folder: str, num_pages: int, **options: Any) -> list[RequestOutput]:
    defaults: dict[str, Any] = {
        "model": folder,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "num_gpu_blocks_override": num_pages,
        "cpu_threads": 1,
        "engine_in_process": True,
    }
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    with LLM(**{**defaults, **options}) as llm:
        asked = [{"prompt_token_ids": list(p)} for p in STARTS]
        return llm.generate(asked, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in outputs]


@pytest.mark.trap("B14")
@pytest.mark.parametrize("layout", ["varlen", "fixed"])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_pages_behind_the_window_go_by_committed_progress(
    made: tuple[str, list[list[int]]], run_ahead: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All drafts accepted, then none, in turn: a page that is freed on hope is soon overwritten."""
    folder, wanted = made
    drafter = Alternating([[*p, *o] for p, o in zip(STARTS, wanted, strict=True)])
    monkeypatch.setattr(startup, "make_drafter", lambda *_: drafter)
    if layout == "fixed":
        monkeypatch.setattr(startup, "CpuPlatform", padded_on_cpu)
    spec = {"method": "ngram", "num_speculative_tokens": K, "adaptive": False}
    # As few pages as there may be: one whole sequence has as many.
    outputs = generate(folder, 64, speculative_config=spec, run_ahead=run_ahead)
    assert tokens(outputs) == wanted
    for output in outputs:
        metrics = output.metrics
        assert 0.2 < metrics.num_accepted_tokens / metrics.num_draft_tokens < 0.8


def test_windows_take_less_than_whole_sequences_do(made: tuple[str, list[list[int]]]) -> None:
    folder, wanted = made
    outputs = generate(folder, 130, run_ahead=1)
    assert tokens(outputs) == wanted
    whole = sum(-(-(len(p) + OUTPUT) // 4) for p in STARTS)
    assert whole > 2 * 130, "nothing was proven"
    assert sum(o.metrics.num_preemptions for o in outputs) == 0


def test_a_prefix_is_found_again_though_its_first_pages_were_given_back(
    made: tuple[str, list[list[int]]],
) -> None:
    folder, wanted = made
    prompt = [*STARTS[2], *wanted[2][:100]]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    with LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_batched_tokens=64,
        block_size=4,
        cpu_threads=1,
        engine_in_process=True,
    ) as llm:
        for num_cached in (0, (len(prompt) - 1) // 4 * 4):
            output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
            assert list(output.outputs[0].token_ids) == wanted[2][100:120]
            assert output.metrics.num_cached_tokens == num_cached


def test_every_layer_of_the_table_counts_for_how_far_back_pages_are_kept(tmp_path: Path) -> None:
    from paceline.checkpoint.source import locate
    from paceline.models.families import read_spec

    def found(name: str, **changes: Any) -> Found:
        save_tiny(tmp_path / name, "mixtral-window", **changes)
        files = locate(str(tmp_path / name))
        return Found(files, read_spec(files.config))

    narrow, wide = found("narrow", sliding_window=10), found("wide", sliding_window=40)
    without = found("without", sliding_window=None)
    assert kv_window([narrow]) == 10
    # A draft model computes the last committed token but one again.
    assert kv_window([narrow, wide]) == 41
    assert kv_window([wide, narrow]) == 40
    assert kv_window([narrow, without]) is None
    assert kv_window([without, narrow]) is None
    assert RunnerInfo.__dataclass_fields__["kv_window"].default is None
