"""Checkpoint tensors to a Decoder: names, shapes, fusing and the numeric format of each weight.

Reads one layer at a time, so that the checkpoint is never in memory twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.kernels.dispatch import Kernels, pick_kernels
from paceline.kernels.rope import HeadNorms
from paceline.layers.attention import Attention, GroupedAttention
from paceline.layers.linear import BlockFormat, Linear, LinearFormat, for_logits
from paceline.layers.rope import (
    interleave_pairs,
    inverse_frequencies,
    llama3_frequencies,
    rotation_table,
    yarn_frequencies,
)
from paceline.models.decoder import Decoder, DecoderLayer
from paceline.models.fused import fuse_layers
from paceline.models.mla_loading import latent_shapes, load_latent_attention
from paceline.models.moe_loading import load_moe, moe_shapes
from paceline.models.spec import ModelSpec

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
Shapes = Iterable[tuple[str, tuple[int, ...]]]


class WeightSource(Protocol):
    """Named tensors under their Hugging Face names."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def load(self, name: str) -> Tensor: ...

    def blocks(self, name: str) -> tuple[str, Tensor] | None:
        """The type of a quantised matrix and its rows of bytes; None for plain numbers."""


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """How tensors are kept: linears through `linear`, tables and norms in the given dtypes."""

    linear: LinearFormat
    embedding: torch.dtype
    norm: torch.dtype
    device: torch.device
    round_to: torch.dtype | None = None  # --dtype: round the checkpoint's values to this first
    name: str = "float32"  # for people
    compute: torch.dtype = torch.float32  # of activations
    has_fixed_shapes: bool = False  # rows with gaps and device lengths: kernels/step_rows
    blocks: BlockFormat | None = None  # linears that stay quantised


class DummyWeights:
    """Random weights of the right shapes, for --load-format dummy: nothing is read."""

    def blocks(self, name: str) -> tuple[str, Tensor] | None:
        return None

    def __init__(self, shapes: Shapes, seed: int, device: torch.device) -> None:
        self._shapes = dict(shapes)
        self._seed = seed
        self._device = device

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def load(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        # Seeded by name, so that a tensor does not depend on the order of loading.
        seed = self._seed * 1_000_003 + sum(ord(c) * 31**i % 2**31 for i, c in enumerate(name))
        generator = torch.Generator(self._device).manual_seed(seed % 2**63)
        return torch.randn(shape, generator=generator, device=self._device).mul_(0.02)


def expected_shapes(
    spec: ModelSpec, names: set[str] | None = None
) -> list[tuple[str, tuple[int, ...]]]:
    """Every tensor of a checkpoint of this spec; `names`: see models/moe_loading."""
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size)),
        ("model.norm.weight", (spec.hidden_size,)),
    ]
    if not spec.is_tied:
        shapes.append(("lm_head.weight", (spec.vocab_size, spec.hidden_size)))
    return shapes + layer_shapes(spec, names)


def layer_shapes(
    spec: ModelSpec, names: set[str] | None = None
) -> list[tuple[str, tuple[int, ...]]]:
    """Every tensor of the layers."""
    width, head = spec.hidden_size, spec.head_size
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for i in range(spec.num_layers):
        at = f"model.layers.{i}."
        if i or spec.has_first_norm:
            shapes += [(at + "input_layernorm.weight", (width,))]
        shapes += [(at + "post_attention_layernorm.weight", (width,))]
        moe = spec.experts_of(i)
        if moe is not None:
            shapes += moe_shapes(spec, moe, at, names)
        for name, rows, columns, has_bias in (
            *(_dense_mlp(spec) if moe is None else ()),
            *(_grouped_attention(spec) if spec.mla is None else ()),
        ):
            shapes.append((f"{at}{name}.weight", (rows, columns)))
            if has_bias:
                shapes.append((f"{at}{name}.bias", (rows,)))
        if spec.mla is not None:
            shapes += latent_shapes(spec, at + "self_attn.")
        if spec.has_qk_norm:
            shapes += [(at + "self_attn.q_norm.weight", (head,))]
            shapes += [(at + "self_attn.k_norm.weight", (head,))]
    return shapes


def _grouped_attention(spec: ModelSpec) -> list[tuple[str, int, int, bool]]:
    width, bias = spec.hidden_size, spec.has_qkv_bias
    q_rows, kv_rows = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    return [
        ("self_attn.q_proj", q_rows, width, bias),
        ("self_attn.k_proj", kv_rows, width, bias),
        ("self_attn.v_proj", kv_rows, width, bias),
        ("self_attn.o_proj", width, q_rows, spec.has_o_bias),
    ]


def _dense_mlp(spec: ModelSpec) -> list[tuple[str, int, int, bool]]:
    width, inner, has_bias = spec.hidden_size, spec.intermediate_size, spec.has_mlp_bias
    up = [(name, inner, width, has_bias) for name in ("mlp.gate_proj", "mlp.up_proj")]
    return [*up, ("mlp.down_proj", width, inner, has_bias)]


def check_names(spec: ModelSpec, source: WeightSource, shapes: Shapes) -> None:
    """Name the first missing tensor or wrong shape; warn about tensors that nobody reads."""
    names = source.names()
    expected = dict(shapes)
    missing = sorted(set(expected) - names)
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(
            f"the checkpoint has no tensor {missing[0]!r}{more}; config.json ({spec.family}, "
            f"num_hidden_layers {spec.num_layers}) asks for it."
        )
    for name, shape in expected.items():
        found = tuple(source.shape(name))
        if found != shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(found)}; config.json asks for {list(shape)}."
            )
    ignored = ("rotary_emb.inv_freq", "rope_freqs.weight", "lm_head.weight")
    others = (n for n in names - set(expected) if not n.endswith(ignored))
    unused = sorted(n for n in others if not _is_behind(n, spec.num_layers))
    if unused:
        logger.warning("%d tensors are not used, for instance %s", len(unused), unused[0])


def _is_behind(name: str, num_layers: int) -> bool:
    """Layers behind the last are a draft head's (MTP), which may not be asked for."""
    index = name.removeprefix("model.layers.").partition(".")[0]
    return index != name and index.isdigit() and int(index) >= num_layers


def load_decoder(
    spec: ModelSpec,
    source: WeightSource,
    formats: WeightFormats,
    *,
    max_model_len: int,
    progress: Progress | None = None,
) -> Decoder:
    """Build the decoder, layer by layer. `progress` gets a name and a share of the work."""
    # The file's own head wins over the flag, as in transformers.
    has_head = "lm_head.weight" in source.names()
    check_names(spec, source, expected_shapes(spec, source.names()))
    read = Reader(source, formats)
    kernels = pick_kernels(
        formats.device, spec.head_size, spec.group_size, formats.has_fixed_shapes
    )
    layers: list[DecoderLayer] = []
    for i in range(spec.num_layers):
        layers.append(load_layer(spec, read, i, kernels))
        if progress:
            progress("weights", (i + 1) / (spec.num_layers + 1))
    head = "lm_head" if has_head else "model.embed_tokens"
    decoder = Decoder(
        spec=spec,
        embedding_VD=read.table("model.embed_tokens.weight"),
        layers=layers,
        final_norm=read.norm("model.norm.weight"),
        lm_head=read.head(head),
        rotation=rotation_of(spec, source, max_model_len).to(formats.device),
        kernels=kernels,
        fused=fuse_layers(spec, layers, kernels, formats.device),
    )
    if decoder.fused is not None and formats.device.type == "cpu":
        # The kernels around the layers: compiled now, not while the first request waits.
        zeros_TD = torch.zeros(1, spec.hidden_size)
        decoder.logits(kernels.add_rms_norm(zeros_TD, zeros_TD, decoder.final_norm, 1.0))
    if progress:
        progress("weights", 1.0)
    return decoder


@dataclass(slots=True)
class Reader:
    """Tensors in the formats that the model computes with."""

    source: WeightSource
    formats: WeightFormats

    def tensor(self, name: str) -> Tensor:
        value = self.source.load(name)
        return value if self.formats.round_to is None else value.to(self.formats.round_to)

    def optional(self, name: str) -> Tensor | None:
        return self.tensor(name) if name in self.source.names() else None

    def table(self, name: str) -> Tensor:
        return self.tensor(name).to(self.formats.device, self.formats.embedding)

    def norm(self, name: str) -> Tensor:
        return self.tensor(name).to(self.formats.device, self.formats.norm)

    def head(self, name: str) -> Linear:
        """The product that gives logits."""
        return for_logits(self.linear([name]))

    def linear(self, names: list[str], heads: list[int] | None = None) -> Linear:
        """Several projections under each other; heads > 0 interleave their rotary pairs."""
        pairs = heads or [0] * len(names)
        biases = [self.optional(f"{n}.bias") for n in names]
        known = [_interleaved(b, h) for b, h in zip(biases, pairs, strict=True) if b is not None]
        bias = torch.cat(known) if known else None
        weights = [f"{n}.weight" for n in names]
        quantised = self._blocks(weights, pairs)
        if quantised is not None and self.formats.blocks is not None:
            kept = self.formats.blocks(*quantised, bias)
            if kept is not None:
                return kept
        rows = [_interleaved(self.tensor(n), h) for n, h in zip(weights, pairs, strict=True)]
        return self.formats.linear(torch.cat(rows), bias)

    def _blocks(self, names: list[str], heads: list[int]) -> tuple[str, Tensor] | None:
        """The rows of all of them, where all are quantised alike and nothing is to be rounded."""
        if self.formats.blocks is None or self.formats.round_to is not None:
            return None
        found = [x for name in names if (x := self.source.blocks(name)) is not None]
        if len(found) < len(names) or len({kind for kind, _ in found}) > 1:
            return None
        rows = [_interleaved(x, h) for (_, x), h in zip(found, heads, strict=True)]
        return found[0][0], torch.cat(rows)


def _interleaved(rows: Tensor, num_heads: int) -> Tensor:
    return interleave_pairs(rows, num_heads) if num_heads else rows


def load_layer(spec: ModelSpec, read: Reader, index: int, kernels: Kernels) -> DecoderLayer:
    at = f"model.layers.{index}."
    has_norm = index > 0 or spec.has_first_norm
    return DecoderLayer(
        input_norm=read.norm(at + "input_layernorm.weight") if has_norm else None,
        attention=_load_attention(spec, read, at + "self_attn.", kernels),
        post_norm=read.norm(at + "post_attention_layernorm.weight"),
        mlp=load_moe(spec, read, at, index, kernels),
    )


def _load_attention(spec: ModelSpec, read: Reader, at: str, kernels: Kernels) -> Attention:
    if spec.mla is not None:
        return load_latent_attention(spec, read, at)
    norms = None
    if spec.has_qk_norm:
        query, key = (read.norm(f"{at}{x}_norm.weight") for x in "qk")
        norms = HeadNorms(interleave_pairs(query, 1), interleave_pairs(key, 1), spec.norm_eps)
    projections = [f"{at}{x}_proj" for x in "qkv"]
    return GroupedAttention(
        qkv=read.linear(projections, [spec.num_heads, spec.num_kv_heads, 0]),
        o=read.linear([at + "o_proj"]),
        kernels=kernels,
        scale=spec.head_size**-0.5,
        head_norms=norms,
    )


def rotation_of(spec: ModelSpec, source: WeightSource, max_model_len: int) -> Tensor:
    rope = spec.rope
    freq = inverse_frequencies(spec.rope_size, rope.theta)
    if rope.kind == "linear":
        freq = freq / rope.factor
    elif rope.kind == "llama3":
        freq = llama3_frequencies(
            freq,
            rope.factor,
            rope.low_freq_factor,
            rope.high_freq_factor,
            rope.original_max_position,
        )
    elif rope.kind == "yarn":
        turns = (rope.beta_fast, rope.beta_slow)
        freq = yarn_frequencies(
            freq, rope.theta, rope.factor, turns, rope.original_max_position, rope.is_truncated
        )
    elif rope.kind == "gguf_factors":
        freq = freq / source.load("rope_freqs.weight").float()
    rotation = rotation_table(freq, max_model_len)
    return rotation if rope.attention_factor == 1.0 else rotation * rope.attention_factor
