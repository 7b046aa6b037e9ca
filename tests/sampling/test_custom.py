"""Processors that users bring: found by name, chosen per request, harmless when broken."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from paceline.errors import ConfigError
from paceline.request import Done, EngineRequest, SamplingParams
from paceline.sampling.custom import CustomProcessors
from tests.sampling.simulation import NoiseModel, Simulation, one_by_one

HERE = "tests.sampling.processors"
CPU = torch.device("cpu")
VOCAB = 20


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("BanLastToken", "module:Class"),
        ("no.such.module:Thing", "no.such.module"),
        (f"{HERE}:BanLastTokn", "Did you mean 'BanLastToken'"),
        (f"{HERE}:NeedsMore", r"NeedsMore\(vocab_size, device\) failed"),
        (f"{HERE}:NotCallable", "__call__"),
    ],
)
def test_processor_that_cannot_be_loaded_is_refused_at_start(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CustomProcessors([name], VOCAB, CPU)


def request(
    names: list[str], extra_args: dict[str, Any] | None = None, **params: Any
) -> EngineRequest:
    params = {"temperature": 0.0, "max_tokens": 9, "seed": 4, **params}
    return EngineRequest(
        uid=1,
        prompt_token_ids=[1, 2, 3],
        params=SamplingParams(
            logits_processors=[f"{HERE}:{name}" for name in names], extra_args=extra_args, **params
        ),
    )


def run(*requests: EngineRequest, k: int = 0, drafts: list[int] | None = None) -> Any:
    loaded = [f"{HERE}:{name}" for name in ("BanLastToken", "Only", "Broken")]
    simulation = Simulation(requests, NoiseModel(VOCAB, 1), processors=loaded)
    return simulation.run(k, lambda i, history, k: (drafts or [])[:k])


def test_processor_sees_the_drafts_before_its_position() -> None:
    # Peaked on one token, which the processor forbids to repeat.
    params: dict[str, Any] = {"logit_bias": {6: 90.0}}
    plain = run(request(["BanLastToken"], **params))[0]
    drafted = run(request(["BanLastToken"], **params), k=2, drafts=[6, 6])[0]
    assert plain.tokens == drafted.tokens
    assert plain.tokens[::2] == [6] * 5
    assert 6 not in plain.tokens[1::2]


def test_processors_are_chosen_per_request_with_their_arguments() -> None:
    plain = request([])
    outputs = run(request(["Only"], {"token": 7}), plain, request(["Only"], {"token": 8}))
    assert outputs[0].tokens == [7] * 9
    assert outputs[1].tokens == one_by_one(plain, NoiseModel(VOCAB, 1)).tokens
    assert outputs[2].tokens == [8] * 9


def test_slot_forgets_its_former_owner() -> None:
    processors = CustomProcessors([f"{HERE}:Only"], VOCAB, CPU)
    processors.assign(0, [f"{HERE}:Only"], {"token": 7})
    processors.assign(0, [], None)
    simulation = Simulation(
        [request(["Only"], {"token": 7})], NoiseModel(VOCAB, 1), processors=[f"{HERE}:Only"]
    )
    simulation.custom = processors
    assert simulation.run()[0].tokens == one_by_one(request([]), NoiseModel(VOCAB, 1)).tokens


@pytest.mark.parametrize("how", ["shape", "raise"])
def test_broken_processor_ends_its_own_request_only(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = request([])
    with caplog.at_level(logging.ERROR):
        outputs = run(request(["Broken"], {"how": how}), plain)
    assert outputs[0].done == Done.ERROR
    assert outputs[1].tokens == one_by_one(plain, NoiseModel(VOCAB, 1)).tokens
    assert "Broken failed" in caplog.text
