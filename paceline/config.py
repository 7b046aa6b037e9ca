"""The engine's configuration. The only module that reads os.environ.

Every field name is unique over all groups, so flags and `LLM(...)` keywords are the flat names.
Field metadata carries the help text; the CLI is generated from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

from paceline.errors import ConfigError, nearest
from paceline.option_values import check_positive, check_quantization, coerce, opt
from paceline.speculation import SpeculativeConfig, with_short_names

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "pt", "gguf", "dummy"]
All2AllBackend = Literal["allgather_reducescatter", "alltoall"]
DEVICES = ("auto", "cpu", "cuda")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
GIB = 1 << 30
_LONGEST_STALL_S = 86_400


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model and how it is loaded."""

    model: str = opt("", "folder, GGUF file or hub id; empty is the built-in SmolLM2-135M-Instruct")
    tokenizer: str | None = opt(None, "folder, GGUF file or hub id of the tokenizer")
    revision: str | None = opt(None, "branch, tag or commit of a hub id")
    dtype: Dtype = opt("auto", "precision of the weights; auto keeps the checkpoint's")
    quantization: str | None = opt(
        None,
        "fp8 or fp8_per_channel, fp8_per_block: round weights at load; else what the files say",
    )
    load_format: LoadFormat = opt(
        "auto", "format of the weights; dummy: random, without weight files"
    )
    max_model_len: int | None = opt(None, "most tokens of prompt and output together")
    generation_config: str = opt("auto", "default sampling: auto (the model's), none or a folder")
    max_logprobs: int = opt(20, "most logprobs a request may ask for")
    logits_processors: tuple[str, ...] = opt((), "module:Class of custom logits processors")
    skip_tokenizer_init: bool = opt(False, "load no tokenizer; requests and replies are token ids")
    seed: int = opt(0, "seed of dummy weights and of requests that have no seed")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = opt(16, "tokens per KV page")
    enable_prefix_caching: bool = opt(True, "share the KV of equal prefixes")
    gpu_memory_utilization: float = opt(0.9, "share of the GPU that Paceline may use")
    kv_cache_memory_bytes: int | None = opt(
        None, "a rank's KV cache; on CPU 1 GiB, or half of free memory if less"
    )
    # Snapshots of recurrent state: a prefix hit continues from one.
    state_snapshot_interval: int | None = opt(
        None, "tokens between snapshots of recurrent state (ours; 512)"
    )
    state_snapshot_memory_bytes: int | None = opt(
        None, "their part of the KV cache; 0: none (ours; a quarter)"
    )
    num_gpu_blocks_override: int | None = opt(None, "number of KV pages, for tests")
    kv_cache_dtype: str = opt("auto", "auto (as activations), or fp8 (e4m3: a byte for a number)")

    @property
    def is_fp8(self) -> bool:
        return self.kv_cache_dtype != "auto"


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Sizes and order of steps."""

    max_num_seqs: int | None = opt(None, "most requests that run at once (64; on a GPU 256)")
    max_num_batched_tokens: int | None = opt(
        None, "most tokens of one step; prompts are chunked (2048; on a GPU 8192)"
    )
    scheduling_policy: Literal["fcfs", "priority"] = opt("fcfs", "order of waiting requests")
    run_ahead: int | None = opt(None, "steps launched before their results are read (ours; 1)")
    async_scheduling: bool | None = opt(None, "same as --run-ahead 1; --no-... is --run-ahead 0")
    host_draft_tokens: int = opt(
        7, "most forced tokens of a step, and drafts of a chain's lookup (ours)"
    )

    def sized(self, *, is_gpu: bool) -> SchedulerConfig:
        """With defaults for the device where no size was given."""
        seqs, tokens = (256, 8192) if is_gpu else (64, 2048)
        return replace(
            self,
            max_num_seqs=self.max_num_seqs or seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or tokens,
        )

    @property
    def sizes(self) -> tuple[int, int]:
        """Most requests, and most tokens of a step. Only after `sized`."""
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
    """Device, ranks and collectives."""

    device: str = opt("auto", "auto, cpu or cuda")
    enforce_eager: bool = opt(False, "no CUDA graphs")
    cpu_threads: int | None = opt(None, "threads of the device step on CPU (ours)")
    tensor_parallel_size: int = opt(1, "ranks that share each layer")
    data_parallel_size: int = opt(1, "replicas that share the load")
    enable_expert_parallel: bool = opt(False, "spread experts over all ranks")
    all2all_backend: All2AllBackend = opt(
        "allgather_reducescatter", "collectives that carry rows to spread experts and back"
    )
    distributed_executor_backend: str | None = opt(
        None, "mp: ranks are processes of the front or of headless nodes; ray: Ray places them"
    )
    stall_timeout: float = opt(
        60.0, "seconds without progress or an answer after which a rank counts as hung (ours)"
    )
    max_restarts: int | None = opt(
        None, "restarts of dead ranks in a row; default: serve 5, else 0 (ours)"
    )
    retry: bool = opt(True, "requests of dead ranks go on elsewhere or after a restart (ours)")
    check_collectives: bool = opt(False, "check that ranks agree on each collective; slow (ours)")
    check_syncs: bool = opt(False, "fail if a step makes the host wait for the GPU (ours)")
    force_collectives: bool = opt(False, "run collectives in groups of one rank, for tests (ours)")
    share_gpu: bool = opt(False, "allow several ranks on one GPU; slow, no CUDA graphs (ours)")


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Several machines. Node 0 has the front; the others are headless and connect to it."""

    nnodes: int = opt(1, "machines that share the ranks")
    node_rank: int | None = opt(None, "this machine's number; 0 serves HTTP")
    master_addr: str | None = opt(None, "address of node 0, where it listens for the others")
    master_port: int = opt(29501, "port of node 0 for the others")
    headless: bool = opt(False, "start this node's ranks and no server; node 0 leads")
    data_parallel_size_local: int | None = opt(None, "replicas of this node")
    data_parallel_start_rank: int | None = opt(None, "the first replica of this node")
    data_parallel_address: str | None = opt(None, "same as --master-addr")
    node_address: str | None = opt(None, "this node's address for the others (ours)")
    cluster_key: str | None = opt(None, "secret of all nodes; better: PACELINE_CLUSTER_KEY (ours)")
    join_timeout: float = opt(600.0, "seconds to wait for other nodes (ours)")

    @property
    def address(self) -> str | None:
        """Of node 0."""
        return self.master_addr or self.data_parallel_address

    def check(self, data_parallel_size: int, *, is_placed: bool) -> None:
        check_positive(nnodes=self.nnodes, join_timeout=self.join_timeout)
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"node_rank is {self.node_rank}; it is 0 to nnodes - 1.")
        if not 0 < self.master_port < 65536:
            raise ConfigError(f"master_port is {self.master_port}; it must be a port.")
        both = self.master_addr and self.data_parallel_address
        if both and self.master_addr != self.data_parallel_address:
            raise ConfigError(
                f"master_addr {self.master_addr!r} and data_parallel_address "
                f"{self.data_parallel_address!r} both mean node 0; give one of them."
            )
        if (self.data_parallel_start_rank or 0) < 0:
            raise ConfigError("data_parallel_start_rank must be at least 0.")
        if self.are_several(data_parallel_size) and not self.address and not is_placed:
            raise ConfigError(
                "Several machines need --master-addr, an address of node 0 that the others reach."
            )

    def are_several(self, data_parallel_size: int) -> bool:
        local = self.data_parallel_size_local
        is_part = local is not None and local != data_parallel_size
        return self.nnodes > 1 or self.headless or is_part


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All options. Built by `from_keywords`; values are resolved with dataclasses.replace."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    nodes: NodeConfig = field(default_factory=NodeConfig)
    speculative: SpeculativeConfig | None = None

    @property
    def max_host_drafts(self) -> int:
        """Drafts that the host may propose for a row: forced tokens, or looked up ones."""
        most, spec = self.scheduler.host_draft_tokens, self.speculative
        return most if spec is None else max(most, spec.most_looked_up(most))

    @classmethod
    def from_keywords(cls, **keywords: Any) -> EngineConfig:
        """From the flat names of flags and `LLM(...)`. None means not given."""
        spec = with_short_names(keywords.pop("speculative_config", None), keywords)
        grouped: dict[str, dict[str, Any]] = {group: {} for group, _ in GROUPS}
        for name, value in keywords.items():
            group = _GROUP_OF.get(name)
            if group is None:
                refuse_by_name(name)
                hint = nearest(name, [*_GROUP_OF, "speculative_config"])
                raise ConfigError(f"Unknown option {name!r}.{hint}")
            if value is not None:
                kind = get_type_hints(dict(GROUPS)[group])[name]
                grouped[group][name] = coerce(name, kind, value)
        parts = {group: kind(**grouped[group]) for group, kind in GROUPS}
        if isinstance(spec, Mapping):
            spec = SpeculativeConfig.from_mapping(spec) if spec else None
        config = cls(**parts, speculative=spec)
        config._check()
        return config

    def _check(self) -> None:
        s, c, d = self.scheduler, self.cache, self.device
        check_positive(max_num_seqs=s.max_num_seqs, max_num_batched_tokens=s.max_num_batched_tokens)
        check_positive(block_size=c.block_size, max_model_len=self.model.max_model_len)
        check_quantization(self.model.quantization)
        check_positive(kv_cache_memory_bytes=c.kv_cache_memory_bytes, cpu_threads=d.cpu_threads)
        if s.run_ahead is not None and not 0 <= s.run_ahead <= 8:
            raise ConfigError(f"run_ahead is {s.run_ahead}; it must be between 0 and 8.")
        if not 0 <= s.host_draft_tokens <= 31:
            raise ConfigError(
                f"host_draft_tokens is {s.host_draft_tokens}; it must be between 0 and 31 "
                "(0: no host drafts)."
            )
        both = s.async_scheduling is not None and s.run_ahead is not None
        if both and s.async_scheduling != (s.depth > 0):
            raise ConfigError(
                f"async_scheduling={s.async_scheduling} contradicts run_ahead={s.run_ahead}; "
                "give one of them."
            )
        check_positive(state_snapshot_interval=c.state_snapshot_interval)
        if (c.state_snapshot_memory_bytes or 0) < 0:
            raise ConfigError(
                f"state_snapshot_memory_bytes is {c.state_snapshot_memory_bytes}; it must be at "
                "least 0."
            )
        if (c.state_snapshot_interval or 0) % c.block_size:
            raise ConfigError(
                f"state_snapshot_interval {c.state_snapshot_interval} is not a multiple of "
                f"block_size {c.block_size}; snapshots are taken at the ends of pages."
            )
        if not 0.0 < c.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization is {c.gpu_memory_utilization}; it must be in (0, 1]."
            )
        if c.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"kv_cache_dtype {c.kv_cache_dtype!r} is not supported; use fp8 (e4m3, the most "
                "tokens), or auto (the type of activations, exact)."
            )
        if d.device not in DEVICES:
            raise ConfigError(f"device is {d.device!r}; use one of {', '.join(DEVICES)}.")
        k = self.speculative.max_k if self.speculative else 0
        least = (s.max_num_seqs or 0) * (k + 1)
        if s.max_num_batched_tokens is not None and s.max_num_batched_tokens < least:
            raise ConfigError(
                f"max_num_batched_tokens {s.max_num_batched_tokens} cannot hold max_num_seqs "
                f"{s.max_num_seqs} rows of {k + 1} tokens; raise it to at least "
                f"{least} or lower --max-num-seqs."
            )
        spec = self.speculative
        if spec and spec.method == "mtp" and spec.model not in (None, "", self.model.model):
            raise ConfigError(
                f'method "mtp" drafts with a layer of the target; leave out "model" '
                f"({spec.model!r})."
            )
        self._check_ranks()

    def _check_ranks(self) -> None:
        d = self.device
        tp = d.tensor_parallel_size
        check_positive(tensor_parallel_size=tp, data_parallel_size=d.data_parallel_size)
        asked = self.speculative.draft_tensor_parallel_size if self.speculative else None
        if asked not in (None, 1, tp):
            raise ConfigError(
                f"draft_tensor_parallel_size is {asked} and tensor_parallel_size is {tp}; a draft "
                f"is replicated on every rank (1) or sharded like the target ({tp})."
            )
        if d.distributed_executor_backend not in (None, "mp", "ray"):
            raise ConfigError(
                f"distributed_executor_backend is {d.distributed_executor_backend!r}; use mp or "
                "ray."
            )
        self.nodes.check(d.data_parallel_size, is_placed=d.distributed_executor_backend == "ray")
        if self.is_on_several_machines and d.check_collectives:
            raise ConfigError("check_collectives compares in shared memory: it needs one machine.")
        if (d.max_restarts or 0) < 0:
            raise ConfigError(f"max_restarts is {d.max_restarts}; it must be at least 0.")
        if not 0 < d.stall_timeout <= _LONGEST_STALL_S:
            raise ConfigError(
                f"stall_timeout is {d.stall_timeout} s; it must be more than 0, and at most "
                f"{_LONGEST_STALL_S} (a day)."
            )

    @property
    def is_on_several_machines(self) -> bool:
        is_placed = self.device.distributed_executor_backend == "ray"
        return is_placed or self.nodes.are_several(self.device.data_parallel_size)

    @property
    def draft_tensor_parallel_size(self) -> int:
        """Ranks that share the draft; by default as many as share the target."""
        asked = self.speculative.draft_tensor_parallel_size if self.speculative else None
        return self.device.tensor_parallel_size if asked is None else asked

    def flat(self) -> dict[str, Any]:
        """Flat names and values, for logs, results and the engine process."""
        values = {f.name: getattr(getattr(self, g), f.name) for g, k in GROUPS for f in fields(k)}
        values["cluster_key"] = None  # logs must not show it, and ranks do not need it
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
    ("nodes", NodeConfig),
)
_GROUP_OF = {f.name: group for group, kind in GROUPS for f in fields(kind)}

# Options of other engines that are not supported, with the reason.
REFUSED = {
    "trust_remote_code": "Paceline never runs code from a checkpoint; its families are built in.",
    "enable_lora": "LoRA adapters are not supported.",
    "lora_modules": "LoRA adapters are not supported.",
    "max_lora_rank": "LoRA adapters are not supported.",
    "max_loras": "LoRA adapters are not supported.",
    "data_parallel_rpc_port": "node 0 has one port for the others: --master-port.",
    "pipeline_parallel_size": "pipeline parallelism is not supported.",
    "swap_space": "preempted requests are recomputed, never swapped.",
}


def refuse_by_name(name: str) -> None:
    """Raise if `name` is in REFUSED."""
    if name in REFUSED:
        raise ConfigError(f"--{name.replace('_', '-')} is not supported: {REFUSED[name]}")


def option_fields() -> Iterator[tuple[str, Field[Any], Any]]:
    """(group, field, resolved type) of every engine option, for the CLI and the docs."""
    for group, kind in GROUPS:
        hints = get_type_hints(kind)
        for f in fields(kind):
            yield group, f, hints[f.name]


def cache_dir() -> Path:
    """The folder for downloads: PACELINE_CACHE, else XDG_CACHE_HOME/paceline."""
    explicit = os.environ.get("PACELINE_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


@dataclass(frozen=True)
class Torchrun:
    """What torchrun tells each of its processes."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str


def torchrun_from_env() -> Torchrun | None:
    """None if torchrun has not started this process. Other launchers set RANK too."""
    if os.environ.get("TORCHELASTIC_RUN_ID") is None:
        return None
    return Torchrun(
        rank=int(os.environ["RANK"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        master_addr=os.environ["MASTER_ADDR"],
    )


@dataclass(frozen=True)
class TerminalStyles:
    """What the user wants of terminals: NO_COLOR (no-color.org) and TERM."""

    has_colour: bool
    is_dumb: bool  # it knows no escape sequences


def terminal_styles_from_env() -> TerminalStyles:
    is_dumb = os.environ.get("TERM") in ("dumb", "unknown")
    return TerminalStyles(not os.environ.get("NO_COLOR") and not is_dumb, is_dumb)


def cluster_key_from_env() -> str | None:
    return os.environ.get("PACELINE_CLUSTER_KEY") or None


def api_key_from_env() -> str | None:
    return os.environ.get("PACELINE_API_KEY") or None
