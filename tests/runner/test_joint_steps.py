"""Replicas that step together in fixed shapes: an idle one runs what the busy one runs, key by key.

Two engines over real runners in this process, on CPU tensors; a list stands in for the graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.engine import loop_state
from paceline.engine.engine import Engine, run_engine
from paceline.engine.messages import Control, StepMessage, Wake, decode, encode, encode_submit
from paceline.parallel.collectives import Group
from paceline.parallel.contract import Contract
from paceline.parallel.groups import Groups
from paceline.parallel.placement import ONLY_RANK
from paceline.runner import startup
from paceline.runner.graphs import GraphKey
from paceline.runner.platform_cuda import CudaPlatform
from paceline.runner.ranks import Ranks
from paceline.runner.runner import StepRunner
from paceline.runner.shapes import Buckets
from paceline.runner.startup import build_on
from paceline.sampling.verify import SamplingMode
from paceline.step import StepSize
from tests.e2e.loop import request
from tests.engine.test_lockstep_loop import Table, TableLockstep
from tests.patience import PATIENCE_S, wait_for
from tests.tiny import greedy_reference, save_tiny

CPU = torch.device("cpu")
PROMPT = [5, 9, 40, 7, 11, 80, 3, 17, 30]


@dataclass
class KeptKeys:
    """Instead of graphs: which keys were replayed and captured, in order. Steps run eagerly."""

    runner: StepRunner
    captured: list[GraphKey] = field(default_factory=list)
    replayed: list[GraphKey] = field(default_factory=list)
    num_replays = 0
    capture_s = 0.0

    def __len__(self) -> int:
        return len(self.captured)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self.captured

    def find(self, key: GraphKey) -> GraphKey:
        return key

    def replay(self, key: GraphKey) -> None:
        self.replayed.append(key)
        captures = self.runner._captures
        assert captures is not None
        captures.run(key)

    def capture(self, key: GraphKey) -> None:
        self.captured.append(key)


@dataclass
class Replica:
    runner: StepRunner
    graphs: KeptKeys
    inbox: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    error: BaseException | None = None

    def take(self, data: bytes) -> None:
        message = decode(data)
        if isinstance(message, StepMessage):
            result = message.result
            for row, uid in enumerate(result.uid_B.tolist()):
                count = int(result.count_B[row])
                self.tokens.setdefault(uid, []).extend(result.token_BW[row, :count].tolist())
                if result.done_B[row]:
                    self.done.add(uid)

    def ask(self, uid: int, **params: Any) -> None:
        self.inbox.put(encode_submit(request(uid, PROMPT, **params)))


@contextmanager
def pair(config: EngineConfig) -> Iterator[list[Replica]]:
    """Two replicas that agree before every step."""
    table = Table(2)
    made = []
    for place in range(2):
        runner: Any = build_on(CudaPlatform(CPU), config, lambda stage, share: None)
        runner.lockstep = TableLockstep(table, place)
        captures = runner._captures
        captures._graphs = KeptKeys(runner)
        captures._wanted, captures.has_more = chain(*captures.keys()), True
        made.append(Replica(runner, captures._graphs))

    def run(place: int) -> None:
        mine, other = made[place], made[1 - place]
        try:
            engine = Engine(mine.runner, config, mine.take)
            run_engine(engine, mine.inbox, lambda step: other.inbox.put(encode(Wake(step))))
        except BaseException as error:
            mine.error = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield made
        for replica in made:
            replica.inbox.put(encode(Control.DRAIN))
    finally:
        for thread in threads:
            thread.join(PATIENCE_S)
    assert [x.error for x in made] == [None, None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("joint")


@pytest.fixture(scope="module")
def target(folder: Path) -> Any:
    return save_tiny(folder, "llama", num_attention_heads=8, num_key_value_heads=4)


def config_of(folder: Path, k: int = 2, **more: Any) -> EngineConfig:
    spec = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": k}
    return EngineConfig.from_keywords(
        model=str(folder),
        speculative_config={**spec, "adaptive": False},
        dtype="float32",
        **{"max_num_seqs": 2, "max_num_batched_tokens": 32, "cpu_threads": 1, **more},
    )


@pytest.mark.trap("C4", "C5")
def test_an_idle_replica_replays_the_graphs_of_the_busy_one(folder: Path, target: Any) -> None:
    """Prompt chunks, greedy and sampled windows, then steps that no graph can hold."""
    expected = greedy_reference(target, PROMPT, 12)
    with pair(config_of(folder)) as (busy, idle):
        asked: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {"logprobs": 2}]
        for uid, params in enumerate(asked, start=1):
            busy.ask(uid, max_tokens=12, **params)
            wait_for(lambda uid=uid: uid in busy.done)  # type: ignore[misc]
        assert busy.tokens[1] == expected
        assert (busy.runner.num_eager, idle.runner.num_eager) == (0, 0)
        assert busy.graphs.replayed == idle.graphs.replayed
        shapes = {(key.shape.is_uniform, key.shape.k, key.mode) for key in idle.graphs.replayed}
        assert shapes >= {(True, 2, mode) for mode in SamplingMode}
        assert any(not key.shape.is_uniform for key in idle.graphs.replayed)
        assert not idle.tokens
        busy.ask(4, max_tokens=5, prompt_logprobs=1)
        wait_for(lambda: 4 in busy.done)
    assert busy.runner.num_eager == idle.runner.num_eager > 0
    assert busy.graphs.replayed == idle.graphs.replayed
    assert busy.tokens[4] == expected[:5]


@pytest.mark.trap("L-7")
def test_replicas_capture_the_same_graphs_in_the_same_order_and_then_serve(
    folder: Path, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_state, "SPARE_AFTER_S", 0.01)
    with pair(config_of(folder)) as replicas:
        captures = replicas[0].runner._captures
        assert captures is not None
        keys, _ = captures.keys()
        wait_for(lambda: not any(x.runner.has_spare_work for x in replicas))
        assert replicas[0].graphs.captured == replicas[1].graphs.captured
        assert set(replicas[0].graphs.captured) > set(keys)
        replicas[1].ask(1, max_tokens=12)
        wait_for(lambda: 1 in replicas[1].done)
    assert replicas[1].tokens[1] == greedy_reference(target, PROMPT, 12)


@pytest.mark.trap("C4")
@pytest.mark.parametrize("k", range(8))
@pytest.mark.parametrize("mode", SamplingMode)
def test_an_empty_step_size_changes_nothing_that_was_agreed(k: int, mode: SamplingMode) -> None:
    buckets = Buckets.of(max_rows=64, max_tokens=512, max_k=k)
    for rows in range(1, 65):
        width = k + 1
        own = StepSize(rows * width, 2 * rows, rows, k, mode)
        agreed = StepSize.joined([StepSize(), own, StepSize()])
        assert agreed == own
        shape = buckets.shape_of(agreed)
        assert shape == buckets.shape_of(own)
        assert shape.is_uniform
        assert (shape.k, agreed.sampling_mode, agreed.has_graph) == (k, mode, True)
        assert buckets.is_captured(shape)


@pytest.mark.trap("L-5")
@pytest.mark.parametrize("k", range(1, 8))
def test_no_two_widths_share_a_key_though_they_have_as_many_tokens(k: int) -> None:
    """One window of K + 1, and K + 1 rows that decode."""
    buckets = Buckets.of(max_rows=8, max_tokens=64, max_k=k)
    wide = buckets.shape_of(StepSize(k + 1, 2, 1, k))
    narrow = buckets.shape_of(StepSize(k + 1, 2 * (k + 1), k + 1, 0))
    assert wide.tokens == k + 1 <= narrow.tokens
    assert wide != narrow
    assert GraphKey(wide, SamplingMode.GREEDY) != GraphKey(narrow, SamplingMode.GREEDY)


class Mirror:
    """A wire between ranks that all hold what this one holds."""

    def __init__(self, size: int) -> None:
        self._size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x * self._size

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0).repeat(self._size, *[1] * x.dim())


@pytest.mark.trap("C16")
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_k_starts_at_every_tensor_parallel_size(
    size: int, folder: Path, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of `size` ranks: every decode shape runs, whatever 1 + K and the size have in
    common."""
    wire: Any = None if size == 1 else Mirror(size)
    groups = Groups(tp=Group("tp", range(size), 0, Contract(), wire))
    monkeypatch.setattr(startup, "open_ranks", lambda *_: Ranks(ONLY_RANK, groups, groups))
    for k in range(1, 8):
        config = config_of(folder, k, max_num_seqs=3, max_num_batched_tokens=32)
        runner: Any = build_on(CudaPlatform(CPU), config, lambda stage, share: None)
        shapes = list(runner._captures._buckets.decode_shapes(k))
        assert {s.rows for s in shapes} == {1, 2, 3}
        for shape in shapes:
            assert shape.tokens == shape.rows * (k + 1)
            runner.run_empty(GraphKey(shape, SamplingMode.GREEDY))
