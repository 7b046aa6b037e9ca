"""Runners for ranks of tests, by name: the CPU's own steps, and the fixed shapes of CUDA on it."""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.config import EngineConfig
from paceline.parallel.placement import ONLY_RANK, RankPlace
from paceline.runner.load_models import Progress
from paceline.runner.platform_cuda import CudaPlatform
from paceline.runner.startup import build_on
from paceline.step import Runner

FIXED = f"{__name__}:build_fixed"


def build_fixed(config: EngineConfig, progress: Progress, place: RankPlace = ONLY_RANK) -> Runner:
    """What a GPU would run, with the kernels' references and no graphs."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    sized = replace(config, scheduler=config.scheduler.sized(is_gpu=False))
    return build_on(CudaPlatform(torch.device("cpu")), sized, progress, place)
