"""The drafter's options: every key of --speculative-config, what it means, and what is refused.

`SpeculativeConfig` has the keys that are served, NOT_SERVED the other keys of vLLM 0.32 and
`draft_sink_size`. docs/write_reference.py makes the tables of docs/howto/speculation.md from them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from paceline.errors import ConfigError, nearest
from paceline.option_values import check_positive, check_quantization, coerce, opt

logger = logging.getLogger(__name__)

# The drafter of `paceline serve` without MODEL: n-gram lookup needs no second model.
DEFAULT_SPECULATION = {"method": "ngram", "num_speculative_tokens": 5}
AUTO = "auto"  # as num_speculative_tokens
MOST_AUTO = 7
Method = Literal[
    "ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark", "peagle", "pard"
]
HostMethod = Literal["suffix", "ngram"]
CHAIN_EXAMPLE = '["suffix", "mtp"]'
# Families whose MTP layers had a method of their own in vLLM: NAME_mtp.
_MTP_FAMILIES = (
    *("deepseek", "dots3_note", "mimo", "mimo_v2", "glm4_moe", "glm4_moe_lite", "glm_ocr"),
    *("ernie", "nemotron_h", "exaone_moe", "exaone4_5", "qwen3_next", "qwen4_exp", "qwen3_5"),
    *("longcat_flash", "bailing_hybrid_v3", "minimax_m3", "bailing_hybrid", "kimi_k3"),
    *("pangu_ultra_moe", "step3p5", "hy_v3", "hy_v4", "gemma4", "inkling", "glm5_next"),
)
OLD_MTP_METHODS = tuple(f"{family}_mtp" for family in _MTP_FAMILIES)
METHOD_ALIASES = {
    "ngram_gpu": "ngram",
    "[ngram]": "ngram",
    "p-eagle": "peagle",
    "p_eagle": "peagle",
    "dflash2": "dflash",
    **dict.fromkeys(OLD_MTP_METHODS, "mtp"),
}
_USE_A_HEAD = 'use "eagle3" or "mtp" if there is a head for the target, else "ngram".'
# With parallel_drafting: the methods that make all drafts in one pass.
_ONE_PASS = {"eagle": "peagle", "eagle3": "peagle", "draft_model": "pard"}
BLOCK_METHODS = ("dflash", "dspark", "peagle", "pard")
METHODS_NOT_SERVED = {
    "medusa": f"Medusa heads are not supported; {_USE_A_HEAD}",
    "mlp_speculator": f"MLP speculators are not supported; {_USE_A_HEAD}",
    "custom_class": "Paceline loads no drafter classes; docs/howto/extend.md says how to add one.",
    "extract_hidden_states": "it drafts nothing; leave out --speculative-config.",
}


class NotServed(NamedTuple):
    """A key of vLLM that Paceline has no use for."""

    advice: str
    neutral: tuple[Any, ...] = ()  # values that ask for what Paceline does anyway


_INTERNAL = NotServed("vLLM sets it itself; leave it out.")
NOT_SERVED: dict[str, NotServed] = {
    "tensor_parallel_size": NotServed("use draft_tensor_parallel_size."),
    "enforce_eager": NotServed(
        "the draft runs in the target's graph; use --enforce-eager for both.", (False,)
    ),
    "code_revision": NotServed("no code of a checkpoint is run; leave it out."),
    "moe_backend": NotServed("the draft's kernels are the target's; leave it out.", ("auto",)),
    "attention_backend": NotServed("the draft's kernels are the target's; leave it out."),
    "kv_cache_dtype": NotServed("the draft's KV has the target's type; leave it out.", ("auto",)),
    "draft_load_config": NotServed("the draft's format is read from its files; leave it out."),
    "index_share_for_mtp_iteration": NotServed(
        "no MTP layer with a sparse index is supported; leave it out.", (False,)
    ),
    "disable_padded_drafter_batch": NotServed(
        "drafts never wait for the host, whatever the batch; leave it out.", (False,)
    ),
    "disable_eagle_block_drop": NotServed(
        "a head needs the last block of a prefix hit computed again; leave it out.", (False,)
    ),
    "use_local_argmax_reduction": NotServed(
        "greedy drafts of several ranks always are one value and id per rank; sampled drafts need "
        "all logits.",
        (False, True),
    ),
    "dspark_draft_topk": NotServed("a DSpark head drafts from its whole vocabulary; leave it out."),
    "draft_sink_size": NotServed(
        "a draft with draft_window_size sees its last positions and no sinks; leave it out.", (0,)
    ),
    "target_model_config": _INTERNAL,
    "target_parallel_config": _INTERNAL,
    "draft_model_config": _INTERNAL,
    "draft_parallel_config": _INTERNAL,
}
# Flags and `LLM(...)` keywords beside speculative_config -> its key.
SHORT_NAMES = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The drafter, from the JSON object of --speculative-config. Help texts are for the docs."""

    # Of a chain, the drafter on the device.
    method: Method = opt(MISSING, "see above; without it, from the name and config of `model`")
    num_speculative_tokens: int = opt(
        MISSING,
        'K, the most drafts of a step, or `"auto"`: see above; if not given, `mtp`: 1, `suffix`: '
        "the tree depth",
    )
    max_num_speculative_tokens: int | None = opt(
        None, f'`"num_speculative_tokens": "auto"`: the most drafts of a step; {MOST_AUTO}'
    )
    num_speculative_tokens_per_batch_size: tuple[tuple[int, ...], ...] | None = opt(
        None,
        "`[start, end, K]` each: at most K drafts while `start` to `end` requests run; gaps keep "
        "the last K",
    )
    model: str | None = opt(None, "folder, GGUF file or hub id of the draft")
    revision: str | None = opt(None, "branch, tag or commit of the draft's hub id")
    quantization: str | None = opt(
        None, "as `--quantization`, for the draft's weights; `mtp` follows the target's"
    )
    max_model_len: int | None = opt(
        None, "longer requests go on without drafts; never more than the draft was made for"
    )
    draft_window_size: int | None = opt(
        None,
        "drafters that are models: the draft sees this many last positions, its own included, so "
        "its attention does not grow with the context",
    )
    use_heterogeneous_vocab: bool = opt(
        False,
        "`draft_model` of another vocabulary: drafts tokens that both have; greedy drafts only",
    )
    prompt_lookup_min: int = opt(2, "`ngram`: least tokens of the n-gram (vLLM: 5)")
    prompt_lookup_max: int = opt(4, "`ngram`: most tokens of the n-gram (vLLM: 5)")
    suffix_decoding_max_tree_depth: int = opt(24, "`suffix`: longer matches count as this long")
    suffix_decoding_max_cached_requests: int = opt(
        0, "`suffix`: answers of other requests that are remembered and searched (vLLM: 10000)"
    )
    suffix_decoding_max_spec_factor: float = opt(
        1.0, "`suffix`: drafts for each token of the match"
    )
    suffix_decoding_min_token_prob: float = opt(
        0.1, "`suffix`: drafts whose path is followed less often are not made"
    )
    draft_sample_method: Literal["greedy", "probabilistic", "coupled"] = opt(
        "greedy", "how drafts are chosen: see below; `coupled` is ours"
    )
    rejection_sample_method: Literal["standard", "block", "synthetic"] = opt(
        "standard", "how drafts are accepted: see below"
    )
    synthetic_acceptance_length: float | None = opt(
        None, "`synthetic`: mean tokens per step, bonus token included"
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = opt(
        None, "instead: entry i is the chance that the first i + 1 drafts are all accepted"
    )
    # Not used with synthetic acceptance, which does not depend on the drafts.
    adaptive: bool = opt(
        True,
        "each request's k follows its acceptance; `enable_adaptive_verification`, and a chain with "
        "a model, mean `auto` with `num_speculative_tokens` as the most",
    )
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = opt(
        None,
        "`eagle3`, `peagle`: the residual stream after these numbers of layers is read; default: "
        "config",
    )
    parallel_drafting: bool = opt(
        False, "all drafts in one pass: `eagle3` means `peagle`, `draft_model` means `pard`"
    )
    draft_tensor_parallel_size: int | None = opt(
        None, "1: the draft is whole on every rank; default: sharded like the target"
    )
    # The method was derived from the model's name; its config.json may override it.
    method_is_guessed: bool = False
    # What the host looks up: all drafts of `suffix`, or those of a chain beside the drafter's.
    host_method: HostMethod | None = None

    @property
    def max_k(self) -> int:
        """Drafts of the drafter on the device. Those of the host take tokens that are left over."""
        return 0 if self.method == "suffix" else self.num_speculative_tokens

    def most_looked_up(self, host_draft_tokens: int) -> int:
        """Drafts of a step that the host looks up. In a chain they may be more than the
        drafter's K, as forced tokens may."""
        if self.host_method is None:
            return 0
        k = self.num_speculative_tokens
        return k if self.method == "suffix" else max(k, host_draft_tokens)

    # "auto", or enable_adaptive_verification. num_speculative_tokens is the largest K then.
    is_auto: bool = False

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}; it must be at least 1 "
                "(leave --speculative-config out for no drafter)."
            )
        if self.method not in ("ngram", "suffix", "mtp") and not self.model:
            kind = "draft" if self.method == "draft_model" else "head"
            raise ConfigError(
                f'method "{self.method}" needs "model": the folder or hub id of the {kind}.'
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min {self.prompt_lookup_min} and prompt_lookup_max "
                f"{self.prompt_lookup_max}: need 1 <= min <= max."
            )
        taps = self.eagle_aux_hidden_state_layer_ids
        if taps is not None and (self.method not in ("eagle3", "peagle") or not taps):
            raise ConfigError(
                "eagle_aux_hidden_state_layer_ids lists the layers that an EAGLE-3 head reads; "
                f'found {list(taps)} with method "{self.method}".'
            )
        check_quantization(self.quantization)
        check_positive(max_model_len=self.max_model_len, draft_window_size=self.draft_window_size)
        if self.draft_window_size is not None and self.method in ("ngram", "suffix"):
            raise ConfigError(
                f'draft_window_size is for drafters that are models, not "{self.method}"; drop it.'
            )
        self._check_lengths()
        self._check_vocabulary()
        self._check_synthetic()
        self._check_suffix()

    def _check_suffix(self) -> None:
        for f in fields(self):
            is_given = getattr(self, f.name) != f.default
            if f.name.startswith("suffix_decoding_") and is_given and self.host_method != "suffix":
                raise ConfigError(
                    f'{f.name} belongs to "suffix"; add it to "method" or leave {f.name} out.'
                )
        if self.suffix_decoding_max_tree_depth < 2:
            raise ConfigError(
                f"suffix_decoding_max_tree_depth is {self.suffix_decoding_max_tree_depth}; it must "
                "be at least 2: a match has two tokens."
            )
        if self.suffix_decoding_max_cached_requests < 0:
            raise ConfigError(
                "suffix_decoding_max_cached_requests is "
                f"{self.suffix_decoding_max_cached_requests}; 0 remembers no answer."
            )
        if not 0 < self.suffix_decoding_max_spec_factor <= 1000:
            raise ConfigError(
                f"suffix_decoding_max_spec_factor is {self.suffix_decoding_max_spec_factor}; it "
                "must be more than 0, at most 1000."
            )
        if not 0 <= self.suffix_decoding_min_token_prob <= 1:
            raise ConfigError(
                f"suffix_decoding_min_token_prob is {self.suffix_decoding_min_token_prob}; it must "
                "be between 0 and 1."
            )
        if self.host_method is not None and self.rejection_sample_method == "synthetic":
            raise ConfigError(
                'synthetic acceptance is for one drafter that always drafts; with "suffix" or a '
                "chain leave out rejection_sample_method."
            )

    def _check_lengths(self) -> None:
        if self.max_num_speculative_tokens is not None and not self.is_auto:
            raise ConfigError(
                'max_num_speculative_tokens needs "num_speculative_tokens": "auto"; without it '
                "num_speculative_tokens is the most."
            )
        if self.is_auto and not self.adaptive:
            raise ConfigError(
                '"adaptive": false contradicts "num_speculative_tokens": "auto" and '
                "enable_adaptive_verification; leave one out."
            )
        last = 0
        for entry in self.num_speculative_tokens_per_batch_size or ():
            start, end, k = entry if len(entry) == 3 else (0, 0, 0)
            if not last < start <= end or not 0 <= k <= self.num_speculative_tokens:
                raise ConfigError(
                    f"num_speculative_tokens_per_batch_size has {list(entry)}; it needs [start, "
                    "end, K] with 1 <= start <= end, each after the one before, and K between 0 "
                    f"and num_speculative_tokens = {self.num_speculative_tokens}."
                )
            last = end

    @property
    def k_tiers(self) -> tuple[int, ...]:
        """The K of steps with fixed shapes, 0 first: a step has the next larger one."""
        most = self.max_k
        tiers = (0, *(k for k in (1, 3) if k < most and self.is_auto), most)
        return tiers if most else (0,)

    def _check_vocabulary(self) -> None:
        if not self.use_heterogeneous_vocab:
            return
        if self.method != "draft_model" and not self.method_is_guessed:
            raise ConfigError(
                f'use_heterogeneous_vocab is for "draft_model"; a draft of method "{self.method}" '
                "has the target's vocabulary. Leave it out."
            )
        if self.draft_sample_method != "greedy":
            raise ConfigError(
                "use_heterogeneous_vocab needs greedy drafts; leave out "
                f'"draft_sample_method": "{self.draft_sample_method}".'
            )

    def _check_synthetic(self) -> None:
        given = (self.synthetic_acceptance_length, self.synthetic_acceptance_rates)
        if self.rejection_sample_method != "synthetic":
            if given != (None, None):
                raise ConfigError(
                    'synthetic_acceptance_* needs "rejection_sample_method": "synthetic".'
                )
            return
        if (given[0] is None) == (given[1] is None):
            raise ConfigError(
                "synthetic acceptance needs exactly one of synthetic_acceptance_length and "
                "synthetic_acceptance_rates."
            )
        k = self.num_speculative_tokens
        if given[0] is not None and not 1.0 <= given[0] <= k + 1:
            raise ConfigError(
                f"synthetic_acceptance_length is {given[0]}; it counts the bonus and must lie "
                f"between 1 and num_speculative_tokens + 1 = {k + 1}."
            )
        if given[1] is not None:
            self._check_rates(given[1])

    def _check_rates(self, rates: tuple[float, ...]) -> None:
        k = self.num_speculative_tokens
        if len(rates) != k or any(not 0 <= r <= 1 for r in rates):
            raise ConfigError(
                f"synthetic_acceptance_rates is {list(rates)}; it needs num_speculative_tokens = "
                f"{k} numbers between 0 and 1."
            )
        for before, rate in pairwise(rates):
            if rate > before:
                raise ConfigError(
                    f"synthetic_acceptance_rates rises from {before} to {rate}; entry i is the "
                    "probability that the first i + 1 drafts are all accepted (not a conditional "
                    "one), so no entry may exceed the one before it."
                )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        values = {name: value for name, value in values.items() if value is not None}
        hints = get_type_hints(cls)
        _take_not_served(values, hints)
        if values.get("num_speculative_tokens") == AUTO:
            most = values.setdefault("max_num_speculative_tokens", MOST_AUTO)
            values |= {"num_speculative_tokens": most, "is_auto": True}
        for name, value in values.items():
            if name not in ("method", "host_method"):
                values[name] = coerce(name, hints[name], value)
        method = _split_chain(values)
        if not method:
            method, values["method_is_guessed"] = _method_of(values.get("model")), True
        method = method_named(method)
        if values.get("parallel_drafting"):
            method = _one_pass(method)
        if method == "suffix":
            values["host_method"] = "suffix"
        elif "host_method" in values and method != "ngram" and values.get("adaptive", True):
            values["is_auto"] = True  # what is looked up is free, a model's drafts are not
        if "num_speculative_tokens" not in values:
            depth = values.get("suffix_decoding_max_tree_depth", cls.suffix_decoding_max_tree_depth)
            # An MTP layer was trained for one token.
            by_method = {"mtp": 1, "suffix": depth}
            if method not in by_method:
                raise ConfigError('speculative_config needs "num_speculative_tokens".')
            values["num_speculative_tokens"] = by_method[method]
        # If one bound is given, the default of the other must not contradict it.
        if (high := values.get("prompt_lookup_max")) is not None:
            values.setdefault("prompt_lookup_min", min(cls.prompt_lookup_min, high))
        elif (low := values.get("prompt_lookup_min")) is not None:
            values["prompt_lookup_max"] = max(cls.prompt_lookup_max, low)
        return cls(**{**values, "method": method})


def _take_not_served(values: dict[str, Any], hints: Mapping[str, Any]) -> None:
    """Take the keys out that are not served but ask for nothing else; refuse the others."""
    if values.pop("enable_adaptive_verification", False):
        values["is_auto"] = True
    is_greedy = values.get("draft_sample_method", "greedy") == "greedy"
    for name in list(values):
        if name in NOT_SERVED:
            value, (advice, neutral) = values.pop(name), NOT_SERVED[name]
            is_argmax = name == "use_local_argmax_reduction" and value and not is_greedy
            if value not in neutral or is_argmax:
                raise ConfigError(f"speculative_config key {name!r} is {value!r}: {advice}")
        elif name not in hints:
            known = [*hints, *NOT_SERVED]
            raise ConfigError(f"Unknown speculative_config key {name!r}.{nearest(name, known)}")


def _one_pass(method: str) -> str:
    if method not in (*_ONE_PASS, *BLOCK_METHODS):
        raise ConfigError(
            f'parallel_drafting makes all drafts in one pass, which method "{method}" cannot; it '
            "goes with eagle3, draft_model, dflash and dspark."
        )
    return _ONE_PASS.get(method, method)


def method_named(name: Any) -> str:
    """The method by any of its names. Refuses others."""
    methods = get_args(Method)
    if isinstance(name, str) and name in METHOD_ALIASES:
        logger.warning("speculative method %r is now %r", name, METHOD_ALIASES[name])
        return METHOD_ALIASES[name]
    if name in methods:
        return str(name)
    if isinstance(name, str) and name in METHODS_NOT_SERVED:
        raise ConfigError(f"speculative method {name!r}: {METHODS_NOT_SERVED[name]}")
    raise ConfigError(
        f"speculative method {name!r} is not supported; use one of {', '.join(methods)}."
        f"{nearest(str(name), methods)}"
    )


def _split_chain(values: dict[str, Any]) -> Any:
    """The drafter's method. If `method` is a list, what the host looks up becomes `host_method`."""
    method = values.get("method")
    if not isinstance(method, list | tuple):
        return method
    names = [method_named(name) for name in method]
    if len(names) == 1:
        return names[0]
    looked_up = [name for name in names if name in get_args(HostMethod)]
    if len(names) != 2 or names[0] == names[1] or not looked_up:
        raise ConfigError(
            f'"method" is {json.dumps(list(method))}; a chain is one of "suffix" and "ngram", and '
            f"one other drafter, for example {CHAIN_EXAMPLE}."
        )
    # Of "suffix" and "ngram" the device can do "ngram".
    host = "suffix" if "suffix" in looked_up else looked_up[0]
    values["host_method"] = host
    return names[1 - names.index(host)]


def _method_of(model: str | None) -> str | None:
    """The method by the last part of the draft's name or path."""
    if not model:
        return None
    name = Path(model).name.lower()
    if "eagle" not in name:
        return "draft_model"
    return "eagle3" if "eagle3" in name or "eagle-3" in name else "eagle"


def with_short_names(spec: Any, keywords: dict[str, Any]) -> Any:
    """`spec` with spec_method, spec_model and spec_tokens, which are taken out of `keywords`."""
    if isinstance(spec, str):
        spec = parse_speculative_config(spec)
    given = {key: keywords.pop(name, None) for name, key in SHORT_NAMES.items()}
    given = {key: value for key, value in given.items() if value is not None}
    if not given or isinstance(spec, SpeculativeConfig):
        return spec
    if spec == {}:
        raise ConfigError("--speculative-config none contradicts --spec-method; give one of them.")
    for name, key in SHORT_NAMES.items():
        said = (spec or {}).get(key)
        if key in given and said is not None and said != given[key]:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} {given[key]} contradicts {key} {said!r} of --speculative-config; give one "
                "of them."
            )
    return {**(spec or {}), **given}


def parse_speculative_config(text: str) -> dict[str, Any]:
    """The JSON object in `text`, or in the file that it names as @FILE or FILE; {} for "none"."""
    if text.strip().lower() == "none":
        return {}
    where, path = "speculative_config", text.strip().removeprefix("@")
    if text.strip().startswith("@") or (not path.startswith("{") and Path(path).is_file()):
        where = path
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"speculative_config {path} cannot be read: {error}.") from None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        example = json.dumps(DEFAULT_SPECULATION)
        raise ConfigError(
            f"{where} is not JSON ({error}); write it like '{example}', name a file of it, or none."
        ) from None
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"{where} must be a JSON object or none, got {text!r}.")
    return value
