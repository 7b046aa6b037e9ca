"""Engines of fixed-shape steps on the GPU, for tests that look inside.

PACELINE_TEST_DEVICE=cpu is a rehearsal: the same steps on CPU tensors with the kernels' references
and without graphs, so that these tests can be worked on where there is no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from paceline import LLM
from paceline.config import EngineConfig
from paceline.engine.client import EngineClient
from paceline.engine.engine import Engine
from paceline.engine.launch import DEFAULT_FACTORY
from paceline.kernels.gpu.device import is_hopper
from paceline.parallel.groups import Backend
from paceline.parallel.placement import ONLY_RANK, RankPlace, layout_of
from paceline.runner.platform_cuda import CudaPlatform
from paceline.runner.startup import build_on
from paceline.step import Runner
from tests.e2e.loop import listened_to
from tests.parallel.factories import FIXED

DEVICE = os.environ.get("PACELINE_TEST_DEVICE", "cuda")
IS_REHEARSAL = DEVICE == "cpu"
_FACTORY = f"{__name__}:build"


def build(
    config: EngineConfig, progress: Callable[[str, float], None], place: RankPlace = ONLY_RANK
) -> Runner:
    """The factory of `open_llm`."""
    torch.set_grad_enabled(False)
    sized = replace(config, scheduler=config.scheduler.sized(is_gpu=True))
    backend: Backend = "gloo" if IS_REHEARSAL else "nccl"
    return build_on(CudaPlatform(torch.device(DEVICE, 0), backend), sized, progress, place)


def open_llm(**options: Any) -> LLM:
    """`LLM(...)` on the device under test, in this process."""
    options.pop("engine_in_process", None)
    config = EngineConfig.from_keywords(**options)
    return LLM.from_client(EngineClient.start(config, in_process=True, factory=_FACTORY))


def open_ranks(**options: Any) -> LLM:
    """`LLM(...)` with processes of its own, as a user has it; collectives are compared."""
    checked = {"device": DEVICE, "check_collectives": True, **options}
    config = EngineConfig.from_keywords(**checked)
    factory = FIXED if IS_REHEARSAL else DEFAULT_FACTORY
    return LLM.from_client(EngineClient.start(config, factory=factory))


@dataclass
class GpuEngine:
    """The loop over a runner of fixed shapes, in this thread."""

    engine: Engine
    runner: Any
    published: dict[int, list[int]]

    def turn(self, count: int) -> None:
        for _ in range(count):
            assert self.engine.turn(), "nothing left to do"

    def capture_everything(self) -> None:
        """What an idle engine does with its time."""
        while self.runner.use_spare_time():
            pass

    @contextmanager
    def only_replays(self, at_least: int) -> Iterator[None]:
        """Within it every step is a graph replay; there are `at_least` this many."""
        before = dict(self.runner.stats)
        yield
        if not IS_REHEARSAL:
            gained = {name: self.runner.stats[name] - before[name] for name in before}
            assert gained["num_eager"] == 0, gained
            assert gained["num_captured"] == 0, gained
            assert gained["num_replays"] >= at_least, gained


@contextmanager
def gpu_engine(
    model: str | Path, spec: dict[str, Any] | None = None, **options: Any
) -> Iterator[GpuEngine]:
    defaults: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "device": DEVICE,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
    }
    config = EngineConfig.from_keywords(speculative_config=spec, **{**defaults, **options})
    runner = build(config, lambda stage, fraction: None, RankPlace(0, layout_of(config)))
    engine, published = listened_to(runner, config)
    try:
        yield GpuEngine(engine, runner, published)
    finally:
        runner.close()


@contextmanager
def never_synchronising() -> Iterator[None]:
    """Any call that makes the host wait for the device raises."""
    if IS_REHEARSAL:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def knows_family(name: str) -> bool:
    """False where transformers, what tokens are compared with, is too old for a family."""
    try:
        return find_spec(f"transformers.models.{name}") is not None
    except ModuleNotFoundError:
        return True  # there is none: the test itself will say so


def has_gluon_kernels() -> bool:
    """Whether this GPU and its Triton are those that kernels in Gluon were written for."""
    if IS_REHEARSAL or not is_hopper(torch.device(DEVICE)):
        return False
    import triton

    from paceline.kernels.attention.triton.attend import GLUONS_TRITON

    return bool(triton.__version__.startswith(GLUONS_TRITON))
