"""Fixed-shape steps (what CUDA captures) on CPU tensors: the same tokens, feature by feature.

The kernels' torch references stand in for the GPU's; layouts, packets, the ring and the drafters'
passes are the ones that a GPU runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from paceline import SamplingParams
from paceline.config import EngineConfig
from paceline.parallel.placement import RankPlace
from paceline.runner import startup
from paceline.runner.captures import Captures
from paceline.runner.graphs import GraphKey, Part
from paceline.runner.platform_cuda import CudaPlatform
from paceline.runner.runner import StepRunner
from paceline.step import LateMasks, StepResult
from tests.e2e.engines import NGRAM, draft_model, eagle3, run, tokens
from tests.e2e.ladder import AXES, PROMPTS, Rung, Workshop, each_value, pairwise
from tests.e2e.loop import add_all, finish, request, tiny_engine
from tests.e2e.test_device_truth import Counting
from tests.e2e.test_ladder import check
from tests.tiers import first_or_more


def padded_on_cpu(config: EngineConfig, place: RankPlace) -> CudaPlatform:
    return CudaPlatform(torch.device("cpu"))


@pytest.fixture
def _fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every engine of this process runs fixed-shape steps."""
    monkeypatch.setattr(startup, "CpuPlatform", padded_on_cpu)


FIXED_AXES = {**AXES, "family": ("llama", "qwen2", "qwen3"), "k": (1, 3, 7)}
RUNGS = pairwise(FIXED_AXES)


@pytest.mark.usefixtures("_fixed")
@pytest.mark.parametrize("rung", first_or_more(RUNGS, each_value(RUNGS).__contains__), ids=str)
def test_greedy_tokens_equal_the_reference_with_fixed_shapes(
    rung: Rung, workshop: Workshop
) -> None:
    check(rung, workshop)


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.1, "top_p": 0.8, "top_k": 20, "seed": 4},
    {"temperature": 0.7, "min_p": 0.1, "seed": 5, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0.8, "seed": 6, "logit_bias": {5: 3.0, 9: -2.0}, "min_tokens": 12},
    {"temperature": 0.0, "logprobs": 4, "prompt_logprobs": 2},
    {"temperature": 0.6, "seed": 7, "allowed_token_ids": list(range(3, 60)), "logprobs": 1},
    {"temperature": 1.0, "seed": 8, "stop_token_ids": [11, 12, 13]},
]


@pytest.mark.parametrize(
    "drafter", ["none", "ngram", "draft_model", "sampled drafts", "reduced", "block", "coupled"]
)
def test_every_sampling_feature_gives_the_tokens_of_the_cpu_path(
    drafter: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: dict[str, dict[str, Any] | None] = {
        "none": None,
        "ngram": NGRAM,
        "draft_model": draft_model(workshop, 3),
        "sampled drafts": draft_model(workshop, 3, draft_sample_method="probabilistic"),
        "reduced": eagle3(workshop, 3, draft_sample_method="probabilistic"),
        "block": draft_model(
            workshop, 3, draft_sample_method="probabilistic", rejection_sample_method="block"
        ),
        "coupled": eagle3(workshop, 3, draft_sample_method="coupled"),
    }
    spec = specs[drafter]
    params = [SamplingParams(max_tokens=24, detokenize=False, **p) for p in PARAMS]
    prompts = PROMPTS[2 : 2 + len(params)]
    wanted = run(workshop, prompts, params, spec)
    monkeypatch.setattr(startup, "CpuPlatform", padded_on_cpu)
    found = run(workshop, prompts, params, spec)
    assert tokens(found) == tokens(wanted)
    for got, want in zip(found, wanted, strict=True):
        assert got.outputs[0].finish_reason == want.outputs[0].finish_reason
        assert_same_logprobs(got.outputs[0].logprobs, want.outputs[0].logprobs)
        assert_same_logprobs(got.prompt_logprobs, want.prompt_logprobs)


def test_a_step_may_open_several_pages_of_every_row(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of one token: a window of eight opens eight, in forty rows at once."""
    spec = {**NGRAM, "num_speculative_tokens": 7}
    options = {"block_size": 1, "max_num_seqs": 40, "max_num_batched_tokens": 400}
    prompts = [[*PROMPTS[11], 3 + i] for i in range(40)]
    params = SamplingParams(temperature=0, max_tokens=24, detokenize=False)
    wanted = run(workshop, prompts, params, spec, **options)
    monkeypatch.setattr(startup, "CpuPlatform", padded_on_cpu)
    assert tokens(run(workshop, prompts, params, spec, **options)) == tokens(wanted)


@pytest.mark.usefixtures("_fixed")
def test_a_long_answer_in_a_roomy_pool_asks_for_no_more_pages_than_a_step_can_bring(
    workshop: Workshop,
) -> None:
    """Pages are taken in advance where there are plenty; a packet has room for some."""
    params = SamplingParams(temperature=0, max_tokens=230, ignore_eos=True, detokenize=False)
    options = {"block_size": 1, "max_num_seqs": 2, "num_gpu_blocks_override": 2048}
    outputs = run(workshop, PROMPTS[:2], params, NGRAM, **options)
    assert [len(x[0]) for x in tokens(outputs)] == [230, 230]


class Operations(TorchDispatchMode):
    """Records every tensor operation: on a GPU each would be queued on the stream."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class TensorCalls(TorchFunctionMode):
    """Records every call on a tensor. `.cpu()`, `.tolist()` and `.item()` of a CPU tensor queue
    nothing, so `Operations` does not see them; on a GPU each waits for the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("_fixed")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model"])
def test_drafts_of_late_steps_come_through_the_ring_without_a_stream_copy(
    drafter: str, depth: int, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy would wait for the target's pass of the next step, which is queued before it."""
    wait, drafts = StepRunner.wait, []
    operations, calls = Operations(), TensorCalls()

    def watched(self: StepRunner, step: Any) -> StepResult:
        with operations, calls:
            result = wait(self, step)
        if step.plan.late_B is not None and step.plan.num_rows:
            slots = self._device.slots
            assert result.draft_BK is not None
            is_live_B = slots.done_S[step.plan.slot_B] == 0
            if depth == 0:  # else the next step may have taken them from the slots
                now_BK = slots.drafts_SK[step.plan.slot_B]
                assert result.draft_BK[is_live_B].tolist() == now_BK[is_live_B].tolist()
            drafts.extend(result.draft_BK[is_live_B].flatten().tolist())
        return result

    monkeypatch.setattr(StepRunner, "wait", watched)
    specs: dict[str, Any] = {"none": None, "ngram": NGRAM, "draft_model": draft_model(workshop, 3)}
    engine, runner, published = tiny_engine(workshop, specs[drafter], run_ahead=depth)
    constraints = {1: Counting(), 2: Counting()}
    requests = [request(i, p, ignore_eos=True) for i, p in enumerate(PROMPTS[:4])]
    add_all(engine, requests, dict(constraints.items()))
    finish(engine)
    runner.close()
    assert all(c.seen == published[uid] for uid, c in constraints.items())
    assert operations.names == calls.names == []
    assert any(draft >= 0 for draft in drafts) == (drafter != "none")


@pytest.mark.usefixtures("_fixed")
@pytest.mark.trap("I14")
@pytest.mark.parametrize("drafter", ["none", "draft_model"])
def test_late_steps_are_two_replays_and_their_masks_come_by_one_copy(
    drafter: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain rows beside late ones get the tokens that they get by themselves."""
    replay, bind = Captures.replay, StepRunner.bind
    parts: list[Part] = []
    copies: list[list[str]] = []

    def replayed(self: Captures, key: GraphKey) -> bool:
        parts.append(key.part)
        with _disable_current_modes():  # what a graph does is no call of the host
            return replay(self, key)

    def bound(self: StepRunner, step: Any, late: LateMasks) -> None:
        operations = Operations()
        with operations:
            bind(self, step, late)
        copies.append([name for name in operations.names if name not in VIEWS])
        assert step.forwarded is None
        steps: Any = self._captures
        assert steps.run.__self__._half is None, "what A has left is kept"

    monkeypatch.setattr(Captures, "replay", replayed)
    monkeypatch.setattr(StepRunner, "bind", bound)
    spec = draft_model(workshop, 3) if drafter == "draft_model" else None
    answers = []
    for constraints in ({}, {1: Counting(), 2: Counting()}):
        engine, runner, published = tiny_engine(workshop, spec, run_ahead=1)
        requests = [request(i, p, ignore_eos=True) for i, p in enumerate(PROMPTS[:4])]
        add_all(engine, requests, dict(constraints.items()))
        finish(engine)
        runner.close()
        assert all(c.seen == published[uid] for uid, c in constraints.items())
        answers.append(published)
    assert [answers[0][uid] for uid in (0, 3)] == [answers[1][uid] for uid in (0, 3)]
    late = [part for part in parts if part is not Part.WHOLE]
    assert late == [Part.A, Part.B] * len(copies)
    assert len(copies) > 10
    assert all(names == ["aten::copy_"] for names in copies), copies[:3]


VIEWS = {"aten::slice.Tensor", "aten::view", "aten::detach", "aten::alias"}


def assert_same_logprobs(got: Any, want: Any) -> None:
    assert (got is None) == (want is None)
    for one, other in zip(got or (), want or (), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert {k: v.rank for k, v in one.items()} == {k: v.rank for k, v in other.items()}
            values = [v.logprob for v in one.values()], [v.logprob for v in other.values()]
            assert values[0] == pytest.approx(values[1], abs=1e-4)
