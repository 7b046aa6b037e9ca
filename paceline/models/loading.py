"""Checkpoint tensors to a Decoder: names, shapes, fusing and the numeric format of each weight.

Reads one layer at a time, so that the checkpoint is never in memory twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.kernels.dispatch import Kernels, pick_kernels
from paceline.kernels.rope import HeadNorms
from paceline.layers.attention import Attention, GroupedAttention
from paceline.layers.linear import BlockFormat, Linear, LinearFormat, Reduced, for_logits
from paceline.layers.mlp import GatedMlp, Mlp
from paceline.layers.rope import (
    interleave_pairs,
    inverse_frequencies,
    llama3_frequencies,
    rotation_table,
    yarn_frequencies,
)
from paceline.layers.vocab import Embedding, VocabShards
from paceline.models.decoder import Decoder, DecoderLayer
from paceline.models.fused import fuse_layers
from paceline.models.mla_loading import latent_cuts, latent_shapes, load_latent_attention
from paceline.models.moe_loading import load_moe, moe_cuts, moe_shapes
from paceline.models.sharding import (
    Cut,
    Cuts,
    SlicedSource,
    even_cut,
    kv_rows,
    local_spec,
    vocab_rows,
)
from paceline.models.spec import ModelSpec
from paceline.parallel.groups import ALONE, Groups

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
Shapes = Iterable[tuple[str, tuple[int, ...]]]


class WeightSource(Protocol):
    """Named tensors under their Hugging Face names."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def load(self, name: str, cut: Cut | None = None) -> Tensor:
        """All of it, or only what `cut` wants; no more than that is read."""

    def blocks(self, name: str, cut: Cut | None = None) -> tuple[str, Tensor] | None:
        """The type of a quantised matrix and its rows of bytes; None for plain numbers.

        Also None for a cut that goes through blocks.
        """


@dataclass(frozen=True, slots=True)
class SomeWeights:
    """Some of a checkpoint's tensors, under other names."""

    source: WeightSource
    stored: Mapping[str, str]  # the checkpoint's name of each

    def names(self) -> set[str]:
        return set(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(self.stored[name])

    def load(self, name: str, cut: Cut | None = None) -> Tensor:
        return self.source.load(self.stored[name], cut)

    def blocks(self, name: str, cut: Cut | None = None) -> tuple[str, Tensor] | None:
        return self.source.blocks(self.stored[name], cut)


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

    def blocks(self, name: str, cut: Cut | None = None) -> tuple[str, Tensor] | None:
        return None

    def __init__(self, shapes: Shapes, seed: int, device: torch.device) -> None:
        self._shapes = dict(shapes)
        self._seed = seed
        self._device = device

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def load(self, name: str, cut: Cut | None = None) -> Tensor:
        """A cut is one of the whole tensor, so that ranks hold parts of one model."""
        whole = self._make(name)
        return whole if cut is None else cut.of(whole).clone()

    def _make(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        # Seeded by name, so that a tensor does not depend on the order of loading.
        seed = self._seed * 1_000_003 + sum(ord(c) * 31**i % 2**31 for i, c in enumerate(name))
        generator = torch.Generator(self._device).manual_seed(seed % 2**63)
        # The bias of a router decides alone, as it does among other engines' random weights: all
        # rows choose the same experts, and what is measured is the same work.
        scale = 10.0 if name.endswith("correction_bias") else 0.02
        return torch.randn(shape, generator=generator, device=self._device).mul_(scale)


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


def open_reader(
    spec: ModelSpec,
    source: WeightSource,
    formats: WeightFormats,
    groups: Groups,
    tables: Mapping[str, VocabShards],
    first: int = 0,
) -> Reader:
    """Reads this rank's slices of the layers, which begin at `first`, and of vocabulary tables."""
    names = source.names()
    cuts: Cuts = {}
    for index in range(first, first + spec.num_layers):
        cuts |= _layer_cuts(spec, index, names, groups)
    if groups.tp.size > 1:
        cuts |= {name: vocab_rows(vocab) for name, vocab in tables.items()}
    if not cuts:
        return Reader(source, formats, groups)
    once = frozenset(n for n in names if n.endswith(("o_proj.bias", "down_proj.bias")))
    return Reader(SlicedSource(source, cuts, once, groups.tp.rank == 0), formats, groups)


def _layer_cuts(spec: ModelSpec, index: int, names: set[str], groups: Groups) -> Cuts:
    """Heads and inner values are shared out; what each rank makes of them is a part of a sum."""
    at, tp, cuts = f"model.layers.{index}.", groups.tp, Cuts()
    moe = spec.experts_of(index)
    if moe is not None and (tp.size > 1 or groups.exchange is not None):
        cuts |= moe_cuts(spec, moe, at, names, groups)
    if tp.size == 1:
        return cuts
    if spec.mla is not None:
        cuts |= latent_cuts(spec, at + "self_attn.", tp)
    else:
        heads = even_cut(0, spec.num_heads * spec.head_size, tp)
        for name, rows in (("q", heads), ("k", kv_rows(spec, tp)), ("v", kv_rows(spec, tp))):
            cuts[f"{at}self_attn.{name}_proj.weight"] = rows
            cuts[f"{at}self_attn.{name}_proj.bias"] = rows
        cuts[f"{at}self_attn.o_proj.weight"] = replace(heads, dim=1)
    if moe is None:
        inner = even_cut(0, spec.intermediate_size, tp)
        for name in ("gate", "up"):
            cuts[f"{at}mlp.{name}_proj.weight"] = inner
            cuts[f"{at}mlp.{name}_proj.bias"] = inner
        cuts[f"{at}mlp.down_proj.weight"] = replace(inner, dim=1)
    return cuts


def check_names(spec: ModelSpec, source: WeightSource, shapes: Shapes) -> None:
    """Name the first missing tensor or wrong shape; warn about tensors that nobody reads."""
    names = source.names()
    expected = dict(shapes)
    missing = sorted(set(expected) - names)
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        is_head = any(n.removeprefix("model.") == "fc.weight" for n in names - set(expected))
        hint = (
            ' It is an EAGLE head, which drafts for a model: "method": "eagle".' if is_head else ""
        )
        raise CheckpointError(
            f"the checkpoint has no tensor {missing[0]!r}{more}; config.json ({spec.family}, "
            f"num_hidden_layers {spec.num_layers}) asks for it.{hint}"
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
    groups: Groups = ALONE,
) -> Decoder:
    """Build this rank's part of the decoder, layer by layer.

    `spec` and `source` are the whole model's. `progress` gets a name and a share of the work.
    """
    # The file's own head wins over the flag, as in transformers.
    has_head = "lm_head.weight" in source.names()
    check_names(spec, source, expected_shapes(spec, source.names()))
    vocab = VocabShards(spec.vocab_size, groups.tp)
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    read = open_reader(spec, source, formats, groups, dict.fromkeys(tables, vocab))
    spec = local_spec(spec, groups)
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
        embedding=Embedding(read.table("model.embed_tokens.weight"), vocab),
        layers=layers,
        final_norm=read.norm("model.norm.weight"),
        lm_head=read.head(head),
        vocab=vocab,
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
    groups: Groups = ALONE

    def tensor(self, name: str) -> Tensor:
        value = self.source.load(name)
        if not value.is_floating_point() or value.dtype.itemsize == 1:
            raise CheckpointError(
                f"tensor {name!r} is stored in {value.dtype} and has no scales that Paceline can "
                "read (fp8 blocks: weight_scale_inv); take the original weights."
            )
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

    def reduced(self, name: str) -> Linear:
        """A projection whose inputs the ranks have parts of."""
        part, tp = self.linear([name]), self.groups.tp
        return Reduced(part, tp) if tp.is_active else part

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
        mlp=_load_mlp(spec, read, at, index, kernels),
    )


def _load_mlp(spec: ModelSpec, read: Reader, at: str, index: int, kernels: Kernels) -> Mlp:
    if spec.experts_of(index) is not None:
        return load_moe(spec, read, at, index, kernels)
    return GatedMlp(
        gate_up=read.linear([at + "mlp.gate_proj", at + "mlp.up_proj"]),
        down=read.reduced(at + "mlp.down_proj"),
        silu_and_mul=kernels.silu_and_mul,
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
        o=read.reduced(at + "o_proj"),
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
