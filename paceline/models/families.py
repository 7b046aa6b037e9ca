"""The model families that Paceline serves: config.json to ModelSpec, one reader per architecture.

A family made of known blocks is one reader here. A family with a new block adds the block's class
to models/blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from paceline.errors import CheckpointError, nearest
from paceline.kernels.delta_rule.reference import DeltaSizes
from paceline.models.blocks.delta_net import DeltaNetSpec
from paceline.models.blocks.dense_mlp import DenseSpec
from paceline.models.blocks.experts import MoeSpec
from paceline.models.blocks.grouped_attention import GroupedSpec
from paceline.models.blocks.latent_attention import LatentSpec
from paceline.models.config_json import Config, flag_of, value_of
from paceline.models.quantised_config import refuse_quantised
from paceline.models.rope import RopeSpec, read_rope
from paceline.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec


def _llama(config: Config) -> ModelSpec:
    bias = flag_of(config, "attention_bias")
    attention = _grouped(config, has_qkv_bias=bias, has_o_bias=bias)
    return _decoder(config, "llama", attention, _dense(config, flag_of(config, "mlp_bias")))


def _qwen2(config: Config) -> ModelSpec:
    _refuse_sliding_window(config)
    return _decoder(config, "qwen2", _grouped(config, has_qkv_bias=True), _dense(config))


def _qwen3(config: Config) -> ModelSpec:
    _refuse_sliding_window(config)
    return _decoder(config, "qwen3", _qwen3_attention(config), _dense(config))


def _mixtral(config: Config) -> ModelSpec:
    moe = _moe(config, inner_size=value_of(config, "intermediate_size", int))
    return _decoder(config, "mixtral", _grouped(config), moe, window=_sliding_window(config))


def _qwen3_moe(config: Config) -> ModelSpec:
    moe = _moe(
        config,
        inner_size=value_of(config, "moe_intermediate_size", int),
        is_normed=flag_of(config, "norm_topk_prob"),
    )
    window = _sliding_window(config) if config.get("use_sliding_window") else None
    attention = _qwen3_attention(config)
    dense = _dense_layers(config)
    return _decoder(config, "qwen3_moe", attention, moe, dense_layers=dense, window=window)


def _deepseek_v3(config: Config) -> ModelSpec:
    num_dense = value_of(config, "first_k_dense_replace", int, 0)
    return _latent_decoder(config, "deepseek_v3", range(num_dense))


def _glm4_moe_lite(config: Config) -> ModelSpec:
    # transformers 5 writes a list; older files have the number of dense layers.
    kinds = value_of(config, "mlp_layer_types", list, [])
    if not kinds:
        values = {"first_k_dense_replace": 1, **config}
        num_dense = value_of(values, "first_k_dense_replace", int, 0)
        return _latent_decoder(config, "glm4_moe_lite", range(num_dense))
    is_known = all(kind in ("dense", "sparse") for kind in kinds)
    if not is_known or len(kinds) < value_of(config, "num_hidden_layers", int):
        raise CheckpointError(
            f"mlp_layer_types {kinds!r} is not understood; it names each layer 'dense' or 'sparse'."
        )
    dense = [i for i, kind in enumerate(kinds) if kind == "dense"]
    return _latent_decoder(config, "glm4_moe_lite", dense)


def _qwen3_5(config: Config) -> ModelSpec:
    """Also 3.6 and 3.8. Community files name a model with experts as one without."""
    if config.get("num_experts"):
        return _qwen3_5_moe(config)
    return _hybrid(config, "qwen3_5", _dense(config))


def _qwen3_5_moe(config: Config) -> ModelSpec:
    return _hybrid(config, "qwen3_5_moe", _gated_moe(config))


def _qwen3_next(config: Config) -> ModelSpec:
    moe = _gated_moe(config, is_normed=flag_of(config, "norm_topk_prob", True))
    return _hybrid(config, "qwen3_next", moe, is_grouped=True, dense_layers=_dense_layers(config))


FAMILIES: dict[str, Callable[[Config], ModelSpec]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Glm4MoeLiteForCausalLM": _glm4_moe_lite,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5ForConditionalGeneration": _qwen3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5_moe,
    "Qwen3NextForCausalLM": _qwen3_next,
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


# ---- parts that families share


def _decoder(
    config: Config,
    family: str,
    attention: AttentionSpec,
    mlp: MlpSpec,
    *,
    dense_layers: Iterable[int] = (),
    window: int | None = None,
    rope: RopeSpec | None = None,
) -> ModelSpec:
    """Layers of `attention` and `mlp`; those in `dense_layers` have an ordinary MLP instead."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"hidden_act {activation!r} is not supported; only 'silu' is.")
    max_position = value_of(config, "max_position_embeddings", int)
    num_layers, dense_indices = value_of(config, "num_hidden_layers", int), set(dense_layers)
    mlps = (_dense(config) if i in dense_indices else mlp for i in range(num_layers))
    return ModelSpec(
        family=family,
        vocab_size=value_of(config, "vocab_size", int),
        hidden_size=value_of(config, "hidden_size", int),
        layers=tuple(LayerSpec(attention, x) for x in mlps),
        norm_eps=_norm_eps(config),
        rope=rope or read_rope(config, max_position),
        max_position=max_position,
        is_tied=flag_of(config, "tie_word_embeddings"),
        sliding_window=window,
    )


def _hybrid(
    config: Config,
    family: str,
    mlp: MlpSpec,
    *,
    is_grouped: bool = False,
    dense_layers: Iterable[int] = (),
) -> ModelSpec:
    """Most layers are gated delta nets; the others have gated attention."""
    config = {"head_dim": 256, **config}
    if config.get("layer_scale"):
        raise CheckpointError("layer_scale is in use, which is not supported.")
    rope = read_rope(config, value_of(config, "max_position_embeddings", int), share=0.25)
    bias, has_gate = flag_of(config, "attention_bias"), flag_of(config, "attn_output_gate", True)
    attention = _grouped(
        config, has_qk_norm=True, has_qkv_bias=bias, has_o_bias=bias, has_gate=has_gate
    )
    rotated = int(attention.head_size * rope.share)
    if rotated < 2 or rotated % 2:
        raise CheckpointError(
            f"partial_rotary_factor {rope.share} of {attention.head_size} numbers is {rotated}; "
            "pairs are rotated, so an even number is needed."
        )
    attention = replace(attention, rotated=rotated)
    spec = _decoder(config, family, attention, mlp, dense_layers=dense_layers, rope=rope)
    delta_net = _delta_net(config, is_grouped)
    kinds = zip(spec.layers, _is_recurrent(config, spec.num_layers), strict=True)
    layers = (replace(layer, attention=delta_net) if is_new else layer for layer, is_new in kinds)
    return replace(spec, layers=tuple(layers), has_unit_norms=True)


def _is_recurrent(config: Config, num_layers: int) -> list[bool]:
    kinds = value_of(config, "layer_types", list, [])
    if not kinds:
        every = value_of(config, "full_attention_interval", int, 4)
        return [bool((i + 1) % every) for i in range(num_layers)]
    known = ("linear_attention", "full_attention")
    if len(kinds) != num_layers or any(x not in known for x in kinds):
        raise CheckpointError(
            f"layer_types {kinds!r} is not understood; it names each of the {num_layers} layers "
            f"{' or '.join(map(repr, known))}."
        )
    if known[1] not in kinds:
        raise CheckpointError("layer_types has no 'full_attention' layer; at least one is needed.")
    return [x == known[0] for x in kinds]


def _delta_net(config: Config, is_grouped: bool) -> DeltaNetSpec:
    gate = config.get("output_gate_type") or "silu"
    if gate not in ("silu", "swish", "sigmoid"):
        raise CheckpointError(
            f"output_gate_type {gate!r} is not supported; 'silu', 'swish' and 'sigmoid' are."
        )
    names = (
        "num_key_heads",
        "num_value_heads",
        "key_head_dim",
        "value_head_dim",
        "conv_kernel_dim",
    )
    defaults = (16, 32, 128, 128, 4)
    values = (value_of(config, f"linear_{x}", int, y) for x, y in zip(names, defaults, strict=True))
    sizes = DeltaSizes(*values)
    if sizes.num_value_heads % sizes.num_key_heads:
        raise CheckpointError(
            f"{sizes.num_value_heads} value heads of linear attention do not divide over "
            f"{sizes.num_key_heads} key heads."
        )
    return DeltaNetSpec(
        hidden_size=value_of(config, "hidden_size", int),
        sizes=sizes,
        norm_eps=_norm_eps(config),
        is_sigmoid=gate == "sigmoid",
        is_grouped=is_grouped,
    )


def _norm_eps(config: Config) -> float:
    return value_of(config, "rms_norm_eps", float, 1e-6)


def _grouped(config: Config, **flags: bool) -> GroupedSpec:
    hidden = value_of(config, "hidden_size", int)
    heads = value_of(config, "num_attention_heads", int)
    kv_heads = value_of(config, "num_key_value_heads", int, heads)
    if heads % kv_heads:
        raise CheckpointError(f"{heads} attention heads do not divide over {kv_heads} KV heads.")
    return GroupedSpec(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=value_of(config, "head_dim", int, hidden // heads),
        norm_eps=_norm_eps(config),
        **flags,
    )


def _qwen3_attention(config: Config) -> GroupedSpec:
    bias = flag_of(config, "attention_bias")
    return _grouped(config, has_qk_norm=True, has_qkv_bias=bias, has_o_bias=bias)


def _dense(config: Config, has_bias: bool = False) -> DenseSpec:
    inner = value_of(config, "intermediate_size", int)
    return DenseSpec(value_of(config, "hidden_size", int), inner, has_bias)


def _latent_decoder(config: Config, family: str, dense_layers: Iterable[int]) -> ModelSpec:
    """Latent attention, and experts behind a sigmoid router in all layers but the dense ones."""
    max_position = value_of(config, "max_position_embeddings", int)
    bias = flag_of(config, "attention_bias")
    attention = LatentSpec(
        hidden_size=value_of(config, "hidden_size", int),
        num_heads=value_of(config, "num_attention_heads", int),
        query_rank=value_of(config, "q_lora_rank", int, 0) or None,
        latent_size=value_of(config, "kv_lora_rank", int),
        nope_size=value_of(config, "qk_nope_head_dim", int),
        rope_size=value_of(config, "qk_rope_head_dim", int),
        value_size=value_of(config, "v_head_dim", int),
        has_qkv_bias=bias,
        has_o_bias=bias,
        is_interleaved=config.get("rope_interleave") is not False,
        softmax_factor=read_rope(config, max_position).softmax_factor,
    )
    return _decoder(config, family, attention, _sigmoid_moe(config), dense_layers=dense_layers)


def _sigmoid_moe(config: Config) -> MoeSpec:
    for name, known in (("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        found = config.get(name) or known
        if found != known:
            raise CheckpointError(f"{name} {found!r} is not supported; {known!r} is.")
    inner = value_of(config, "moe_intermediate_size", int)
    return _moe(
        config,
        inner_size=inner,
        router="sigmoid",
        is_normed=flag_of(config, "norm_topk_prob", True),
        scaling=value_of(config, "routed_scaling_factor", float, 1.0),
        num_groups=value_of(config, "n_group", int, 1),
        num_chosen_groups=value_of(config, "topk_group", int, 1),
        shared_inner_size=inner * value_of(config, "n_shared_experts", int, 0),
    )


def _gated_moe(config: Config, is_normed: bool = True) -> MoeSpec:
    """Experts, and a shared one behind a gate."""
    return _moe(
        config,
        inner_size=value_of(config, "moe_intermediate_size", int),
        is_normed=is_normed,
        shared_inner_size=value_of(config, "shared_expert_intermediate_size", int),
        has_shared_gate=True,
    )


def _dense_layers(config: Config) -> set[int]:
    """Layers of Qwen's models with experts that have none."""
    every = value_of(config, "decoder_sparse_step", int, 1)
    num_layers = value_of(config, "num_hidden_layers", int)
    dense = {i for i in range(num_layers) if (i + 1) % every}
    return dense | set(value_of(config, "mlp_only_layers", list, []))


def _moe(config: Config, **values: Any) -> MoeSpec:
    known = values.get("router", "softmax")
    router = config.get("scoring_func") or known
    if router != known:
        raise CheckpointError(f"router {router!r} is not supported here; only {known!r} is.")
    # transformers 5 writes num_local_experts for every family.
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    name = next((n for n in names if config.get(n) is not None), names[0])
    moe = MoeSpec(
        hidden_size=value_of(config, "hidden_size", int),
        num_experts=value_of(config, name, int),
        num_chosen=value_of(config, "num_experts_per_tok", int),
        **values,
    )
    candidates = moe.num_experts // moe.num_groups * moe.num_chosen_groups
    if moe.num_chosen > candidates:
        raise CheckpointError(
            f"config.json: num_experts_per_tok is {moe.num_chosen}, but a token can choose among "
            f"only {candidates} experts."
        )
    is_uneven = moe.num_experts % moe.num_groups or moe.num_experts < 2 * moe.num_groups
    if moe.num_groups > 1 and is_uneven:
        raise CheckpointError(
            f"config.json: {moe.num_experts} experts do not divide over {moe.num_groups} groups of "
            "two or more."
        )
    return moe


def _sliding_window(config: Config) -> int | None:
    """Positions that a token sees, its own included; None: all."""
    is_given = config.get("sliding_window") is not None
    return value_of(config, "sliding_window", int) if is_given else None


def _refuse_sliding_window(config: Config) -> None:
    if flag_of(config, "use_sliding_window") and config.get("sliding_window"):
        raise CheckpointError(
            f"sliding_window {config['sliding_window']} is in use, which is not supported yet."
        )
