"""The --speculative-config object: the spellings that users bring, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from docs.write_reference import documented_rows
from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.runner.load_models import forced_rates
from paceline.speculation import (
    METHODS_NOT_SERVED,
    NOT_SERVED,
    OLD_MTP_METHODS,
    SpeculativeConfig,
    parse_speculative_config,
)
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


@pytest.mark.parametrize("name", ["mtp", *OLD_MTP_METHODS])
def test_mtp_has_many_names_and_needs_no_model(name: str) -> None:
    assert (parsed(method=name).method, parsed(method=name).model) == ("mtp", None)


def test_there_are_26_old_names_of_mtp_and_no_others() -> None:
    assert len(set(OLD_MTP_METHODS)) == 26
    with pytest.raises(ConfigError, match=r"'my_mtp' is not supported; use one of .*mtp"):
        parsed(method="my_mtp")


def test_an_mtp_layer_was_trained_for_one_draft() -> None:
    assert SpeculativeConfig.from_mapping({"method": "mtp"}).num_speculative_tokens == 1


@pytest.mark.parametrize("name", ["ngram_gpu", "[ngram]"])
def test_ngrams_are_looked_up_on_the_device_under_any_name(name: str) -> None:
    assert parsed(method=name).method == "ngram"


@pytest.mark.parametrize("name", METHODS_NOT_SERVED)
def test_a_method_that_is_not_served_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        parsed(method=name, model="m")
    assert str(error.value) == f"speculative method {name!r}: {METHODS_NOT_SERVED[name]}"
    assert re.search(r"use |leave out|says how", str(error.value))


# Every field of vLLM 0.32's SpeculativeConfig, with a value that is not its default.
VLLM_KEYS: dict[str, Any] = {
    "method": "eagle",
    "model": "a/head",
    "num_speculative_tokens": 3,
    "draft_tensor_parallel_size": 1,
    "tensor_parallel_size": 2,
    "enforce_eager": True,
    "max_model_len": 512,
    "revision": "main",
    "code_revision": "main",
    "quantization": "fp8",
    "moe_backend": "triton",
    "attention_backend": "FLASH_ATTN",
    "kv_cache_dtype": "fp8",
    "draft_load_config": {"load_format": "dummy"},
    "index_share_for_mtp_iteration": True,
    "disable_padded_drafter_batch": True,
    "disable_eagle_block_drop": True,
    "use_local_argmax_reduction": True,
    "use_heterogeneous_vocab": True,
    "prompt_lookup_max": 6,
    "prompt_lookup_min": 3,
    "parallel_drafting": True,
    "num_speculative_tokens_per_batch_size": [[1, 8, 1]],
    "suffix_decoding_max_tree_depth": 30,
    "suffix_decoding_max_cached_requests": 10,
    "suffix_decoding_max_spec_factor": 2.0,
    "suffix_decoding_min_token_prob": 0.2,
    "rejection_sample_method": "block",
    "synthetic_acceptance_rates": [0.9, 0.5],
    "synthetic_acceptance_length": 2.0,
    "enable_adaptive_verification": True,
    "draft_sample_method": "probabilistic",
    "dspark_draft_topk": 8,
    "target_model_config": {},
    "target_parallel_config": {},
    "draft_model_config": {},
    "draft_parallel_config": {},
}


def test_every_key_of_vllm_is_known() -> None:
    served = {field.name for field in fields(SpeculativeConfig) if "help" in field.metadata}
    assert len(VLLM_KEYS) == 37
    refused = VLLM_KEYS.keys() - served - {"enable_adaptive_verification"}
    assert NOT_SERVED.keys() == refused | {"draft_sink_size"}
    ours = served - VLLM_KEYS.keys()
    assert ours == {
        "adaptive",
        "draft_window_size",
        "eagle_aux_hidden_state_layer_ids",
        "max_num_speculative_tokens",
    }


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("name", VLLM_KEYS)
def test_a_key_of_vllm_is_served_or_refused_with_what_to_do(name: str) -> None:
    value, context = VLLM_KEYS[name], {"method": "draft_model", "model": "m"}
    if name.startswith("suffix"):
        with pytest.raises(ConfigError, match=f'{name} belongs to "suffix"; add it to "method"'):
            parsed(**(context | {name: value}))
        context = {"method": "suffix"}
    if name.startswith("synthetic"):
        context["rejection_sample_method"] = "synthetic"
    if name not in NOT_SERVED:
        found = parsed(**(context | {name: value}))
        as_stored = _as_tuples(value)
        assert getattr(found, name, as_stored) == as_stored
        return
    for neutral in (None, *NOT_SERVED[name].neutral):
        assert parsed(**context, **{name: neutral}) == parsed(**context)
    if value not in NOT_SERVED[name].neutral:
        with pytest.raises(ConfigError) as error:
            parsed(**context, **{name: value})
        assert str(error.value).startswith(f"speculative_config key {name!r} is {value!r}: ")
        assert re.search(r"leave it out|use ", str(error.value))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"enable_adaptive_verification": True, "adaptive": False},
            '"adaptive": false contradicts .* enable_adaptive_verification; leave one out',
        ),
        (
            {"use_local_argmax_reduction": True, "draft_sample_method": "coupled"},
            "use_local_argmax_reduction' is True: .* sampled drafts need all logits",
        ),
        (
            {"use_heterogeneous_vocab": True, "draft_sample_method": "probabilistic"},
            'needs greedy drafts; leave out "draft_sample_method": "probabilistic"',
        ),
        (
            {"use_heterogeneous_vocab": True, "method": "eagle"},
            'is for "draft_model"; .* "eagle" has the target\'s vocabulary. Leave it out',
        ),
        ({"max_model_len": 0}, "max_model_len is 0; it must be at least 1"),
        ({"method": ["eagle", "mtp"]}, r'is \["eagle", "mtp"\]; a chain is one of "suffix" and'),
        ({"method": ["suffix", "suffix"]}, r'for example \["suffix", "mtp"\]'),
        ({"method": ["suffix", "ngram", "mtp"]}, "and one other drafter"),
        ({"method": ["suffix", "medusa"]}, "Medusa heads are not supported"),
        ({"method": []}, "a chain is one of"),
        ({"method": ["suffix", "eagle"], "model": None}, 'method "eagle" needs "model"'),
        (
            {
                "method": ["suffix", "draft_model"],
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": 2,
            },
            'with "suffix" or a chain leave out rejection_sample_method',
        ),
        (
            {"method": "suffix", "suffix_decoding_max_tree_depth": 1},
            "suffix_decoding_max_tree_depth is 1; it must be at least 2",
        ),
        (
            {"method": "suffix", "suffix_decoding_max_cached_requests": -1},
            "is -1; 0 remembers no answer",
        ),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0}, "must be more than 0"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "between 0 and 1"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(**({"method": "draft_model", "model": "m"} | values))


@pytest.mark.parametrize(
    ("method", "host", "device"),
    [
        ("suffix", "suffix", "suffix"),
        (["suffix"], "suffix", "suffix"),
        (["mtp"], None, "mtp"),
        (["suffix", "mtp"], "suffix", "mtp"),
        (["deepseek_mtp", "suffix"], "suffix", "mtp"),
        (["ngram", "mtp"], "ngram", "mtp"),
        (["ngram", "suffix"], "suffix", "ngram"),
        (["suffix", "ngram_gpu"], "suffix", "ngram"),
    ],
)
def test_a_chain_is_a_lookup_on_the_host_and_a_drafter_on_the_device(
    method: Any, host: str | None, device: str
) -> None:
    config = parsed(method=method)
    assert (config.host_method, config.method) == (host, device)
    assert config.max_k == (0 if device == "suffix" else 2)
    # Beside lookups, which are free, a model's drafts must pay for their time.
    assert config.is_auto == (host is not None and device == "mtp")
    assert not parsed(method=method, adaptive=False).is_auto
    whole = EngineConfig.from_keywords(
        speculative_config={"method": method, "num_speculative_tokens": 2}
    )
    assert EngineConfig.from_keywords(**json.loads(json.dumps(whole.flat()))) == whole
    # Alone the host looks up K drafts; in a chain as many as forced tokens may be.
    assert config.most_looked_up(7) == (0 if host is None else 2 if device == "suffix" else 7)


def test_suffix_decoding_drafts_as_far_as_its_tree_is_deep_unless_told() -> None:
    assert SpeculativeConfig.from_mapping({"method": "suffix"}).num_speculative_tokens == 24
    depth = {"method": "suffix", "suffix_decoding_max_tree_depth": 9}
    assert SpeculativeConfig.from_mapping(depth).num_speculative_tokens == 9
    assert parsed(method="suffix").suffix_decoding_max_cached_requests == 0


def test_the_tables_of_the_how_to_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "howto" / "speculation.md").read_text(encoding="utf-8")
    tables = text.partition("\n## Keys\n")[2].partition("\n## Does it help?\n")[0]
    assert [line for line in tables.splitlines() if line.startswith("| `")] == list(
        documented_rows()
    )


def test_short_names_are_keys_of_the_config() -> None:
    def made(**keywords: Any) -> SpeculativeConfig | None:
        return EngineConfig.from_keywords(**keywords).speculative

    short = made(spec_method="eagle3", spec_model="a/head", spec_tokens=3)
    whole = {"method": "eagle3", "model": "a/head", "num_speculative_tokens": 3}
    assert short == made(speculative_config=whole)
    assert short == made(speculative_config=whole, spec_tokens=3)
    assert short == made(
        speculative_config='{"model": "a/head"}', spec_method="eagle3", spec_tokens=3
    )
    with pytest.raises(ConfigError, match="--spec-tokens 2 contradicts num_speculative_tokens 3"):
        made(speculative_config=whole, spec_tokens=2)
    with pytest.raises(ConfigError, match="none contradicts --spec-method"):
        made(speculative_config="none", spec_method="ngram")


def test_a_config_may_be_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "draft.json"
    path.write_text('{"method": "ngram", "num_speculative_tokens": 4}', encoding="utf-8")
    wanted = {"method": "ngram", "num_speculative_tokens": 4}
    assert parse_speculative_config(f"@{path}") == parse_speculative_config(str(path)) == wanted
    with pytest.raises(ConfigError, match=r"missing.json cannot be read: .*No such file"):
        parse_speculative_config(f"@{tmp_path}/missing.json")
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"draft.json must be a JSON object or none"):
        parse_speculative_config(f"@{path}")


def test_an_mtp_layer_is_the_targets_own() -> None:
    def spec(model: str) -> dict[str, Any]:
        return {"method": "mtp", "model": model, "num_speculative_tokens": 2}

    EngineConfig.from_keywords(model="a/target", speculative_config=spec("a/target"))
    with pytest.raises(ConfigError, match=r'leave out "model" \(\'other/head\'\)'):
        EngineConfig.from_keywords(model="a/target", speculative_config=spec("other/head"))


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
            r"rises from 0.5 to 0.7; entry i is the probability that the first i \+ 1 drafts",
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
        ({"method": "eagel", "model": "m"}, "'eagel' is not supported; use one of ngram, suffix,"),
        ({"method": "eagle3"}, 'method "eagle3" needs "model": the folder or hub id of the head'),
        (
            {"method": "medusa", "model": "m"},
            "'medusa': Medusa heads are not supported; use .eagle3",
        ),
        (
            {"method": "eagle", "model": "m", "eagle_aux_hidden_state_layer_ids": [2, 4, 6]},
            r'EAGLE-3 head reads; found \[2, 4, 6\] with method "eagle"',
        ),
        ({}, "method None is not supported"),
        ({"method": "eagle", "model": "m", "draft_sample_methd": "x"}, "draft_sample_method"),
        ({"method": "mtp", "num_speculative_tokens": "3"}, "must be an integer, got '3'"),
        ({"method": "mtp", "num_speculative_tokens": 2.5}, "must be an integer, got 2.5"),
        ({"method": "ngram", "num_speculative_tokens": None}, 'needs "num_speculative_tokens"'),
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


def test_auto_means_the_most_drafts_and_a_k_that_follows() -> None:
    auto = SpeculativeConfig.from_mapping({"method": "ngram", "num_speculative_tokens": "auto"})
    assert (auto.num_speculative_tokens, auto.is_auto, auto.k_tiers) == (7, True, (0, 1, 3, 7))
    few = SpeculativeConfig.from_mapping(
        {"method": "ngram", "num_speculative_tokens": "auto", "max_num_speculative_tokens": 3}
    )
    assert (few.num_speculative_tokens, few.k_tiers) == (3, (0, 1, 3))
    asked = parsed(method="ngram", num_speculative_tokens=5, enable_adaptive_verification=True)
    assert (asked.num_speculative_tokens, asked.is_auto) == (5, True)
    plain = parsed(method="ngram", num_speculative_tokens=5, enable_adaptive_verification=False)
    assert (plain.is_auto, plain.k_tiers) == (False, (0, 5))
    # The engine process gets the fields as they are.
    assert SpeculativeConfig.from_mapping(vars(auto)) == auto


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_speculative_tokens": "many"}, "num_speculative_tokens must be an integer"),
        ({"max_num_speculative_tokens": 5}, 'needs "num_speculative_tokens": "auto"'),
        (
            {"num_speculative_tokens": "auto", "max_num_speculative_tokens": 0},
            "it must be at least 1",
        ),
        (
            {"num_speculative_tokens": "auto", "adaptive": False},
            '"adaptive": false contradicts "num_speculative_tokens": "auto"',
        ),
        ({"num_speculative_tokens_per_batch_size": [[1, 8]]}, r"has \[1, 8\]; it needs \[start"),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 9]]}, "K between 0 and .* = 3"),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 2], [4, 9, 1]]}, "after the one before"),
        ({"num_speculative_tokens_per_batch_size": 3}, "must be a list"),
    ],
)
def test_lengths_that_cannot_be_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_mapping({"method": "ngram", "num_speculative_tokens": 3} | values)
