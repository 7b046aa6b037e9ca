"""Checkpoint tensors to an EAGLE head: names of every kind, and what the target lends it.

Refuses heads that cannot work with their target; warns where they can, but hardly will.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.kernels.dispatch import pick_kernels
from paceline.layers.vocab import Embedding, VocabShards
from paceline.models.decoder import Decoder, LayerStack
from paceline.models.draft_heads import Eagle3Model, EagleModel, TapReader
from paceline.models.fused import fuse_layers
from paceline.models.head_spec import Eagle3Spec
from paceline.models.loading import (
    Reader,
    SomeWeights,
    WeightFormats,
    WeightSource,
    check_names,
    layer_shapes,
    load_layer,
    open_reader,
    rotation_of,
)
from paceline.models.sharding import local_spec
from paceline.models.spec import ModelSpec
from paceline.parallel.groups import ALONE, Groups

logger = logging.getLogger(__name__)

_TABLE = "model.embed_tokens.weight"
_HEAD = "model.lm_head.weight"
_MARK = "model.layers.0.hidden_norm.weight"  # only EAGLE-3 heads have it


def check_pair(name: str, head: ModelSpec, target: ModelSpec) -> None:
    """Whether a head can read this target; from the two configs alone."""
    if head.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"the EAGLE head {name!r} has a hidden size of {head.hidden_size}, the target has "
            f"{target.hidden_size}; a head reads the hidden states of the target it was trained "
            "for."
        )
    _check_rows(name, head.vocab_size, target.vocab_size)
    if head.vocab_size != target.vocab_size:
        logger.warning(
            "the EAGLE head %r was made for a vocabulary of %d tokens, the target has %d: it "
            "runs, but few of its drafts will be accepted",
            name,
            head.vocab_size,
            target.vocab_size,
        )


def _check_rows(name: str, num_rows: int, vocab_size: int) -> None:
    if num_rows < vocab_size:
        raise CheckpointError(
            f"the EAGLE head {name!r} embeds {num_rows} tokens, the target has {vocab_size}; it "
            "cannot read all of the target's tokens."
        )


def eagle_shapes(spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    """Every tensor that an EAGLE-1 head must have; its embedding may be the target's."""
    fc = ("model.fc.weight", (spec.hidden_size, 2 * spec.hidden_size))
    return [fc, *layer_shapes(spec)]


def _renamed(source: WeightSource) -> SomeWeights:
    """A head's tensors under one kind of name: `model.`, and `layers.0` for `midlayer`."""
    plain = {name: "." + name.removeprefix("model.") for name in source.names()}
    stored = {"model" + x.replace(".midlayer.", ".layers.0."): name for name, x in plain.items()}
    return SomeWeights(source, stored)


def load_eagle(
    name: str,
    spec: ModelSpec,
    source: WeightSource,
    formats: WeightFormats,
    target: Decoder,
    *,
    max_model_len: int,
    groups: Groups = ALONE,
) -> EagleModel:
    """Build this rank's part of the head. What it does not bring, it shares with the target."""
    renamed = _renamed(source)
    names = renamed.names()
    if names & {"model.d2t", _MARK}:
        raise CheckpointError(
            f'{name!r} is an EAGLE-3 head: give "method": "eagle3"; "eagle" takes EAGLE-1 heads.'
        )
    if "model.fc.weight" not in names:
        raise CheckpointError(
            f"{name!r} has no tensor 'fc.weight', so it is no EAGLE-1 head; for a whole model with "
            'the target\'s vocabulary give "method": "draft_model".'
        )
    spec = _as_stored(spec, names)
    width = spec.hidden_size
    shapes = eagle_shapes(spec)
    if "model.fc.bias" in names:
        shapes.append(("model.fc.bias", (width,)))
    if _TABLE in names:
        num_rows = renamed.shape(_TABLE)[0]
        _check_rows(name, num_rows, target.spec.vocab_size)
        shapes.append((_TABLE, (num_rows, width)))
    check_names(spec, renamed, shapes)
    tables = _tables(renamed, groups)
    read = open_reader(spec, renamed, formats, groups, tables)
    return EagleModel(
        stack=_stack(spec, read, max_model_len),
        embedding=pick_embedding(read, _TABLE, tables.get(_TABLE), target),
        fc=read.linear(["model.fc"]),
        lm_head=target.lm_head,
        vocab=target.vocab,
    )


def _tables(source: WeightSource, groups: Groups) -> dict[str, VocabShards]:
    """The head's own tables, each with its own number of rows."""
    names = {_TABLE, _HEAD} & source.names()
    return {n: VocabShards(source.shape(n)[0], groups.tp) for n in names}


def _stack(
    spec: ModelSpec, read: Reader, max_model_len: int, *, is_alike: bool = True
) -> LayerStack:
    """`is_alike`: all layers have one shape, so that they may be fused."""
    formats, spec = read.formats, local_spec(spec, read.groups)
    kernels = pick_kernels(
        formats.device, spec.head_size, spec.group_size, formats.has_fixed_shapes
    )
    layers = [load_layer(spec, read, i, kernels) for i in range(spec.num_layers)]
    return LayerStack(
        spec=spec,
        layers=layers,
        rotation=rotation_of(spec, read.source, max_model_len).to(formats.device),
        kernels=kernels,
        fused=fuse_layers(spec, layers, kernels, formats.device) if is_alike else None,
    )


def eagle3_shapes(spec: Eagle3Spec, target: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    """Every tensor that an EAGLE-3 head must have beside this target."""
    layers = spec.layers
    width, at = layers.hidden_size, "model.layers.0."
    tap_width = len(spec.tap_ids) * spec.target_size
    shapes = dict(layer_shapes(replace(layers, has_first_norm=True)))
    for x in "qkv":
        name = f"{at}self_attn.{x}_proj.weight"
        shapes[name] = (shapes[name][0], 2 * width)
    shapes |= {_MARK: (width,), "model.norm.weight": (width,)}
    if spec.tap_ids:
        shapes["model.fc.weight"] = (width, tap_width)
    if spec.norms_taps_together:
        shapes["model.input_norm.weight"] = (tap_width,)
    if spec.norms_each_tap:
        each = range(len(spec.tap_ids))
        shapes |= {f"model.fc_norm.{i}.weight": (spec.target_size,) for i in each}
    if spec.draft_vocab_size != target.vocab_size:
        shapes["model.d2t"] = (spec.draft_vocab_size,)
        shapes[_HEAD] = (spec.draft_vocab_size, width)
    if width != target.hidden_size:
        shapes[_HEAD] = (spec.draft_vocab_size, width)
        shapes[_TABLE] = (layers.vocab_size, width)
    return list(shapes.items())


def load_eagle3(
    name: str,
    spec: Eagle3Spec,
    source: WeightSource,
    formats: WeightFormats,
    target: Decoder,
    *,
    max_model_len: int,
    groups: Groups = ALONE,
) -> Eagle3Model:
    """Build this rank's part of the head.

    What it does not bring, it shares with the target where that can be.
    """
    renamed = _renamed(source)
    names = renamed.names()
    if _MARK not in names:
        raise CheckpointError(
            f"{name!r} has no tensor 'midlayer.hidden_norm.weight' or 'layers.0.hidden_norm."
            'weight\', so it is no EAGLE-3 head; for an EAGLE-1 head give "method": "eagle".'
        )
    layers = _as_stored(spec.layers, names)
    spec = replace(spec, layers=replace(layers, has_first_norm=False))
    shapes = dict(eagle3_shapes(spec, target.spec))
    optional: dict[str, tuple[int, ...]] = {
        _HEAD: (spec.draft_vocab_size, layers.hidden_size),
        "model.d2t": (spec.draft_vocab_size,),
        "model.fc.bias": (layers.hidden_size,),
    }
    if _TABLE in names:
        num_rows = renamed.shape(_TABLE)[0]
        _check_rows(name, num_rows, target.spec.vocab_size)
        optional[_TABLE] = (num_rows, layers.hidden_size)
    shapes |= {n: shape for n, shape in optional.items() if n in names}
    if "model.t2d" in names:  # which tokens it can draft: d2t says it too
        shapes["model.t2d"] = renamed.shape("model.t2d")
    check_names(spec.layers, renamed, shapes.items())
    tables = _tables(renamed, groups)
    read = open_reader(spec.layers, renamed, formats, groups, tables)
    # The first layer reads twice the width.
    stack = _stack(spec.layers, read, max_model_len, is_alike=layers.num_layers == 1)
    has_head = _HEAD in names
    return Eagle3Model(
        spec=spec,
        stack=stack,
        embedding=pick_embedding(read, _TABLE, tables.get(_TABLE), target),
        reader=_tap_reader(spec, read, stack) if spec.tap_ids else None,
        token_norm=read.norm("model.layers.0.input_layernorm.weight"),
        feature_norm=read.norm(_MARK),
        final_norm=read.norm("model.norm.weight"),
        lm_head=read.head("model.lm_head") if has_head else target.lm_head,
        vocab=tables[_HEAD] if has_head else target.vocab,
        token_of_V=_token_of(name, read, target.spec.vocab_size),
    )


def _tap_reader(spec: Eagle3Spec, read: Reader, stack: LayerStack) -> TapReader:
    norms: list[list[Tensor]] = []
    if spec.norms_each_tap:
        norms.append([read.norm(f"model.fc_norm.{i}.weight") for i in range(len(spec.tap_ids))])
    if spec.norms_taps_together:
        norms.append([read.norm("model.input_norm.weight")])
    fc, rms_norm = read.linear(["model.fc"]), stack.kernels.rms_norm
    return TapReader(fc, norms, rms_norm, stack.spec.norm_eps)


def _token_of(name: str, read: Reader, vocab_size: int) -> Tensor | None:
    """The target's id of each of the head's; the file holds how far it is from the head's own."""
    if "model.d2t" not in read.source.names():
        return None
    offset_V = read.source.load("model.d2t").to(torch.int64).cpu()
    token_V = torch.arange(len(offset_V)) + offset_V
    low, high = int(token_V.min()), int(token_V.max())
    if low < 0 or high >= vocab_size:
        raise CheckpointError(
            f"the EAGLE-3 head {name!r} drafts tokens {low} to {high} (d2t), the target has "
            f"{vocab_size}; the head belongs to another model."
        )
    num_distinct = len(token_V.unique())
    if num_distinct < len(token_V):
        raise CheckpointError(
            f"the EAGLE-3 head {name!r} has {len(token_V)} tokens, but d2t gives them only "
            f"{num_distinct} of the target's; it must hold offsets: target id - draft id."
        )
    return token_V.to(read.formats.device)


def _as_stored(spec: ModelSpec, names: set[str]) -> ModelSpec:
    """Heads' configs say little about biases and norms; their files show them."""
    at = "model.layers.0."
    return replace(
        spec,
        has_qkv_bias=at + "self_attn.q_proj.bias" in names,
        has_o_bias=at + "self_attn.o_proj.bias" in names,
        has_mlp_bias=at + "mlp.gate_proj.bias" in names,
        has_qk_norm=at + "self_attn.q_norm.weight" in names,
    )


def pick_embedding(
    read: Reader, name: str, vocab: VocabShards | None, target: Decoder
) -> Embedding:
    """The head's embedding; the target's own where the two are equal, as they often are."""
    if vocab is None:
        return target.embedding
    own = Embedding(read.table(name), vocab)
    return target.embedding if own.is_same(target.embedding) else own
