"""The --speculative-config object: the spellings that users bring, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import SpeculativeConfig
from paceline.errors import ConfigError


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
        ("/eagle/smollm2-135m", "draft_model"),
        ("HuggingFaceTB/SmolLM2-135M", "draft_model"),
    ],
)
def test_without_a_method_the_models_name_tells_it(model: str, method: str) -> None:
    assert parsed(model=model).method == method


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "eagle"}, 'method "eagle" needs "model": the folder or hub id of the head'),
        ({"method": "draft_model"}, 'method "draft_model" needs "model"'),
        ({"method": "eagel", "model": "m"}, "'eagel' is not supported; use one of ngram, draft_mo"),
        ({"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}, "'eagle3' is not supported"),
        ({}, "method None is not supported"),
        ({"method": "eagle", "model": "m", "draft_tensor_parallel_size": 2}, "only 1 is"),
        ({"method": "eagle", "model": "m", "draft_sample_methd": "x"}, "draft_sample_method"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(**values)
