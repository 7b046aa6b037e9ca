"""What distinguishes one decoder from another, as data; read from config.json of either generation.

Knows names and numbers only: weights are read by models/loading, computed by models/decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from paceline.errors import CheckpointError, nearest

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base, kind of scaling and its numbers."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Layers whose MLP is a choice of experts."""

    num_experts: int
    num_chosen: int  # experts of a token
    inner_size: int  # of one expert
    router: Literal["softmax", "sigmoid"] = "softmax"  # sigmoid: DeepSeek's, with a bias by expert
    is_normed: bool = True  # chosen weights are scaled to sum 1
    scaling: float = 1.0
    num_groups: int = 1  # experts come in groups, of which some are kept before the choice
    num_chosen_groups: int = 1
    shared_inner_size: int = 0  # an expert that every token takes; 0 = none
    dense_layers: frozenset[int] = frozenset()  # layers with one ordinary MLP


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention: what is cached is one latent and one rotary key per token."""

    query_rank: int | None  # None: queries are projected at once
    latent_size: int
    nope_size: int  # of a head's query and key, the part without positions
    rope_size: int
    value_size: int
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One causal decoder with grouped-query attention and a gated MLP."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    rope: RopeSpec
    max_position: int
    is_tied: bool
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    sliding_window: int | None = None  # of every layer
    has_first_norm: bool = True  # whether layer 0 norms its input

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        attention = self.hidden_size * self.head_size * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        heads = 1 if self.is_tied else 2
        return self.num_layers * (attention + mlp) + heads * self.vocab_size * self.hidden_size

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * itemsize


def _llama(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return _decoder(
        config,
        "llama",
        has_qkv_bias=bias,
        has_o_bias=bias,
        has_mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _qwen2(config: Config) -> ModelSpec:
    _refuse_sliding_window(config, enabled=bool(config.get("use_sliding_window", False)))
    return _decoder(config, "qwen2", has_qkv_bias=True)


def _qwen3(config: Config) -> ModelSpec:
    _refuse_sliding_window(config, enabled=bool(config.get("use_sliding_window", False)))
    bias = bool(config.get("attention_bias", False))
    return _decoder(config, "qwen3", has_qk_norm=True, has_qkv_bias=bias, has_o_bias=bias)


FAMILIES: dict[str, Callable[[Config], ModelSpec]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}


def read_spec(config: Config) -> ModelSpec:
    """The spec of a config.json; an unknown architecture is refused by name."""
    architectures = config.get("architectures") or []
    for name in architectures:
        if name in FAMILIES:
            _refuse_quantised(config)
            return FAMILIES[name](config)
    found = ", ".join(architectures) or f"model_type {config.get('model_type')!r}"
    hint = nearest(architectures[0], FAMILIES) if architectures else ""
    raise CheckpointError(
        f"architecture {found} is not supported; Paceline serves {', '.join(FAMILIES)}.{hint}"
    )


def read_eagle_spec(config: Config) -> ModelSpec:
    """The spec of an EAGLE-1 head: chosen by its role, for it calls itself a Llama or anything."""
    _refuse_quantised(config)
    marks = [str(config.get("speculators_model_type", "")), *(config.get("architectures") or [])]
    if "draft_vocab_size" in config or any("eagle3" in mark.lower() for mark in marks):
        raise CheckpointError(
            'this is an EAGLE-3 head, which is not supported yet; method "eagle" takes EAGLE-1 '
            "heads."
        )
    # Heads state the length that they were trained with; it limits nothing.
    spec = _llama({"max_position_embeddings": 2048, **config})
    return replace(spec, family="eagle", has_first_norm=False)


def _refuse_quantised(config: Config) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"this checkpoint is quantised with {method!r}, which is not supported; "
            "use the original weights or a GGUF file."
        )


def _decoder(config: Config, family: str, **flags: bool) -> ModelSpec:
    hidden = _number(config, "hidden_size")
    heads = _number(config, "num_attention_heads")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise CheckpointError(f"{heads} attention heads do not divide over {kv_heads} KV heads.")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"hidden_act {activation!r} is not supported; only 'silu' is.")
    max_position = _number(config, "max_position_embeddings")
    return ModelSpec(
        family=family,
        vocab_size=_number(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_number(config, "intermediate_size"),
        num_layers=_number(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=int(config.get("head_dim") or hidden // heads),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config, max_position),
        max_position=max_position,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        **flags,
    )


def _number(config: Config, name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {name} is {value!r}; a positive integer is needed.")
    return value


def _rope(config: Config, max_position: int) -> RopeSpec:
    # transformers 5 writes rope_parameters; older files rope_theta and rope_scaling.
    values = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(values.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = values.get("rope_type") or values.get("type") or "default"
    supported = ("default", "linear", "llama3", "gguf_factors")
    if kind not in supported:
        raise CheckpointError(
            f"rope type {kind!r} is not supported; Paceline computes {', '.join(supported[:3])}."
        )
    original = values.get("original_max_position_embeddings") or max_position
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=float(values.get("factor", 1.0)),
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        original_max_position=int(original),
    )


def _refuse_sliding_window(config: Config, *, enabled: bool) -> None:
    if enabled and config.get("sliding_window"):
        raise CheckpointError(
            f"sliding_window {config['sliding_window']} is in use, which is not supported yet."
        )
