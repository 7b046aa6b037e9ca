"""The --speculative-config object: the spellings that users bring, and what is refused."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.errors import ConfigError
from paceline.runner.finding import forced_rates
from tests.architecture.source_tree import ROOT


def parsed(**values: Any) -> SpeculativeConfig:
    return SpeculativeConfig.from_mapping({"num_speculative_tokens": 2, **values})


def test_an_eagle_config_as_it_is_written_for_other_engines() -> None:
    config = parsed(
        method="eagle",
        model="yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
        draft_tensor_parallel_size=1,
    )
    assert (config.method, config.num_speculative_tokens) == ("eagle", 2)


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("yuhuili/EAGLE-LLaMA3.1-Instruct-8B", "eagle"),
        ("/models/my-eagle-head/", "eagle"),
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("org/Qwen3-8B_eagle-3", "eagle3"),
        ("/eagle/smollm2-135m", "draft_model"),
        ("HuggingFaceTB/SmolLM2-135M", "draft_model"),
    ],
)
def test_without_a_method_the_models_name_tells_it(model: str, method: str) -> None:
    assert parsed(model=model).method == method
    assert parsed(model=model).method_is_guessed
    assert not parsed(model=model, method=method).method_is_guessed


@pytest.mark.parametrize("name", ["mtp", "deepseek_mtp", "glm4_moe_lite_mtp"])
def test_mtp_has_many_names_and_needs_no_model(name: str) -> None:
    assert (parsed(method=name).method, parsed(method=name).model) == ("mtp", None)


def test_an_mtp_layer_is_the_targets_own() -> None:
    def spec(model: str) -> dict[str, Any]:
        return {"method": "mtp", "model": model, "num_speculative_tokens": 2}

    EngineConfig.from_keywords(model="a/target", speculative_config=spec("a/target"))
    with pytest.raises(ConfigError, match=r'leave out "model" \(\'other/head\'\)'):
        EngineConfig.from_keywords(model="a/target", speculative_config=spec("other/head"))


def test_every_key_is_in_the_how_to() -> None:
    text = (ROOT / "docs" / "howto" / "speculation.md").read_text(encoding="utf-8")
    ours_alone = {"method_is_guessed"}  # how the front tells the engine; nobody writes it
    for field in fields(SpeculativeConfig):
        assert f"`{field.name}`" in text or field.name in ours_alone


def test_taps_and_a_guessed_method_reach_the_engine_process() -> None:
    spec = {"model": "a/eagle3", "num_speculative_tokens": 2}
    spec |= {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}
    config = EngineConfig.from_keywords(speculative_config=spec)
    there = EngineConfig.from_keywords(**json.loads(json.dumps(config.flat())))
    assert there.speculative == config.speculative
    assert there.speculative is not None
    assert there.speculative.eagle_aux_hidden_state_layer_ids == (1, 5, 9)


def forced(**values: Any) -> SpeculativeConfig:
    return parsed(method="ngram", rejection_sample_method="synthetic", **values)


@pytest.mark.parametrize("length", [1, 1.0, 2.5, 3, 3.0])
def test_an_acceptance_length_lies_between_the_bonus_alone_and_all_drafts_too(
    length: float,
) -> None:
    assert forced(synthetic_acceptance_length=length).synthetic_acceptance_length == length


@pytest.mark.parametrize("rates", [[0, 0], [1, 1], [0.5, 0.5], [0.9, 0.3], [1, 0]])
def test_acceptance_rates_may_stay_or_fall(rates: list[float]) -> None:
    assert forced(synthetic_acceptance_rates=rates).synthetic_acceptance_rates == tuple(rates)


@pytest.mark.parametrize(
    ("values", "conditional"),
    [
        ({"synthetic_acceptance_length": 2.5}, (1.0, 0.5)),
        ({"synthetic_acceptance_length": 1}, (0.0, 0.0)),
        ({"synthetic_acceptance_length": 3}, (1.0, 1.0)),
        ({"synthetic_acceptance_rates": (0.8, 0.2)}, (0.8, 0.25)),
    ],
)
def test_the_device_is_given_the_chance_of_each_draft_after_those_before_it(
    values: dict[str, Any], conditional: tuple[float, ...]
) -> None:
    assert forced_rates(forced(**values)) == conditional
    assert forced_rates(parsed(method="ngram")) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of synthetic_acceptance_length and synthetic_acceptance_rates"),
        ({"synthetic_acceptance_length": 0.9}, "is 0.9; it counts the bonus and must lie betw"),
        ({"synthetic_acceptance_length": 3.1}, r"between 1 and num_speculative_tokens \+ 1 = 3"),
        ({"synthetic_acceptance_length": float("nan")}, "length is nan"),
        ({"synthetic_acceptance_rates": [0.5]}, r"is \[0.5\]; it needs num_spec.* = 2 numbers"),
        ({"synthetic_acceptance_rates": [1.1, 0.5]}, "numbers between 0 and 1"),
        ({"synthetic_acceptance_rates": [0.5, float("nan")]}, "numbers between 0 and 1"),
        (
            {"synthetic_acceptance_rates": [0.5, 0.7]},
            r"rises from 0.5 to 0.7; entry i is the chance that the first i \+ 1 drafts are all",
        ),
    ],
)
def test_forced_acceptance_that_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        forced(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "eagle"}, 'method "eagle" needs "model": the folder or hub id of the head'),
        ({"method": "draft_model"}, 'method "draft_model" needs "model"'),
        ({"method": "eagel", "model": "m"}, "'eagel' is not supported; use one of ngram, draft_mo"),
        ({"method": "eagle3"}, 'method "eagle3" needs "model": the folder or hub id of the head'),
        ({"method": "medusa", "model": "m"}, "'medusa' is not supported; use one of .*eagle3, mtp"),
        (
            {"method": "eagle", "model": "m", "eagle_aux_hidden_state_layer_ids": [2, 4, 6]},
            r'EAGLE-3 head reads; found \[2, 4, 6\] with method "eagle"',
        ),
        ({}, "method None is not supported"),
        ({"method": "eagle", "model": "m", "draft_sample_methd": "x"}, "draft_sample_method"),
        ({"method": "mtp", "num_speculative_tokens": "3"}, "must be an integer, got '3'"),
        ({"method": "mtp", "num_speculative_tokens": 2.5}, "must be an integer, got 2.5"),
        ({"method": "mtp", "num_speculative_tokens": None}, 'needs "num_speculative_tokens"'),
        ({"method": "eagle", "model": 5}, "model must be a string, got 5"),
        ({"method": "mtp", "draft_sample_method": "probable"}, "Did you mean 'probabilistic'"),
        ({"method": "mtp", "adaptive": "no"}, "adaptive must be true or false"),
        (
            {"method": "eagle3", "model": "m", "eagle_aux_hidden_state_layer_ids": 2},
            "eagle_aux_hidden_state_layer_ids must be a list, got 2",
        ),
        (
            {"method": "eagle3", "model": "m", "eagle_aux_hidden_state_layer_ids": [1.5, 2]},
            "eagle_aux_hidden_state_layer_ids must be an integer, got 1.5",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(**values)
