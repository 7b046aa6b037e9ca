"""How a checkpoint says that it is quantised: fp8, compressed-tensors and modelopt are read.

What is not served is refused by name. Which tensors are quantised is not read from lists of
ignored or targeted modules: a tensor with scales is (models/fp8_weights).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import CheckpointError
from paceline.kernels.fp8.reference import BLOCK
from paceline.models.config_json import Config, value_of


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """e4m3 weights."""

    block: tuple[int, int] | None  # outputs and inputs of a scale; None: an output or all
    has_static_rows: bool = False  # scales of activations are stored
    rounds_rows: bool = True  # False: activations stay wide
    has_kv_scales: bool = False

    @property
    def is_served_as_stored(self) -> bool:
        return self.rounds_rows and self.block in (None, (BLOCK, BLOCK))

    @property
    def what(self) -> str:
        return f"blocks of {self.block[0]} by {self.block[1]}" if self.block else "scales by output"

    @property
    def notes(self) -> list[str]:
        """What is computed in another way than the checkpoint was made for."""
        found: list[str] = []
        if not self.rounds_rows:
            found.append("its fp8 weights are dequantised: its activations are not fp8")
        elif not self.is_served_as_stored:
            found.append(f"its fp8 weights are dequantised: {self.what}, not {BLOCK} by {BLOCK}")
        elif self.has_static_rows:
            found.append("its scales of activations are not used: each row gets one when it comes")
        if self.has_kv_scales:
            found.append("its scales of the KV cache are used by --kv-cache-dtype fp8 alone")
        return found


def fp8_scheme(config: Config) -> Fp8Scheme | None:
    """None if the checkpoint is not quantised."""
    quantised = value_of(config, "quantization_config", dict, {})
    if not quantised:
        return None
    method = method_of(config)
    readers = {"fp8": _plain, "compressed-tensors": _compressed, "modelopt": _modelopt}
    if method not in readers:
        raise _refused(repr(method))
    return readers[method](quantised)


def method_of(config: Config) -> str | None:
    """What made a checkpoint narrow, by vLLM's names; None: it is not quantised."""
    quantised = config.get("quantization_config") or {}
    algorithm = quantised.get("quant_algo")
    method = quantised.get("quant_method") or ("modelopt" if algorithm else None)
    return None if not quantised else str(method or "unknown")


def refuse_quantised(config: Config) -> None:
    """Raise if the checkpoint is quantised in a way that is not served."""
    fp8_scheme(config)


def _plain(quantised: dict[str, Any]) -> Fp8Scheme:
    size, kind = quantised.get("weight_block_size"), quantised.get("fmt", "e4m3")
    if kind != "e4m3":
        raise _refused(f"'fp8' of type {kind!r}")
    is_static = quantised.get("activation_scheme") == "static"
    return Fp8Scheme(None if size is None else _block(size), is_static)


def _compressed(quantised: dict[str, Any]) -> Fp8Scheme:
    form = quantised.get("format")
    if form not in ("float-quantized", "naive-quantized"):
        raise _refused(f"'compressed-tensors' in the format {form!r}")
    if (quantised.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _refused("'compressed-tensors' with sparse weights")
    groups = value_of(quantised, "config_groups", dict).values()
    has_kv = bool(quantised.get("kv_cache_scheme"))
    schemes = {_group(x, has_kv) for x in groups}
    if len(schemes) != 1:
        raise _refused("'compressed-tensors' with none or several schemes")
    return schemes.pop()


def _group(group: dict[str, Any], has_kv: bool) -> Fp8Scheme:
    weights, rows = value_of(group, "weights", dict), group.get("input_activations")
    for part in (weights, rows or weights):
        if (part.get("type"), part.get("num_bits")) != ("float", 8):
            raise _refused(
                f"'compressed-tensors' {part.get('type')} of {part.get('num_bits')} bits"
            )
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise _refused(f"'compressed-tensors' with weights by {strategy!r}")
    block = _block(weights.get("block_structure")) if strategy == "block" else None
    is_static = rows is not None and not rows.get("dynamic")
    return Fp8Scheme(block, is_static, rows is not None, has_kv)


def _modelopt(quantised: dict[str, Any]) -> Fp8Scheme:
    algorithm = str(quantised.get("quant_algo"))
    if algorithm.upper() not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise _refused(f"'modelopt' {algorithm!r}")
    has_kv = bool(quantised.get("kv_cache_quant_algo") or quantised.get("kv_cache_scheme"))
    return Fp8Scheme(None, algorithm.upper() == "FP8", has_kv_scales=has_kv)


def _block(size: Any) -> tuple[int, int]:
    is_right = isinstance(size, list) and [type(x) for x in size] == [int, int] and min(size) > 0
    if not is_right:
        raise _refused(f"fp8 in blocks of {size!r}, not of [rows, columns]")
    return (size[0], size[1])


def _refused(what: str) -> CheckpointError:
    return CheckpointError(
        f"this checkpoint is quantised with {what}, which is not supported; use the original "
        "weights (--quantization fp8 rounds them while they are loaded), weights in fp8 (e4m3) "
        "made by compressed-tensors, modelopt or the model's authors, or a GGUF."
    )
