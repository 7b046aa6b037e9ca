"""What the runner of fixed shapes does around its steps; its steps are tested by the ladders."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import CollectiveError
from paceline.parallel.contract import CollectiveLog, Contract
from paceline.runner.captures import Captures
from paceline.runner.runner import StepRunner
from paceline.runner.shapes import Buckets
from paceline.sampling.verify import SamplingMode


def bare_runner(**parts: Any) -> Any:
    """One that has nothing but what a test gives it."""
    runner = object.__new__(StepRunner)
    for name, value in parts.items():
        setattr(runner, name, value)
    return runner


def test_graphs_go_before_the_groups_whose_collectives_they_hold() -> None:
    """NCCL waits for them."""
    order: list[str] = []
    device = SimpleNamespace(
        slots=SimpleNamespace(device=torch.device("cpu")),
        groups=SimpleNamespace(close=lambda: order.append("groups")),
    )
    captures = SimpleNamespace(close=lambda: order.append("graphs"))
    stream = SimpleNamespace(close=lambda: order.append("stream"))
    bare_runner(_device=device, _captures=captures, _stream=stream).close()
    assert order == ["stream", "graphs", "groups"]


def test_a_step_that_waits_on_the_device_for_another_rank_has_a_deadline(tmp_path: Path) -> None:
    """Collectives in a graph are announced when it is captured, which may be long ago."""
    contracts = [
        Contract(rank, CollectiveLog(str(tmp_path / "collectives"), 2), timeout_s=1.5)
        for rank in range(2)
    ]
    for contract in contracts:
        contract.step, contract.phase = 1, "draft 2"
        contract.enter("tp", [0, 1], "all_reduce", "float32 [1]")
        contract._entered_s -= 1000.0
    for step in (7, 8):
        contracts[0].launch(step)
    contracts[1].launch(7)
    slots = SimpleNamespace(device=torch.device("cpu"))
    runner = bare_runner(
        _device=SimpleNamespace(slots=slots, groups=SimpleNamespace(contract=contracts[0]))
    )
    assert runner._is_idle(1.4)
    said = (
        r"rank 0 waited in vain for 1\.6 s in step 8, device; last seen: rank 1 at \[step 7, launch"
    )
    with pytest.raises(CollectiveError, match=said):
        runner._is_idle(1.6)


def test_kernels_of_prompts_and_of_sampling_are_compiled_before_anybody_asks() -> None:
    """One step of each size that has products of its own, as it would be captured later."""
    captures = captures_of(Buckets.of(64, 8192, 3))
    sampled, *prompts = captures.soon_met()
    assert (sampled.shape.is_uniform, sampled.shape.rows) == (True, 64)
    assert sampled.mode == SamplingMode.SAMPLE
    assert {(key.mode, key.shape.k, key.shape.is_uniform) for key in prompts} == {
        (SamplingMode.GREEDY, 3, False)
    }
    assert [key.shape.tokens for key in prompts] == [2048, 256, 128, 64, 32]
    _, rest = captures.keys()
    assert {sampled, *prompts} <= set(rest)
    _, only = captures_of(Buckets.of(4, 24, 0)).soon_met()
    assert only.shape.tokens == 24


def captures_of(buckets: Buckets) -> Captures:
    def nothing(_: object) -> None:
        pass

    return Captures(nothing, nothing, buckets, None, compiles=False)
