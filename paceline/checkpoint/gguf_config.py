"""Makes a Hugging Face config.json and generation_config.json from the metadata of a GGUF.

Refuses by name what these cannot express. Of the weights it reads only the rope factors.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from paceline.checkpoint.gguf_file import PLAIN_TYPES, GgufFile
from paceline.checkpoint.gguf_names import ROPE_FACTORS
from paceline.errors import CheckpointError

# GGUF architecture -> (Hugging Face class, model_type)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
# Served from safetensors only.
_HYBRID = ("qwen35", "qwen35moe", "qwen3next")
# Metadata that would change the results and that Paceline does not compute, with neutral values.
_NEUTRAL = {
    "expert_count": 0,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
}
# Parameters of Llama 3's scaling. Converters store it as a table of factors.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


def architecture_of(file: GgufFile) -> str:
    name = file.get("general.architecture")
    if name in _HYBRID:
        raise CheckpointError(
            f"{file.path}: GGUF files of {name!r} are not supported, because converters reorder "
            "its recurrent layers; use the original safetensors checkpoint."
        )
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {name!r} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}."
        )
    return str(name)


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """config.json of the model in the file."""
    arch = architecture_of(file)
    _check_one_part(file)
    _check_neutral(file, arch)
    heads = int(_need(file, f"{arch}.attention.head_count"))
    hidden = int(_need(file, f"{arch}.embedding_length"))
    kv_heads = int(_uniform(file, f"{arch}.attention.head_count_kv", heads))
    head_dim = _head_dim(file, arch, hidden, heads)
    hf_class, model_type = ARCHITECTURES[arch]
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(
            f"{file.path} holds no token_embd.weight; it is not a complete model."
        )
    config: dict[str, Any] = {
        "architectures": [hf_class],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": int(_uniform(file, f"{arch}.feed_forward_length")),
        "num_hidden_layers": int(_need(file, f"{arch}.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _short_float(_need(file, f"{arch}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _short_float(file.get(f"{arch}.rope.freq_base", 10000.0)),
        "max_position_embeddings": int(_need(file, f"{arch}.context_length")),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _dtype(file),
        **_biases(file, arch),
        **_token_ids(file),
    }
    scaling = _rope_scaling(file, arch, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def generation_config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """generation_config.json, with all tokens that end a turn as end tokens."""
    ids = [
        int(file[key])
        for key in (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        if file.get(key) is not None
    ]
    unique = list(dict.fromkeys(ids))
    found: dict[str, Any] = {k: v for k, v in _token_ids(file).items() if k != "eos_token_id"}
    if unique:
        found["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return found


def _need(file: GgufFile, key: str) -> Any:
    if key not in file:
        raise CheckpointError(f"{file.path} has no {key} in its metadata; fetch another copy.")
    return file[key]


def _uniform(file: GgufFile, key: str, default: Any = None) -> Any:
    """A number that GGUF may store per layer; here it must be the same in all layers."""
    value = file.get(key, default) if default is not None else _need(file, key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise CheckpointError(
                f"{file.path}: {key} differs from layer to layer ({value[:4]} ...), which is not "
                "supported."
            )
        return value[0]
    return value


def _check_one_part(file: GgufFile) -> None:
    parts = int(file.get("split.count", 1) or 1)
    if parts > 1:
        raise CheckpointError(
            f"{file.path} is one of {parts} parts of a split GGUF; merge them first: "
            "llama-gguf-split --merge FIRST_PART WHOLE.gguf"
        )


def _check_neutral(file: GgufFile, arch: str) -> None:
    for name, neutral in _NEUTRAL.items():
        value = file.get(f"{arch}.{name}", neutral)
        if value != neutral:
            raise CheckpointError(
                f"{file.path}: {arch}.{name} is {value}; {arch} models with it are not supported."
            )


def _head_dim(file: GgufFile, arch: str, hidden: int, heads: int) -> int:
    default = hidden // heads
    key = int(file.get(f"{arch}.attention.key_length", default))
    value = int(file.get(f"{arch}.attention.value_length", key))
    rotated = int(file.get(f"{arch}.rope.dimension_count", key))
    if value != key:
        raise CheckpointError(
            f"{file.path}: heads of {key} for keys and {value} for values are not supported."
        )
    if rotated != key:
        raise CheckpointError(
            f"{file.path}: rope over {rotated} of {key} head dimensions is not supported."
        )
    return key


def _biases(file: GgufFile, arch: str) -> dict[str, Any]:
    """HF's llama has biases on all four attention projections or on none; qwen2 on q, k and v."""
    attention = [f"blk.0.attn_{part}.bias" in file.tensors for part in ("q", "k", "v", "output")]
    mlp = [f"blk.0.ffn_{part}.bias" in file.tensors for part in ("gate", "up", "down")]
    allowed = {
        "llama": ([False] * 4, [True] * 4),
        "qwen2": ([True, True, True, False],),
        "qwen3": ([False] * 4, [True] * 4),
    }[arch]
    if attention not in allowed or any(mlp) != all(mlp) or (any(mlp) and arch != "llama"):
        raise CheckpointError(
            f"{file.path}: biases on attention (q, k, v, output) {attention} and on the MLP "
            f"(gate, up, down) {mlp} are not supported for {arch}."
        )
    if arch == "qwen2":
        return {}
    found = {"attention_bias": attention[0]}
    return {**found, "mlp_bias": mlp[0]} if arch == "llama" else found


def _token_ids(file: GgufFile) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    keys = {hf: f"tokenizer.ggml.{gguf}_token_id" for hf, gguf in names.items()}
    return {f"{hf}_token_id": int(file[key]) for hf, key in keys.items() if key in file}


def _dtype(file: GgufFile) -> str:
    """The type of the matrices; float16 if they are quantised or differ."""
    kinds = {PLAIN_TYPES.get(t.type_id) for t in file.tensors.values() if len(t.shape) > 1}
    if len(kinds) > 1:
        return "float16"
    return {"F32": "float32", "BF16": "bfloat16"}.get(kinds.pop() or "", "float16")


def _rope_scaling(file: GgufFile, arch: str, config: dict[str, Any]) -> dict[str, Any] | None:
    kind = file.get(f"{arch}.rope.scaling.type", "none")
    original = file.get(f"{arch}.rope.scaling.original_context_length")
    if ROPE_FACTORS in file.tensors:
        factors = np.asarray(file.dequantise(ROPE_FACTORS), np.float64).ravel()
        return _from_factors(file.path, factors, original, config)
    # Older files have only the linear factor.
    factor = file.get(f"{arch}.rope.scaling.factor") or file.get(f"{arch}.rope.scale_linear")
    if kind == "none" and (factor is None or factor == 1.0 or f"{arch}.rope.scaling.type" in file):
        return None
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": float(factor or 1.0)}
    if kind == "yarn":
        return _yarn(file, arch, float(factor or 1.0), original, config)
    raise CheckpointError(
        f"{file.path}: rope scaling {kind!r} is not supported; supported are none, linear, yarn "
        "and Llama 3's factors."
    )


def _yarn(
    file: GgufFile, arch: str, factor: float, original: int | None, config: dict[str, Any]
) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if original is None:
        original = int(config["max_position_embeddings"] / factor)
    scaling["original_max_position_embeddings"] = int(original)
    names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    for hf, gguf in names.items():
        value = file.get(f"{arch}.rope.scaling.{gguf}")
        if value is not None:
            scaling[hf] = _short_float(value)
    return scaling


def _from_factors(
    path: Path, factors: np.ndarray[Any, Any], original: int | None, config: dict[str, Any]
) -> dict[str, Any] | None:
    """Llama 3's parameters if they give this table, else the table itself.

    `gguf_factors` is Paceline's own rope type: frequencies are divided by `factors`, which are also
    the weight ROPE_FACTORS. transformers does not know it; `convert` writes it as longrope.
    """
    head_dim, theta = config["head_dim"], config["rope_theta"]
    if factors.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{path}: {ROPE_FACTORS} has {factors.size} factors; {head_dim // 2} are needed for "
            f"heads of {head_dim}."
        )
    if np.all(factors == 1.0):
        return None
    for context in dict.fromkeys((original or _LLAMA3_CONTEXT, _LLAMA3_CONTEXT)):
        scaling = {
            "rope_type": "llama3",
            "factor": _short_float(factors.max()),
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": int(context),
        }
        if np.allclose(llama3_factors(scaling, head_dim, theta), factors, rtol=1e-5):
            return scaling
    return {"rope_type": "gguf_factors", "factors": [_short_float(f) for f in factors]}


def llama3_factors(scaling: dict[str, Any], head_dim: int, theta: float) -> np.ndarray[Any, Any]:
    """The factors by which Llama 3's scaling divides the head_dim / 2 frequencies."""
    frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    wavelength = 2 * math.pi / frequency
    factor, context = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (context / wavelength - low) / (high - low)
    blended = 1.0 / ((1 - smooth) / factor + smooth)
    scaled = np.where(wavelength > context / low, factor, blended)
    return np.where(wavelength < context / high, 1.0, scaled)


def _short_float(value: float) -> float:
    """The shortest decimal with the same float32 value: 1e-5 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))
