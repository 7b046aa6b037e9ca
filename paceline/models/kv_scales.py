"""Scales of fp8 KV pages, as checkpoints store them: one for a layer, or one for each KV head."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.kernels.kv_codes.reference import KvScales
from paceline.models.config_json import Config, value_of
from paceline.models.reader import Reader

# In the order of a layer's names: compressed-tensors, vLLM, ModelOpt. {} is k or v.
_PLACES = ("{}_scale", "attn.{}_scale", "{}_proj.{}_scale")
# Of tensors that only fp8 pages need, and of what Paceline does not round.
SCALE_ENDINGS = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")


def check_kv_scheme(config: Config) -> None:
    """Refuse scales that were made for another type than e4m3."""
    quantised = value_of(config, "quantization_config", dict, {})
    scheme = quantised.get("kv_cache_scheme") or {}
    kind = f"{scheme.get('type', 'float')} of {scheme.get('num_bits', 8)} bits"
    kinds = (kind, quantised.get("kv_cache_quant_algo") or "FP8")  # compressed-tensors, ModelOpt
    if kinds != ("float of 8 bits", "FP8"):
        raise CheckpointError(
            f"this checkpoint was made for a KV cache in {' and '.join(kinds)}, and its scales do "
            "not fit fp8; leave out --kv-cache-dtype, or use a checkpoint with fp8 scales."
        )


def read_kv_scales(read: Reader, at: str, num_heads: int, *, is_latent: bool) -> KvScales | None:
    """Of the `num_heads` KV heads of this rank; None if pages are not fp8. `at`: the prefix of the
    attention's names. A row of latent attention has the scale of keys."""
    if not read.formats.has_fp8_pages:
        return None
    key_N = _read(read, at, "k", num_heads)
    value_N = key_N if is_latent else _read(read, at, "v", num_heads)
    if (key_N is None) != (value_N is None):
        found, missing = ("k", "v") if value_N is None else ("v", "k")
        raise CheckpointError(
            f"{at} has a {found}_scale and no {missing}_scale; fp8 pages need both or none."
        )
    ones_N = torch.ones(num_heads, device=read.formats.device)
    return KvScales(*(ones_N if x is None else x for x in (key_N, value_N)))


def _read(read: Reader, at: str, letter: str, num_heads: int) -> Tensor | None:
    names = [at + place.format(letter, letter) for place in _PLACES]
    name = next((x for x in names if x in read.source.names()), None)
    if name is None:
        return None
    scale_N, tp, whole = read.source.load(name).float().flatten(), read.groups.tp, read.num_kv_heads
    if len(scale_N) not in (1, whole):
        raise CheckpointError(
            f"tensor {name!r} has {len(scale_N)} scales; the layer has {whole} KV heads, so 1 or "
            f"{whole} are needed."
        )
    if not (scale_N > 0).all() or not scale_N.isfinite().all():
        raise CheckpointError(f"tensor {name!r} has scales that are not positive numbers.")
    first = tp.rank * whole // tp.size
    return scale_N.expand(whole)[first : first + num_heads].to(read.formats.device).contiguous()
