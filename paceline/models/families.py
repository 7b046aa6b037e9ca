"""The model families that Paceline serves: config.json to ModelSpec, one reader per architecture.

A family made of known blocks is one reader here. A family with a new block adds the block's class
to models/blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from paceline.errors import CheckpointError, nearest
from paceline.models.blocks.dense_mlp import DenseSpec
from paceline.models.blocks.experts import MoeSpec
from paceline.models.blocks.grouped_attention import GroupedSpec
from paceline.models.blocks.latent_attention import LatentSpec
from paceline.models.config_json import Config, flag_of, refuse_quantised, value_of
from paceline.models.rope import read_rope
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
    every = value_of(config, "decoder_sparse_step", int, 1)
    num_layers = value_of(config, "num_hidden_layers", int)
    dense = {i for i in range(num_layers) if (i + 1) % every}
    dense.update(value_of(config, "mlp_only_layers", list, []))
    window = _sliding_window(config) if config.get("use_sliding_window") else None
    attention = _qwen3_attention(config)
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


# ---- parts that families share


def _decoder(
    config: Config,
    family: str,
    attention: AttentionSpec,
    mlp: MlpSpec,
    *,
    dense_layers: Iterable[int] = (),
    window: int | None = None,
) -> ModelSpec:
    """Layers of `attention` and `mlp`; those in `dense_layers` have an ordinary MLP instead."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"hidden_act {activation!r} is not supported; only 'silu' is.")
    max_position = value_of(config, "max_position_embeddings", int)
    dense, dense_indices = _dense(config), set(dense_layers)
    indices = range(value_of(config, "num_hidden_layers", int))
    mlps = (dense if i in dense_indices else mlp for i in indices)
    return ModelSpec(
        family=family,
        vocab_size=value_of(config, "vocab_size", int),
        hidden_size=value_of(config, "hidden_size", int),
        layers=tuple(LayerSpec(attention, x) for x in mlps),
        norm_eps=_norm_eps(config),
        rope=read_rope(config, max_position),
        max_position=max_position,
        is_tied=flag_of(config, "tie_word_embeddings"),
        sliding_window=window,
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
