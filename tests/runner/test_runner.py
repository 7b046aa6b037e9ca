"""What the runner of fixed shapes does around its steps; its steps are tested by the ladders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import CollectiveError
from paceline.kernels.step_rows import StepShape
from paceline.parallel.contract import CollectiveLog, Contract
from paceline.runner.captures import Captures
from paceline.runner.graphs import GraphKey, Graphs, Part
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


class RecordedGraphs(Graphs):
    """Captures nothing, and remembers what it was asked for."""

    def __init__(self, run: Callable[[GraphKey], None]) -> None:
        self._run = run
        self._graphs: dict[GraphKey, Any] = {}
        self.replayed: list[GraphKey] = []
        self.num_replays = 0

    def capture(self, key: GraphKey) -> None:
        self._run(key)
        self._graphs[key] = None

    def replay(self, key: GraphKey) -> None:
        self.replayed.append(key)


def recorded(buckets: Buckets) -> tuple[Captures, RecordedGraphs, list[GraphKey]]:
    ran: list[GraphKey] = []
    graphs = RecordedGraphs(ran.append)
    return Captures(ran.append, lambda entry: None, buckets, graphs, compiles=False), graphs, ran


def test_the_halves_of_a_late_step_are_captured_together_after_both_have_run() -> None:
    captures, graphs, ran = recorded(Buckets.of(4, 64, 0, window_k=7))
    shape = StepShape(4, 32, 7, True)
    a, b = (GraphKey(shape, SamplingMode.FULL, part) for part in (Part.A, Part.B))
    assert not captures.replay(a)
    assert len(graphs) == 0, "B reads what this run of A has left"
    assert not captures.replay(b)
    assert ran == [a, b, a, b]
    assert captures.replay(a)
    assert captures.replay(b)
    assert (graphs.replayed, len(ran)) == ([a, b], 4)


def test_wide_and_late_steps_are_captured_in_spare_time_once_one_was_met() -> None:
    captures, graphs, _ = recorded(Buckets.of(4, 64, 2, window_k=7))
    first, rest = captures.keys()
    assert {key.shape.k for key in (*first, *rest)} == {0, 2}
    assert {key.part for key in (*first, *rest)} == {Part.WHOLE}
    captures.prepare(lambda key: None, lambda stage, share: None)
    while captures.capture_next(lambda key: None):
        pass
    num_before = len(graphs)
    late = GraphKey(StepShape(4, 32, 7, True), SamplingMode.FULL, Part.A)
    captures.meet(late)
    assert captures.has_more
    while captures.capture_next(lambda key: None):
        pass
    captures.meet(late)
    assert not captures.has_more
    assert graphs.find(late) is not None
    assert graphs.find(replace(late, part=Part.B)) is not None
    new = list(graphs._graphs)[num_before:]
    assert {(key.shape.k, key.mode) for key in new} == {(7, SamplingMode.FULL)}
    captures.meet(GraphKey(StepShape(4, 32, 7, True), SamplingMode.GREEDY))
    while captures.capture_next(lambda key: None):
        pass
    assert graphs.find(GraphKey(StepShape(1, 8, 7, True), SamplingMode.GREEDY)) is not None


def captures_of(buckets: Buckets) -> Captures:
    def nothing(_: object) -> None:
        pass

    return Captures(nothing, nothing, buckets, None, compiles=False)
