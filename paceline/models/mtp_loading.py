"""A target's own MTP layer to a draft head: `model.layers.{L}`, one past the target's last layer.

Its decoder layer is loaded as the target's are; what it does not bring, it shares with the target.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.layers.linear import Linear
from paceline.models.decoder import Decoder, LayerStack
from paceline.models.draft_heads import MtpModel
from paceline.models.fused import fuse_layers
from paceline.models.loading import (
    Reader,
    WeightFormats,
    WeightSource,
    check_names,
    layer_shapes,
    load_layer,
)
from paceline.models.spec import ModelSpec

_FIRST = "model.layers.0."


def mtp_shapes(
    spec: ModelSpec, index: int, names: set[str] | None = None
) -> list[tuple[str, tuple[int, ...]]]:
    """Every tensor that the layer must have; embedding and head may be the target's.

    `names` are those that the file has: see models/moe_loading.
    """
    at, width = f"model.layers.{index}.", spec.hidden_size
    as_first = None if names is None else {_FIRST + n.removeprefix(at) for n in names}
    shapes = layer_shapes(spec, as_first)
    layer = [(at + name.removeprefix(_FIRST), shape) for name, shape in shapes]
    return [
        *layer,
        (at + "enorm.weight", (width,)),
        (at + "hnorm.weight", (width,)),
        (at + "eh_proj.weight", (width, 2 * width)),
        (at + "shared_head.norm.weight", (width,)),
    ]


@dataclass(slots=True)
class _OneLayer:
    """The tensors of one layer of a checkpoint; others are not there."""

    source: WeightSource
    at: str
    _names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._names = {n for n in self.source.names() if n.startswith(self.at)}

    def names(self) -> set[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def load(self, name: str) -> Tensor:
        return self.source.load(name)

    def blocks(self, name: str) -> tuple[str, Tensor] | None:
        return self.source.blocks(name)


def load_mtp(
    name: str,
    spec: ModelSpec,
    source: WeightSource,
    formats: WeightFormats,
    target: Decoder,
) -> MtpModel:
    """Build the head from the target's checkpoint."""
    index = target.spec.num_layers
    at = f"model.layers.{index}."
    layer = _OneLayer(source, at)
    if at + "eh_proj.weight" not in layer.names():
        found = f"{len(layer.names())} tensors" if layer.names() else "no tensor"
        raise CheckpointError(
            f"{name!r} has {found} under '{at}' and no '{at}eh_proj.weight': config.json "
            "announces an MTP layer, but whoever converted the weights dropped it; use the "
            'original checkpoint, or another method than "mtp".'
        )
    shapes = dict(mtp_shapes(spec, index, layer.names()))
    tables = {at + "embed_tokens.weight", at + "shared_head.head.weight"} & layer.names()
    vocabulary = (target.spec.vocab_size, spec.hidden_size)
    check_names(spec, layer, [*shapes.items(), *((n, vocabulary) for n in sorted(tables))])
    read = Reader(layer, formats)
    layers = [load_layer(spec, read, index, target.kernels)]
    return MtpModel(
        stack=LayerStack(
            spec=spec,
            layers=layers,
            rotation=target.rotation,
            kernels=target.kernels,
            fused=fuse_layers(spec, layers, target.kernels, formats.device),
        ),
        embedding_VD=_table(read, at + "embed_tokens.weight", target),
        token_norm=read.norm(at + "enorm.weight"),
        feature_norm=read.norm(at + "hnorm.weight"),
        projection=read.linear([at + "eh_proj"]),
        final_norm=read.norm(at + "shared_head.norm.weight"),
        lm_head=_head(read, at + "shared_head.head", source, target),
    )


def _table(read: Reader, name: str, target: Decoder) -> Tensor:
    shared = target.embedding_VD
    if name not in read.source.names():
        return shared
    table_VD = read.table(name)
    return shared if torch.equal(table_VD, shared) else table_VD


def _head(read: Reader, name: str, source: WeightSource, target: Decoder) -> Linear:
    """The target's, unless the layer has another one. Files hold a copy as a rule."""
    names, own = source.names(), f"{name}.weight"
    if own not in names:
        return target.lm_head
    shared = "lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight"
    if torch.equal(source.load(own), source.load(shared)):
        return target.lm_head
    return read.head(name)
