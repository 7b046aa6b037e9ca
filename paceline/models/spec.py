"""What distinguishes one decoder from another, as data; read from config.json of either generation.

Knows names and numbers only: weights are read by models/loading, computed by models/decoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from paceline.errors import CheckpointError, nearest

Config = Mapping[str, Any]
T = TypeVar("T")
_WANTED = {int: "a positive integer", float: "a positive number", dict: "an object", list: "a list"}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base, kind of scaling and its numbers."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0  # yarn: waves that turn so often keep their length
    beta_slow: float = 1.0  # and those that turn so seldom are stretched
    is_truncated: bool = True  # yarn: the ramp between the two begins and ends at whole pairs
    attention_factor: float = 1.0  # yarn: rotated queries and keys are so much longer
    mscale_all_dim: float = 0.0  # DeepSeek: scales the softmax by its own square

    @property
    def softmax_factor(self) -> float:
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


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
    norm_eps: float = 1e-6  # of both narrow vectors, whatever the other norms have
    is_interleaved: bool = True  # rotary pairs are neighbours in the checkpoint

    @property
    def query_size(self) -> int:
        return self.nope_size + self.rope_size

    @property
    def row_size(self) -> int:
        """Numbers that a token has in the cache."""
        return self.latent_size + self.rope_size


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One causal decoder: attention and MLP blocks over a residual stream.

    With latent attention there is one KV head, as wide as what is cached of a token.
    """

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
    def rope_size(self) -> int:
        """Numbers of a head that are rotated."""
        return self.head_size if self.mla is None else self.mla.rope_size

    @property
    def latent_size(self) -> int | None:
        """See Pages.add_layers."""
        return None if self.mla is None else self.mla.latent_size

    @property
    def _attention_parameters(self) -> int:
        width, heads, mla = self.hidden_size, self.num_heads, self.mla
        if mla is None:
            return width * self.head_size * (2 * heads + 2 * self.num_kv_heads)
        query = width * heads * mla.query_size
        if mla.query_rank is not None:
            query = mla.query_rank * (width + heads * mla.query_size)
        kv = width * mla.row_size + heads * (mla.nope_size + mla.value_size) * mla.latent_size
        return query + kv + heads * mla.value_size * width

    @property
    def num_parameters(self) -> int:
        attention = self._attention_parameters
        mlps = sum(self._mlp_parameters(i) for i in range(self.num_layers))
        heads = 1 if self.is_tied else 2
        return self.num_layers * attention + mlps + heads * self.vocab_size * self.hidden_size

    def experts_of(self, layer: int) -> MoeSpec | None:
        """None where a layer has one ordinary MLP."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe

    @property
    def mlp_width(self) -> int:
        """Numbers of one token that live at once inside an MLP block."""
        dense, moe = 3 * self.intermediate_size, self.moe
        if moe is None:
            return dense
        # Of each choice its inner values and, in fp32, what it adds.
        choice = moe.inner_size + 2 * self.hidden_size
        # An MLP of its own, or more choices.
        shared = max(
            3 * moe.shared_inner_size, -(-moe.shared_inner_size // moe.inner_size) * choice
        )
        return max(dense, moe.num_chosen * choice + shared + 2 * moe.num_experts)

    def _mlp_parameters(self, layer: int) -> int:
        moe = self.experts_of(layer)
        if moe is None:
            return 3 * self.hidden_size * self.intermediate_size
        inner = moe.num_experts * moe.inner_size + moe.shared_inner_size
        return self.hidden_size * (3 * inner + moe.num_experts)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        tensors = 2 if self.mla is None else 1
        return tensors * self.num_layers * self.num_kv_heads * self.head_size * itemsize


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


def _mixtral(config: Config) -> ModelSpec:
    spec = _decoder(config, "mixtral")
    moe = _experts(config, inner_size=spec.intermediate_size)
    return replace(spec, moe=moe, sliding_window=_sliding_window(config))


def _qwen3_moe(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    spec = _decoder(config, "qwen3_moe", has_qk_norm=True, has_qkv_bias=bias, has_o_bias=bias)
    every = value_of(config, "decoder_sparse_step", int, 1)
    dense = {i for i in range(spec.num_layers) if (i + 1) % every}
    moe = _experts(
        config,
        inner_size=value_of(config, "moe_intermediate_size", int),
        is_normed=bool(config.get("norm_topk_prob", False)),
        dense_layers=frozenset(dense.union(value_of(config, "mlp_only_layers", list, []))),
    )
    window = _sliding_window(config) if config.get("use_sliding_window") else None
    return replace(spec, moe=moe, sliding_window=window)


def _deepseek_v3(config: Config) -> ModelSpec:
    num_dense = value_of(config, "first_k_dense_replace", int, 0)
    return _latent_decoder(config, "deepseek_v3", frozenset(range(num_dense)))


def _glm4_moe_lite(config: Config) -> ModelSpec:
    # transformers 5 writes a list; older files the number of dense layers.
    kinds = value_of(config, "mlp_layer_types", list, [])
    if not kinds:
        values = {"first_k_dense_replace": 1, **config}
        num_dense = value_of(values, "first_k_dense_replace", int, 0)
        return _latent_decoder(config, "glm4_moe_lite", frozenset(range(num_dense)))
    is_known = all(kind in ("dense", "sparse") for kind in kinds)
    if not is_known or len(kinds) < value_of(config, "num_hidden_layers", int):
        raise CheckpointError(
            f"mlp_layer_types {kinds!r} is not understood; it names each layer 'dense' or 'sparse'."
        )
    dense = frozenset(i for i, kind in enumerate(kinds) if kind == "dense")
    return _latent_decoder(config, "glm4_moe_lite", dense)


def _latent_decoder(config: Config, family: str, dense_layers: frozenset[int]) -> ModelSpec:
    """Latent attention, and experts behind a sigmoid router in all but some layers."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent, nope, rope, value = (value_of(config, name, int) for name in names)
    mla = MlaSpec(
        query_rank=value_of(config, "q_lora_rank", int, 0) or None,
        latent_size=latent,
        nope_size=nope,
        rope_size=rope,
        value_size=value,
        is_interleaved=config.get("rope_interleave") is not False,
    )
    bias = bool(config.get("attention_bias", False))
    # head_dim is another name of qk_rope_head_dim here, and KV heads are what the latent becomes.
    heads = {"num_key_value_heads": 1, "head_dim": mla.row_size}
    spec = _decoder({**config, **heads}, family, has_qkv_bias=bias, has_o_bias=bias)
    return replace(spec, mla=mla, moe=_sigmoid_moe(config, dense_layers))


def _sigmoid_moe(config: Config, dense_layers: frozenset[int]) -> MoeSpec:
    for name, known in (("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        found = config.get(name) or known
        if found != known:
            raise CheckpointError(f"{name} {found!r} is not supported; {known!r} is.")
    inner = value_of(config, "moe_intermediate_size", int)
    return _experts(
        config,
        inner_size=inner,
        router="sigmoid",
        is_normed=bool(config.get("norm_topk_prob", True)),
        scaling=value_of(config, "routed_scaling_factor", float, 1.0),
        num_groups=value_of(config, "n_group", int, 1),
        num_chosen_groups=value_of(config, "topk_group", int, 1),
        shared_inner_size=inner * value_of(config, "n_shared_experts", int, 0),
        dense_layers=dense_layers,
    )


FAMILIES: dict[str, Callable[[Config], ModelSpec]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Glm4MoeLiteForCausalLM": _glm4_moe_lite,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}


def read_spec(config: Config) -> ModelSpec:
    """The spec of a config.json; an unknown architecture is refused by name."""
    architectures = [str(x) for x in value_of(config, "architectures", list, [])]
    for name in architectures:
        if name in FAMILIES:
            refuse_quantised(config)
            return FAMILIES[name](config)
    found = ", ".join(architectures) or f"model_type {config.get('model_type')!r}"
    hint = nearest(architectures[0], FAMILIES) if architectures else ""
    raise CheckpointError(
        f"architecture {found} is not supported; Paceline serves {', '.join(FAMILIES)}.{hint}"
    )


def refuse_quantised(config: Config) -> None:
    quantised = value_of(config, "quantization_config", dict, {})
    if quantised and fp8_block_size(config) is None:
        method = quantised.get("quant_method") or quantised.get("quant_algo", "unknown")
        raise CheckpointError(
            f"this checkpoint is quantised with {method!r}, which is not supported; "
            "use the original weights, fp8 with a weight_block_size of [rows, columns], or a GGUF."
        )


def fp8_block_size(config: Config) -> tuple[int, int] | None:
    """Rows and columns that share a scale (models/block_fp8); None: not this format."""
    quantised = config.get("quantization_config") or {}
    size = quantised.get("weight_block_size")
    if quantised.get("quant_method") != "fp8" or not isinstance(size, list):
        return None
    rows, columns = (size[0], size[1]) if [type(x) for x in size] == [int, int] else (0, 0)
    return (rows, columns) if min(rows, columns) > 0 else None


def _decoder(config: Config, family: str, **flags: Any) -> ModelSpec:
    hidden = value_of(config, "hidden_size", int)
    heads = value_of(config, "num_attention_heads", int)
    kv_heads = value_of(config, "num_key_value_heads", int, heads)
    if heads % kv_heads:
        raise CheckpointError(f"{heads} attention heads do not divide over {kv_heads} KV heads.")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"hidden_act {activation!r} is not supported; only 'silu' is.")
    max_position = value_of(config, "max_position_embeddings", int)
    return ModelSpec(
        family=family,
        vocab_size=value_of(config, "vocab_size", int),
        hidden_size=hidden,
        intermediate_size=value_of(config, "intermediate_size", int),
        num_layers=value_of(config, "num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=value_of(config, "head_dim", int, hidden // heads),
        norm_eps=value_of(config, "rms_norm_eps", float, 1e-6),
        rope=_rope(config, max_position),
        max_position=max_position,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        **flags,
    )


def _experts(config: Config, **values: Any) -> MoeSpec:
    """transformers 5 calls every count of experts num_local_experts."""
    known = values.get("router", "softmax")
    router = config.get("scoring_func") or known
    if router != known:
        raise CheckpointError(f"router {router!r} is not supported here; only {known!r} is.")
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    name = next((n for n in names if config.get(n) is not None), names[0])
    moe = MoeSpec(
        num_experts=value_of(config, name, int),
        num_chosen=value_of(config, "num_experts_per_tok", int),
        **values,
    )
    candidates = moe.num_experts // moe.num_groups * moe.num_chosen_groups
    if moe.num_chosen > candidates:
        raise CheckpointError(
            f"config.json: num_experts_per_tok is {moe.num_chosen}, but only {candidates} experts "
            "can be chosen from."
        )
    is_uneven = moe.num_experts % moe.num_groups or moe.num_experts < 2 * moe.num_groups
    if moe.num_groups > 1 and is_uneven:
        raise CheckpointError(
            f"config.json: {moe.num_experts} experts do not divide over {moe.num_groups} groups of "
            "two or more."
        )
    return moe


def _sliding_window(config: Config) -> int | None:
    """How many positions, its own included, a token sees; null: all."""
    is_given = config.get("sliding_window") is not None
    return value_of(config, "sliding_window", int) if is_given else None


def value_of(config: Config, name: str, kind: type[T], default: T | None = None) -> T:
    """What config.json says. A default stands for null, 0 and what is empty or not there."""
    value: Any = config.get(name)
    if not value and default is not None:
        return default
    kinds: Any = (int, float) if kind is float else kind
    is_right = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_right or (kind in (int, float) and not 0 < value < math.inf):
        raise CheckpointError(f"config.json: {name} is {value!r}; {_WANTED[kind]} is needed.")
    found: T = value
    return found


def _rope(config: Config, max_position: int) -> RopeSpec:
    # transformers 5 writes rope_parameters; older files, and people, rope_theta and rope_scaling.
    news, olds = (value_of(config, x, dict, {}) for x in ("rope_parameters", "rope_scaling"))
    values = olds or news
    thetas = (value_of(x, "rope_theta", float, 0.0) for x in (values, news, config))
    theta = next(filter(None, thetas), 10000.0)
    kind = values.get("rope_type") or values.get("type") or "default"
    supported = ("default", "linear", "llama3", "yarn", "gguf_factors")
    if kind not in supported:
        raise CheckpointError(
            f"rope type {kind!r} is not supported; Paceline computes {', '.join(supported[:4])}."
        )
    share = values.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if share != 1.0:
        raise CheckpointError(
            f"partial_rotary_factor {share} is not supported; Paceline rotates whole heads (1.0)."
        )
    original = value_of(values, "original_max_position_embeddings", int, max_position)
    if kind == "yarn":
        return _yarn(values, theta, original, max_position)
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=value_of(values, "factor", float, 1.0),
        low_freq_factor=value_of(values, "low_freq_factor", float, 1.0),
        high_freq_factor=value_of(values, "high_freq_factor", float, 4.0),
        original_max_position=original,
    )


def _yarn(values: Config, theta: float, original: int, max_position: int) -> RopeSpec:
    factor = value_of(values, "factor", float, max_position / original)
    # 0 counts as absent, as in transformers.
    mscale, all_dim = (value_of(values, x, float, 0.0) for x in ("mscale", "mscale_all_dim"))
    length = value_of(values, "attention_factor", float, 0.0)
    if not length:
        length = yarn_mscale(factor)
        if mscale and all_dim:
            length = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=value_of(values, "beta_fast", float, 32.0),
        beta_slow=value_of(values, "beta_slow", float, 1.0),
        is_truncated=bool(values.get("truncate", True)),
        attention_factor=length,
        mscale_all_dim=all_dim,
    )


def _refuse_sliding_window(config: Config, *, enabled: bool) -> None:
    if enabled and config.get("sliding_window"):
        raise CheckpointError(
            f"sliding_window {config['sliding_window']} is in use, which is not supported yet."
        )
