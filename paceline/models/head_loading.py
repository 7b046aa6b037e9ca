"""Checkpoint tensors to a draft head: names with and without prefix, and what the target lends it.

Refuses heads that cannot work with their target; warns where they can, but hardly will.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.kernels.dispatch import pick_kernels
from paceline.models.decoder import Decoder, LayerStack
from paceline.models.draft_heads import EagleModel
from paceline.models.fused import fuse_layers
from paceline.models.loading import (
    Progress,
    Reader,
    WeightFormats,
    WeightSource,
    check_names,
    layer_shapes,
    load_layer,
    rotation_of,
)
from paceline.models.spec import ModelSpec

logger = logging.getLogger(__name__)

_TABLE = "model.embed_tokens.weight"


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


@dataclass(slots=True)
class _Renamed:
    """A head's tensors under one kind of name: all begin with `model.`."""

    source: WeightSource
    _stored: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.source.names():
            self._stored["model." + name.removeprefix("model.")] = name

    def names(self) -> set[str]:
        return set(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(self._stored[name])

    def load(self, name: str) -> Tensor:
        return self.source.load(self._stored[name])

    def blocks(self, name: str) -> tuple[str, Tensor] | None:
        return self.source.blocks(self._stored[name])


def load_eagle(
    name: str,
    spec: ModelSpec,
    source: WeightSource,
    formats: WeightFormats,
    target: Decoder,
    *,
    max_model_len: int,
    progress: Progress | None = None,
) -> EagleModel:
    """Build the head. What it does not bring, it shares with the target."""
    renamed = _Renamed(source)
    names = renamed.names()
    if "model.d2t" in names or any(n.startswith("model.midlayer.") for n in names):
        raise CheckpointError(
            f'{name!r} is an EAGLE-3 head, which is not supported yet; method "eagle" takes '
            "EAGLE-1 heads."
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
    read = Reader(renamed, formats)
    kernels = pick_kernels(
        formats.device, spec.head_size, spec.group_size, formats.has_fixed_shapes
    )
    layers = [load_layer(spec, read, i, kernels) for i in range(spec.num_layers)]
    model = EagleModel(
        stack=LayerStack(
            spec=spec,
            layers=layers,
            rotation=rotation_of(spec, renamed, max_model_len).to(formats.device),
            kernels=kernels,
            fused=fuse_layers(spec, layers, kernels, formats.device),
        ),
        embedding_VD=_table(read, target),
        fc=read.linear(["model.fc"]),
        lm_head=target.lm_head,
    )
    if progress:
        progress("weights", 1.0)
    return model


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


def _table(read: Reader, target: Decoder) -> Tensor:
    """The head's embedding; the target's own tensor where the two are equal, as they often are."""
    shared = target.embedding_VD
    if _TABLE not in read.source.names():
        return shared
    table_VD = read.table(_TABLE)
    is_alike = table_VD.shape == shared.shape and table_VD.dtype == shared.dtype
    return shared if is_alike and torch.equal(table_VD, shared) else table_VD
