"""Builds a decoder from a checkpoint: checks its tensors, then reads them layer by layer.

A block's tensors are read by its class in models/blocks. One layer is read at a time, so that the
checkpoint is never in memory twice.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch

from paceline.errors import CheckpointError
from paceline.kernels.table import pick_kernels
from paceline.layers.rope import padded_table
from paceline.layers.vocab import Embedding, VocabShards
from paceline.models.decoder import Decoder, DecoderLayer, LayerStack
from paceline.models.fused import fuse_layers
from paceline.models.kv_scales import SCALE_ENDINGS
from paceline.models.reader import Reader, WeightFormats
from paceline.models.sharding import Cuts, vocab_rows
from paceline.models.spec import ModelSpec
from paceline.models.weight_source import NamedShape, NamedShapes, SlicedWeights, WeightSource
from paceline.observe.progress import OnProgress
from paceline.parallel.groups import ALONE, Groups

logger = logging.getLogger(__name__)

_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class LayerNames(NamedTuple):
    """Where a stack's layers are in a checkpoint."""

    root: str = "model.layers."
    first: int = 0

    def prefix(self, index: int) -> str:
        return f"{self.root}{self.first + index}."


_LAYERS = LayerNames()
# Parts of a checkpoint that are read only if they are asked for, or never.
_MTP, _VISION = "mtp.", ("model.visual.", "visual.", "vision_tower.")


def expected_shapes(spec: ModelSpec, names: set[str] | None = None) -> list[NamedShape]:
    """Every tensor of a checkpoint of this spec; `names`: see BlockSpec.shapes."""
    shapes: list[NamedShape] = [
        (_TABLE, (spec.vocab_size, spec.hidden_size)),
        ("model.norm.weight", (spec.hidden_size,)),
    ]
    if not spec.is_tied:
        shapes.append((_HEAD, (spec.vocab_size, spec.hidden_size)))
    return shapes + layer_shapes(spec, names)


def layer_shapes(
    spec: ModelSpec, names: set[str] | None = None, where: LayerNames = _LAYERS
) -> list[NamedShape]:
    """Every tensor of the layers."""
    shapes: list[NamedShape] = []
    for i, layer in enumerate(spec.layers):
        at = where.prefix(i)
        if i or spec.has_first_norm:
            shapes.append((at + "input_layernorm.weight", (spec.hidden_size,)))
        shapes.append((at + "post_attention_layernorm.weight", (spec.hidden_size,)))
        shapes += layer.attention.shapes(at, names) + layer.mlp.shapes(at, names)
    return shapes


def check_names(spec: ModelSpec, source: WeightSource, shapes: NamedShapes) -> None:
    """Name the first missing tensor or wrong shape; warn about tensors that are not used."""
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
    ignored = ("rotary_emb.inv_freq", "rope_freqs.weight", _HEAD, *SCALE_ENDINGS)
    others = {n for n in names - set(expected) if not n.endswith(ignored)}
    vision = {n for n in others if n.startswith(_VISION)}
    if vision:
        logger.info("%d tensors of the vision part are not read: only text is served", len(vision))
    unused = sorted(n for n in others - vision if not _is_draft_layer(n, spec.num_layers))
    if unused:
        logger.warning("%d tensors are not used, for instance %s", len(unused), unused[0])


def _is_draft_layer(name: str, num_layers: int) -> bool:
    """Layers behind the last are an MTP head, which is read only if it is asked for."""
    if name.startswith(_MTP):
        return True
    index = name.removeprefix("model.layers.").partition(".")[0]
    return index != name and index.isdigit() and int(index) >= num_layers


def open_reader(
    spec: ModelSpec,
    source: WeightSource,
    formats: WeightFormats,
    groups: Groups,
    tables: Mapping[str, VocabShards],
    where: LayerNames = _LAYERS,
) -> Reader:
    """Reads this rank's slices of vocabulary tables and of the layers."""
    names = source.names()
    cuts: Cuts = {}
    for i, layer in enumerate(spec.layers):
        cuts |= layer.attention.cuts(where.prefix(i), names, groups)
        cuts |= layer.mlp.cuts(where.prefix(i), names, groups)
    if groups.tp.size > 1:
        cuts |= {name: vocab_rows(vocab) for name, vocab in tables.items()}
    if cuts:
        # Added after a sum over ranks, so only one rank may have them.
        once = frozenset(n for n in names if n.endswith(("o_proj.bias", "down_proj.bias")))
        source = SlicedWeights(source, cuts, once, groups.tp.rank == 0)
    if formats.has_fp8_pages and not any(n.endswith(".k_scale") for n in names):
        logger.info("no scales of keys and values are stored: fp8 pages have the scale 1.0")
    return Reader(source, formats, groups, spec.has_unit_norms, spec.num_kv_heads)


def load_stack(
    spec: ModelSpec,
    read: Reader,
    rotation: torch.Tensor,
    *,
    where: LayerNames = _LAYERS,
    progress: OnProgress | None = None,
) -> LayerStack:
    """This rank's part of the layers."""
    spec, formats = spec.local(read.groups), read.formats
    shape = (spec.head_size, spec.group_size, formats.has_fixed_shapes)
    kernels = pick_kernels(formats.device, *shape)
    if spec.has_unit_norms:
        kernels = kernels.giving(formats.compute)
    layers: list[DecoderLayer] = []
    for i, layer in enumerate(spec.layers):
        at, has_norm = where.prefix(i), i > 0 or spec.has_first_norm
        layers.append(
            DecoderLayer(
                input_norm=read.norm(at + "input_layernorm.weight") if has_norm else None,
                attention=layer.attention.load(read, at, kernels),
                post_norm=read.norm(at + "post_attention_layernorm.weight"),
                mlp=layer.mlp.load(read, at, kernels),
            )
        )
        if progress:
            progress("weights", (i + 1) / (spec.num_layers + 1))
    return LayerStack(
        spec=spec,
        layers=layers,
        rotation=rotation.to(formats.device),
        kernels=kernels,
        fused=fuse_layers(spec, layers, kernels, formats.device),
    )


def load_decoder(
    spec: ModelSpec,
    source: WeightSource,
    formats: WeightFormats,
    *,
    max_model_len: int,
    progress: OnProgress | None = None,
    groups: Groups = ALONE,
) -> Decoder:
    """Build this rank's part of the decoder.

    `spec` and `source` are the whole model's. `progress` gets a name and a share of the work.
    """
    # The file's own head wins over the flag, as in transformers.
    has_head = _HEAD in source.names()
    check_names(spec, source, expected_shapes(spec, source.names()))
    vocab = VocabShards(spec.vocab_size, groups.tp)
    read = open_reader(spec, source, formats, groups, dict.fromkeys((_TABLE, _HEAD), vocab))
    attention = spec.attention
    rotation = spec.rope.table(attention.rope_size, max_model_len, source)
    if attention.latent_size is None and attention.rope_size < attention.head_size:
        rotation = padded_table(rotation, attention.head_size // 2)
    stack = load_stack(spec, read, rotation, progress=progress)
    decoder = Decoder(
        spec=stack.spec,
        embedding=Embedding(read.table(_TABLE), vocab),
        layers=stack.layers,
        final_norm=read.norm("model.norm.weight"),
        lm_head=read.head((_HEAD if has_head else _TABLE).removesuffix(".weight")),
        vocab=vocab,
        rotation=stack.rotation,
        kernels=stack.kernels,
        fused=stack.fused,
    )
    if decoder.fused is not None and formats.device.type == "cpu":
        # Compile the kernels around the layers now, not while the first request waits.
        zeros_TD = torch.zeros(1, spec.hidden_size)
        decoder.logits(decoder.kernels.add_rms_norm(zeros_TD, zeros_TD, decoder.final_norm, 1.0))
    if progress:
        progress("weights", 1.0)
    return decoder
