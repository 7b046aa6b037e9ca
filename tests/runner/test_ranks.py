"""A rank's place: who steps together, and which device and wire it gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.models.families import read_spec
from paceline.models.spec import ModelSpec
from paceline.parallel.placement import Layout, RankPlace
from paceline.runner.ranks import cuda_device, steps_together
from tests.tiny import tiny_config


def spec_of(family: str) -> ModelSpec:
    config = tiny_config(family)
    kind = type(config).__name__.removesuffix("Config")
    return read_spec({**config.to_dict(), "architectures": [f"{kind}ForCausalLM"]})


DENSE, EXPERTS = spec_of("llama"), spec_of("mixtral")
SPREAD = Layout(1, 2, spreads_experts=True)


@pytest.mark.parametrize(
    ("layout", "specs", "together"),
    [
        (SPREAD, [EXPERTS], True),
        (SPREAD, [EXPERTS, DENSE], True),
        (SPREAD, [DENSE, EXPERTS], True),  # the drafter alone is enough
        (SPREAD, [EXPERTS, EXPERTS], True),
        (Layout(2, 2, spreads_experts=True), [DENSE, EXPERTS], True),
        (SPREAD, [DENSE], False),
        (SPREAD, [DENSE, DENSE], False),
        (Layout(1, 2), [EXPERTS, EXPERTS], False),  # every replica has all experts
        (Layout(2, 1, spreads_experts=True), [EXPERTS], False),  # one replica
        (Layout(), [EXPERTS], False),
    ],
)
def test_replicas_step_together_where_some_model_has_experts_on_other_replicas(
    layout: Layout, specs: list[ModelSpec], together: bool
) -> None:
    assert steps_together(layout, specs) == together


def gpu_of(rank: int, num_gpus: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    config = EngineConfig.from_keywords(model="m", **sizes, **options)
    # Replicas that share nothing: each is a layout of its own.
    where = RankPlace(rank % 2, Layout(2), first_rank=rank - rank % 2, num_others=2)
    spread = cuda_device(config, RankPlace(rank, Layout(2, 2, spreads_experts=True)))
    assert cuda_device(config, where) == spread
    return spread


def test_every_rank_has_a_gpu_of_its_own_or_shares_when_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert gpu_of(3, 4, monkeypatch) == (torch.device("cuda", 3), "nccl")
    assert gpu_of(3, 8, monkeypatch, share_gpu=True) == (torch.device("cuda", 3), "nccl")
    assert gpu_of(3, 2, monkeypatch, share_gpu=True) == (torch.device("cuda", 1), "gloo")
    with pytest.raises(ConfigError, match=r"4 ranks \(.* 2 x .* 2\) need 4 GPUs, 2 are here"):
        gpu_of(3, 2, monkeypatch)
