"""A target's own MTP layer to a draft head: `model.layers.{L}`, one past the target's last layer.

Its decoder layer is loaded as the target's are; what it does not bring, it shares with the target.
"""

from __future__ import annotations

import torch

from paceline.errors import CheckpointError
from paceline.kernels.dispatch import pick_kernels
from paceline.layers.vocab import VocabShards, all_agree
from paceline.models.decoder import Decoder, LayerStack
from paceline.models.draft_heads import MtpModel
from paceline.models.fused import fuse_layers
from paceline.models.head_loading import pick_embedding
from paceline.models.loading import (
    SomeWeights,
    WeightFormats,
    WeightSource,
    check_names,
    layer_shapes,
    load_layer,
    open_reader,
)
from paceline.models.sharding import local_spec, vocab_rows
from paceline.models.spec import ModelSpec
from paceline.parallel.groups import ALONE, Groups

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


def load_mtp(
    name: str,
    spec: ModelSpec,
    source: WeightSource,
    formats: WeightFormats,
    target: Decoder,
    *,
    groups: Groups = ALONE,
) -> MtpModel:
    """Build this rank's part of the head from the target's checkpoint."""
    index = target.spec.num_layers
    at = f"model.layers.{index}."
    layer = SomeWeights(source, {n: n for n in source.names() if n.startswith(at)})
    if at + "eh_proj.weight" not in layer.names():
        found = f"{len(layer.names())} tensors" if layer.names() else "no tensor"
        raise CheckpointError(
            f"{name!r} has {found} under '{at}' and no '{at}eh_proj.weight': config.json "
            "announces an MTP layer, but whoever converted the weights dropped it; use the "
            'original checkpoint, or another method than "mtp".'
        )
    if f"model.layers.{index + 1}.eh_proj.weight" in source.names():
        raise CheckpointError(
            f"{name!r} has several MTP layers: after '{at}' comes 'model.layers.{index + 1}.'; "
            "only checkpoints with a single one, which drafts again and again, are supported."
        )
    shapes = dict(mtp_shapes(spec, index, layer.names()))
    table, head = at + "embed_tokens.weight", at + "shared_head.head.weight"
    tables = {table, head} & layer.names()
    vocabulary = (target.spec.vocab_size, spec.hidden_size)
    check_names(spec, layer, [*shapes.items(), *((n, vocabulary) for n in sorted(tables))])
    vocab = VocabShards(target.spec.vocab_size, groups.tp)
    read = open_reader(spec, layer, formats, groups, dict.fromkeys(tables, vocab), index)
    spec = local_spec(spec, groups)
    # Not the target's: at another layout there are other groups of heads.
    shape = (spec.head_size, spec.group_size, formats.has_fixed_shapes)
    kernels = pick_kernels(formats.device, *shape)
    layers = [load_layer(spec, read, index, kernels)]
    brings_head = head in tables and not _is_targets(source, head, target)
    return MtpModel(
        stack=LayerStack(
            spec=spec,
            layers=layers,
            rotation=target.rotation,
            kernels=kernels,
            fused=fuse_layers(spec, layers, kernels, formats.device),
        ),
        embedding=pick_embedding(read, table, vocab if table in tables else None, target),
        token_norm=read.norm(at + "enorm.weight"),
        feature_norm=read.norm(at + "hnorm.weight"),
        projection=read.linear([at + "eh_proj"]),
        final_norm=read.norm(at + "shared_head.norm.weight"),
        lm_head=read.head(head.removesuffix(".weight")) if brings_head else target.lm_head,
        vocab=vocab if brings_head else target.vocab,
    )


def _is_targets(source: WeightSource, name: str, target: Decoder) -> bool:
    """Whether a head is the target's: files hold a copy as a rule. Asked by all of its ranks."""
    names, vocab = source.names(), target.vocab
    shared = "lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight"
    cut = vocab_rows(vocab)
    is_same = torch.equal(source.load(name, cut), source.load(shared, cut))
    return all_agree(vocab.group, is_same, target.final_norm.device)
