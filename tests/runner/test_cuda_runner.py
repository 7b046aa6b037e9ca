"""What the runner of fixed shapes does around its steps; its steps are tested by the ladders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from paceline.runner.cuda_runner import CudaRunner
from paceline.runner.shapes import Buckets
from paceline.sampling.verify import Tail


def bare_runner(**parts: Any) -> Any:
    """One that has nothing but what a test gives it."""
    runner = object.__new__(CudaRunner)
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
    graphs = SimpleNamespace(close=lambda: order.append("graphs"))
    bare_runner(_device=device, _graphs=graphs).close()
    assert order == ["graphs", "groups"]


def test_kernels_of_prompts_and_of_sampling_are_compiled_before_anybody_asks() -> None:
    """One step of each size that has products of its own, as it would be captured later."""
    runner = bare_runner(_buckets=Buckets.of(64, 8192, 3))
    sampled, *prompts = runner._soon_met()
    assert (sampled.shape.is_uniform, sampled.shape.rows, sampled.tail) == (True, 64, Tail.SAMPLE)
    assert {(key.tail, key.shape.k, key.shape.is_uniform) for key in prompts} == {
        (Tail.GREEDY, 3, False)
    }
    assert [key.shape.tokens for key in prompts] == [2048, 256, 128, 64, 32]
    _, rest = runner._keys()
    assert {sampled, *prompts} <= set(rest)
    _, only = bare_runner(_buckets=Buckets.of(4, 24, 0))._soon_met()
    assert only.shape.tokens == 24
