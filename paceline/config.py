"""The engine's configuration: frozen, nested, resolved once. The only place that reads os.environ.

Every field name is unique over all groups, so flags and `LLM(...)` keywords are the flat names.
Field metadata carries the help text; the CLI is generated from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from paceline.errors import ConfigError, nearest

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "pt", "gguf", "dummy"]
All2AllBackend = Literal["allgather_reducescatter", "alltoall"]
DEVICES = ("auto", "cpu", "cuda")
GIB = 1 << 30
_LONGEST_STALL_S = 86_400


def _opt(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which weights, and how to read them."""

    model: str = _opt(
        "", "folder, GGUF file or hub id; empty is the built-in SmolLM2-135M-Instruct"
    )
    tokenizer: str | None = _opt(None, "folder, GGUF file or hub id of the tokenizer")
    revision: str | None = _opt(None, "branch, tag or commit of a hub id")
    dtype: Dtype = _opt("auto", "precision of the weights; auto keeps the checkpoint's")
    load_format: LoadFormat = _opt("auto", "of the weights; dummy: random, from config.json alone")
    max_model_len: int | None = _opt(None, "most tokens of prompt and output together")
    generation_config: str = _opt("auto", "default sampling: auto (the model's), none or a folder")
    max_logprobs: int = _opt(20, "most logprobs a request may ask for")
    logits_processors: tuple[str, ...] = _opt((), "module:Class of custom logits processors")
    skip_tokenizer_init: bool = _opt(False, "load no tokenizer; requests and replies are token ids")
    seed: int = _opt(0, "seed of dummy weights, and of requests without a seed")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = _opt(16, "tokens per KV page")
    enable_prefix_caching: bool = _opt(True, "share the KV of equal prefixes")
    gpu_memory_utilization: float = _opt(0.9, "share of the GPU that Paceline may use")
    kv_cache_memory_bytes: int | None = _opt(
        None,
        "size of the KV cache of a rank; on CPU 1 GiB by default, or half of the memory that is "
        "available to the rank if that is less",
    )
    num_gpu_blocks_override: int | None = _opt(None, "number of KV pages, for tests")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How steps are filled."""

    max_num_seqs: int | None = _opt(None, "most requests that run at once (64; on a GPU 256)")
    max_num_batched_tokens: int | None = _opt(
        None, "most tokens of one step; longer prompts are chunked (2048; on a GPU 8192)"
    )
    scheduling_policy: Literal["fcfs", "priority"] = _opt("fcfs", "order of waiting requests")
    run_ahead: int | None = _opt(None, "steps launched before their results are read (ours; 1)")
    async_scheduling: bool | None = _opt(None, "same as --run-ahead 1; --no-... is --run-ahead 0")

    def sized(self, *, is_gpu: bool) -> SchedulerConfig:
        """With the sizes that nobody gave filled in for the device."""
        seqs, tokens = (256, 8192) if is_gpu else (64, 2048)
        return replace(
            self,
            max_num_seqs=self.max_num_seqs or seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or tokens,
        )

    @property
    def sizes(self) -> tuple[int, int]:
        """Most requests, and most tokens of a step; after `sized`."""
        assert self.max_num_seqs is not None, "sized() comes first"
        assert self.max_num_batched_tokens is not None, "sized() comes first"
        return self.max_num_seqs, self.max_num_batched_tokens

    @property
    def depth(self) -> int:
        if self.run_ahead is not None:
            return self.run_ahead
        return 0 if self.async_scheduling is False else 1


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where it runs."""

    device: str = _opt("auto", "auto, cpu or cuda")
    enforce_eager: bool = _opt(False, "no CUDA graphs")
    cpu_threads: int | None = _opt(None, "threads of the device step on CPU (ours)")
    tensor_parallel_size: int = _opt(1, "ranks that share each layer")
    data_parallel_size: int = _opt(1, "replicas that share the load")
    enable_expert_parallel: bool = _opt(False, "spread experts over all ranks")
    all2all_backend: All2AllBackend = _opt(
        "allgather_reducescatter", "collectives that carry rows to spread experts and back"
    )
    distributed_executor_backend: str | None = _opt(
        None, "mp (the only one): ranks are processes of this machine"
    )
    stall_timeout: float = _opt(
        60.0, "seconds without progress or an answer after which a rank counts as hung (ours)"
    )
    check_collectives: bool = _opt(False, "check that ranks agree on each collective; slow (ours)")
    force_collectives: bool = _opt(False, "run collectives in groups of one rank, for tests (ours)")
    share_gpu: bool = _opt(False, "allow several ranks on one GPU; slow, no CUDA graphs (ours)")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The drafter. Built from the --speculative-config JSON object."""

    method: Literal["ngram", "draft_model", "eagle", "eagle3", "mtp"]
    num_speculative_tokens: int
    model: str | None = None
    revision: str | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    # greedy drafts are one-hot: seeded tokens equal those without speculation
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    rejection_sample_method: Literal["standard", "synthetic"] = "standard"
    # mean tokens of a step, bonus included: the drafts accepted are the two nearest whole numbers
    synthetic_acceptance_length: float | None = None
    # entry i: the chance that the first i + 1 drafts are all accepted
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    # let each request's k follow its own acceptance, unless that is synthetic
    adaptive: bool = True
    # eagle3: after how many layers the target is read; else what the head's config.json says
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    # 1: whole on every rank; None: as many parts as the target has
    draft_tensor_parallel_size: int | None = None
    # the method comes from the model's name only; its config.json may know better
    method_is_guessed: bool = False

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}; it must be at least 1 "
                "(leave --speculative-config out for no drafter)."
            )
        if self.method not in ("ngram", "mtp") and not self.model:
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
        if taps is not None and (self.method != "eagle3" or not taps):
            raise ConfigError(
                "eagle_aux_hidden_state_layer_ids lists the layers that an EAGLE-3 head reads; "
                f'found {list(taps)} with method "{self.method}".'
            )
        self._check_synthetic()

    def _check_synthetic(self) -> None:
        given = (self.synthetic_acceptance_length, self.synthetic_acceptance_rates)
        if self.rejection_sample_method == "standard":
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
                    "chance that the first i + 1 drafts are all accepted (not that of one draft "
                    "given those before it), so that no entry exceeds the one before it."
                )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        values = {name: value for name, value in values.items() if value is not None}
        hints = get_type_hints(cls)
        for name, value in values.items():
            if name not in hints:
                raise ConfigError(f"Unknown speculative_config key {name!r}.{nearest(name, hints)}")
            if name != "method":
                values[name] = _coerce(name, hints[name], value)
        method = values.get("method")
        if not method:
            method, values["method_is_guessed"] = _method_of(values.get("model")), True
        elif str(method).endswith("_mtp"):
            method = "mtp"  # elsewhere it carries the target's family
        methods = get_args(hints["method"])
        if method not in methods:
            raise ConfigError(
                f"speculative method {method!r} is not supported; use one of {', '.join(methods)}."
            )
        if "num_speculative_tokens" not in values:
            raise ConfigError('speculative_config needs "num_speculative_tokens".')
        lookups = {"prompt_lookup_min", "prompt_lookup_max"} & set(values)
        if lookups and len(lookups) == 1:  # one bound given: keep the pair consistent
            if "prompt_lookup_max" in values:
                low = min(cls.prompt_lookup_min, values["prompt_lookup_max"])
                values["prompt_lookup_min"] = low
            else:
                high = max(cls.prompt_lookup_max, values["prompt_lookup_min"])
                values["prompt_lookup_max"] = high
        return cls(**{**values, "method": method})


def _method_of(model: str | None) -> str | None:
    """The method that a draft's own name tells; folders above it tell nothing."""
    if not model:
        return None
    name = Path(model).name.lower()
    if "eagle" not in name:
        return "draft_model"
    return "eagle3" if "eagle3" in name or "eagle-3" in name else "eagle"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All of it. `from_keywords` is the way in; `replace` from dataclasses the way to resolve."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    speculative: SpeculativeConfig | None = None

    @classmethod
    def from_keywords(cls, **keywords: Any) -> EngineConfig:
        """From the flat names of flags and `LLM(...)`; None means 'not given'."""
        spec = keywords.pop("speculative_config", None)
        grouped: dict[str, dict[str, Any]] = {group: {} for group, _ in GROUPS}
        for name, value in keywords.items():
            group = _GROUP_OF.get(name)
            if group is None:
                refuse_by_name(name)
                hint = nearest(name, [*_GROUP_OF, "speculative_config"])
                raise ConfigError(f"Unknown option {name!r}.{hint}")
            if value is not None:
                kind = get_type_hints(dict(GROUPS)[group])[name]
                grouped[group][name] = _coerce(name, kind, value)
        parts = {group: kind(**grouped[group]) for group, kind in GROUPS}
        if isinstance(spec, str):
            spec = _parse_json_object("speculative_config", spec)
        if isinstance(spec, Mapping):
            spec = SpeculativeConfig.from_mapping(spec)
        config = cls(**parts, speculative=spec)
        config._check()
        return config

    def _check(self) -> None:
        s, c, d = self.scheduler, self.cache, self.device
        _positive(max_num_seqs=s.max_num_seqs, max_num_batched_tokens=s.max_num_batched_tokens)
        _positive(block_size=c.block_size, max_model_len=self.model.max_model_len)
        _positive(kv_cache_memory_bytes=c.kv_cache_memory_bytes, cpu_threads=d.cpu_threads)
        if s.run_ahead is not None and not 0 <= s.run_ahead <= 8:
            raise ConfigError(f"run_ahead is {s.run_ahead}; it must be between 0 and 8.")
        both = s.async_scheduling is not None and s.run_ahead is not None
        if both and s.async_scheduling != (s.depth > 0):
            raise ConfigError(
                f"async_scheduling={s.async_scheduling} contradicts run_ahead={s.run_ahead}; "
                "give one of them."
            )
        if not 0.0 < c.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization is {c.gpu_memory_utilization}; it must be in (0, 1]."
            )
        if d.device not in DEVICES:
            raise ConfigError(f"device is {d.device!r}; use one of {', '.join(DEVICES)}.")
        k = self.speculative.num_speculative_tokens if self.speculative else 0
        least = (s.max_num_seqs or 0) * (k + 1)
        if s.max_num_batched_tokens is not None and s.max_num_batched_tokens < least:
            raise ConfigError(
                f"max_num_batched_tokens {s.max_num_batched_tokens} cannot hold max_num_seqs "
                f"{s.max_num_seqs} rows of {k + 1} tokens; raise it to at least "
                f"{least} or lower --max-num-seqs."
            )
        own = self.speculative.model if self.speculative else None
        if (
            own
            and self.speculative
            and self.speculative.method == "mtp"
            and own != self.model.model
        ):
            raise ConfigError(
                f'method "mtp" drafts with a layer of the target; leave out "model" ({own!r}).'
            )
        self._check_ranks()

    def _check_ranks(self) -> None:
        d = self.device
        tp = d.tensor_parallel_size
        _positive(tensor_parallel_size=tp, data_parallel_size=d.data_parallel_size)
        asked = self.speculative.draft_tensor_parallel_size if self.speculative else None
        if asked not in (None, 1, tp):
            raise ConfigError(
                f"draft_tensor_parallel_size is {asked}, tensor_parallel_size {tp}: a draft is "
                f"whole on every rank (1) or cut as the target is ({tp})."
            )
        if d.distributed_executor_backend == "ray":
            raise ConfigError(
                "distributed_executor_backend 'ray' is not supported: several machines are not "
                "supported yet; ranks are processes of this machine: mp."
            )
        if d.distributed_executor_backend not in (None, "mp"):
            raise ConfigError(
                f"distributed_executor_backend is {d.distributed_executor_backend!r}; use mp."
            )
        if not 0 < d.stall_timeout <= _LONGEST_STALL_S:
            raise ConfigError(
                f"stall_timeout is {d.stall_timeout} s; it must be more than 0, and at most "
                f"{_LONGEST_STALL_S} (a day)."
            )

    @property
    def draft_tensor_parallel_size(self) -> int:
        """Parts that a draft is cut into; the target's number unless it was given."""
        asked = self.speculative.draft_tensor_parallel_size if self.speculative else None
        return self.device.tensor_parallel_size if asked is None else asked

    def flat(self) -> dict[str, Any]:
        """Flat names and values, for logs, results and the engine process."""
        values = {f.name: getattr(getattr(self, g), f.name) for g, k in GROUPS for f in fields(k)}
        spec = self.speculative
        values["speculative_config"] = (
            None if spec is None else {f.name: getattr(spec, f.name) for f in fields(spec)}
        )
        return values


GROUPS: tuple[tuple[str, type[Any]], ...] = (
    ("model", ModelConfig),
    ("cache", CacheConfig),
    ("scheduler", SchedulerConfig),
    ("device", DeviceConfig),
)
_GROUP_OF = {f.name: group for group, kind in GROUPS for f in fields(kind)}

# Names that other engines have and we refuse, with the reason.
REFUSED = {
    "trust_remote_code": "Paceline never runs code from a checkpoint; its families are built in.",
    "enable_lora": "LoRA adapters are not supported.",
    "lora_modules": "LoRA adapters are not supported.",
    "max_lora_rank": "LoRA adapters are not supported.",
    "max_loras": "LoRA adapters are not supported.",
    "pipeline_parallel_size": "pipeline parallelism is not supported.",
    "quantization": "give a GGUF file; other quantised formats are not supported yet.",
    "swap_space": "preempted requests are recomputed, never swapped.",
}


def refuse_by_name(name: str) -> None:
    """Raise when `name` is an option that we know and do not support."""
    if name in REFUSED:
        raise ConfigError(f"--{name.replace('_', '-')} is not supported: {REFUSED[name]}")


def option_fields() -> Iterator[tuple[str, Field[Any], Any]]:
    """(group, field, resolved type) of every engine option, in order, for the CLI and the docs."""
    for group, kind in GROUPS:
        hints = get_type_hints(kind)
        for f in fields(kind):
            yield group, f, hints[f.name]


def _coerce(name: str, hint: Any, value: Any) -> Any:
    if get_origin(hint) is Literal and value not in get_args(hint):
        choices = ", ".join(map(str, get_args(hint)))
        raise ConfigError(
            f"{name} is {value!r}; use one of {choices}.{nearest(str(value), get_args(hint))}"
        )
    wanted = get_args(hint) if get_origin(hint) is not Literal and get_args(hint) else (hint,)
    lists = [x for x in (hint, *wanted) if get_origin(x) is tuple]
    if lists:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name} must be a list, got {value!r}.")
        return tuple(_coerce(name, get_args(lists[0])[0], x) for x in value)
    if int in wanted and (isinstance(value, bool) or not isinstance(value, int)):
        raise ConfigError(f"{name} must be an integer, got {value!r}.")
    if float in wanted and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{name} must be a number, got {value!r}.")
    if bool in wanted and not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}.")
    if str in wanted and not isinstance(value, str | Path):
        raise ConfigError(f"{name} must be a string, got {value!r}.")
    return str(value) if isinstance(value, Path) else value


def _parse_json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f'{name} is not JSON ({error}); quote it like \'{{"method": "ngram"}}\'.'
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object, got {text!r}.")
    return value


def _positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1.")


def cache_dir() -> Path:
    """Where Paceline keeps what it fetched: PACELINE_CACHE, else XDG_CACHE_HOME/paceline."""
    explicit = os.environ.get("PACELINE_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def api_key_from_env() -> str | None:
    return os.environ.get("PACELINE_API_KEY") or None
