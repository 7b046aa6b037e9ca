"""EAGLE-3 heads: read several layers of the target, and may have a smaller vocabulary.

Both public formats are read: flat (yuhuili) and nested (speculators).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.layers.attention import ForwardInputs
from paceline.layers.linear import Linear
from paceline.layers.vocab import Embedding, VocabShards
from paceline.models.config_json import Config, flag_of, value_of
from paceline.models.decoder import Decoder, LayerStack
from paceline.models.heads.base import (
    TABLE,
    as_stored,
    check_embedding,
    draft_to_target_ids,
    for_norm,
    pick_embedding,
    read_layers,
    renamed,
    warn_of_vocabulary,
    with_attention,
)
from paceline.models.loading import check_names, layer_shapes, load_stack, open_reader
from paceline.models.quantised_config import refuse_quantised
from paceline.models.reader import Reader, WeightFormats
from paceline.models.spec import ModelSpec
from paceline.models.weight_source import NamedShape, WeightSource
from paceline.parallel.groups import ALONE, Groups
from paceline.speculation import SpeculativeConfig
from paceline.state.recurrent import LayerStorage

logger = logging.getLogger(__name__)

TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
_HEAD = "model.lm_head.weight"
_MARK = "model.layers.0.hidden_norm.weight"  # only EAGLE-3 heads have it
_TOKEN_NORM = "model.layers.0.input_layernorm.weight"


def is_eagle3(config: Config) -> bool:
    marks = (config.get("speculators_model_type"), config.get("architectures"))
    return "draft_vocab_size" in config or "eagle3" in str(marks).lower()


def read_eagle3(
    name: str, config: Config, target: ModelSpec, options: SpeculativeConfig
) -> Eagle3Spec:
    """Refuses heads that cannot work with this target, from the two configs alone."""
    refuse_quantised(config)
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise CheckpointError(f"speculators_model_type {kind!r} is not supported; 'eagle3' is.")
    nested = value_of(config, "transformer_layer_config", dict, {})
    if nested and "norm_before_residual" not in config:
        logger.warning(
            "%s: config.json does not say norm_before_residual; taking false. If drafts are "
            "poor, it was true",
            name,
        )
    layers = read_layers(nested or config)
    # Layer 0 reads [embedding; feature], normed by the head itself.
    wide = with_attention(layers.layers[0], input_size=2 * layers.hidden_size)
    layers = replace(
        layers,
        family="eagle3",
        layers=(wide, *layers.layers[1:]),
        has_first_norm=False,
        max_position=target.max_position,
    )
    uses_taps = value_of(config, "eagle_config", dict, {}).get("use_aux_hidden_state", True)
    spec = Eagle3Spec(
        name=name,
        layers=layers,
        target_size=value_of(config, "target_hidden_size", int, layers.hidden_size),
        draft_vocab_size=value_of(config, "draft_vocab_size", int, layers.vocab_size),
        tap_ids=_tap_ids(name, config, target.num_layers, options) if uses_taps else (),
        norms_residual=flag_of(config, "norm_before_residual"),
        norms_taps_together=flag_of(config, "norm_before_fc"),
        norms_each_tap=flag_of(config, "fc_norm"),
        norms_output=flag_of(config, "norm_output"),
    )
    _check_sizes(spec, target)
    return spec


def _check_sizes(spec: Eagle3Spec, target: ModelSpec) -> None:
    name, width = spec.name, spec.layers.hidden_size
    if spec.target_size != target.hidden_size:
        raise CheckpointError(
            f"the EAGLE-3 head {name!r} reads hidden states of {spec.target_size} numbers, the "
            f"target's have {target.hidden_size}; a head reads the target it was trained for."
        )
    if not spec.tap_ids and width != target.hidden_size:
        raise CheckpointError(
            f"the EAGLE-3 head {name!r} reads the target's last hidden states as they are, but "
            f"its own have {width} numbers and the target's {target.hidden_size}."
        )
    warn_of_vocabulary("EAGLE-3", name, spec.layers, target)


def _tap_ids(
    name: str, config: Config, num_layers: int, options: SpeculativeConfig
) -> tuple[int, ...]:
    """The target layers that the head reads: from the command line, the config, or by default."""
    asked = options.eagle_aux_hidden_state_layer_ids
    places = (value_of(x, TAPS_KEY, list, []) for x in (config, config.get("eagle_config") or {}))
    listed = next((tuple(x) for x in places if x), None)
    if asked is not None:
        ids, why = asked, "asked for"
    elif listed is None:
        ids, why = (2, num_layers // 2, num_layers - 3), "the usual ones"
    elif listed == (1, num_layers // 2 - 1, num_layers - 4):
        # Some trainers write id k for the output of layer k. These are the usual ones, less 1.
        ids, why = tuple(x + 1 for x in listed), f"listed as {list(listed)}"
    else:
        ids, why = listed, "listed in its config.json"
    if len({x for x in ids if type(x) is int and 0 <= x <= num_layers}) < len(ids):
        raise CheckpointError(
            f"the EAGLE-3 head {name!r} reads the target after layers {list(ids)} ({why}), but "
            f"they must be distinct and between 0 and the target's {num_layers}; give "
            f'"{TAPS_KEY}" in the speculative config if the head was trained with others.'
        )
    return ids


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """See HeadSpec."""

    name: str
    layers: ModelSpec
    target_size: int  # the target's hidden size
    draft_vocab_size: int
    tap_ids: tuple[int, ...]  # empty: it reads the last hidden states, and has no fc
    norms_residual: bool  # the residual stream begins after hidden_norm, not before it
    norms_taps_together: bool = False
    norms_each_tap: bool = False
    norms_output: bool = False  # the next feature is what its lm_head reads

    def shapes(self, target: ModelSpec) -> list[NamedShape]:
        """With tables only if they cannot be the target's."""
        layers, width = self.layers, self.layers.hidden_size
        tap_width = len(self.tap_ids) * self.target_size
        shapes = layer_shapes(layers)
        shapes += [(x, (width,)) for x in (_TOKEN_NORM, _MARK, "model.norm.weight")]
        if self.tap_ids:
            shapes.append(("model.fc.weight", (width, tap_width)))
        if self.norms_taps_together:
            shapes.append(("model.input_norm.weight", (tap_width,)))
        if self.norms_each_tap:
            each = range(len(self.tap_ids))
            shapes += [(f"model.fc_norm.{i}.weight", (self.target_size,)) for i in each]
        has_own_ids = self.draft_vocab_size != target.vocab_size
        has_own_width = width != target.hidden_size
        if has_own_ids:
            shapes.append(("model.d2t", (self.draft_vocab_size,)))
        if has_own_ids or has_own_width:
            shapes.append((_HEAD, (self.draft_vocab_size, width)))
        if has_own_width:
            shapes.append((TABLE, (layers.vocab_size, width)))
        return shapes

    def load(
        self, source: WeightSource, formats: WeightFormats, target: Decoder, groups: Groups = ALONE
    ) -> Eagle3Model:
        source = renamed(source)
        names = source.names()
        if _MARK not in names:
            raise CheckpointError(
                f"{self.name!r} has no tensor 'midlayer.hidden_norm.weight' or 'layers.0."
                "hidden_norm.weight', so it is no EAGLE-3 head; for an EAGLE-1 head give "
                '"method": "eagle".'
            )
        head = replace(self, layers=as_stored(self.layers, names))
        layers = head.layers
        check_names(layers, source, head._stored_shapes(source, target.spec))
        # The head's own tables, each with its own number of rows.
        tables = {n: VocabShards(source.shape(n)[0], groups.tp) for n in {TABLE, _HEAD} & names}
        read = open_reader(layers, source, formats, groups, tables)
        rotation = layers.rope.table(layers.attention.rope_size, len(target.rotation), source)
        stack = load_stack(layers, read, rotation)
        has_head = _HEAD in names
        return Eagle3Model(
            spec=head,
            stack=stack,
            embedding=pick_embedding(read, TABLE, tables.get(TABLE), target),
            reader=head._tap_reader(read, stack) if head.tap_ids else None,
            token_norm=read.norm(_TOKEN_NORM),
            feature_norm=read.norm(_MARK),
            final_norm=read.norm("model.norm.weight"),
            lm_head=read.head("model.lm_head") if has_head else target.lm_head,
            vocab=tables[_HEAD] if has_head else target.vocab,
            draft_to_target_ids=draft_to_target_ids(
                "EAGLE-3", self.name, read, target.spec.vocab_size
            ),
        )

    def _stored_shapes(self, source: WeightSource, target: ModelSpec) -> list[NamedShape]:
        """`shapes`, and the optional tensors that the checkpoint has."""
        names, width = source.names(), self.layers.hidden_size
        shapes = dict(self.shapes(target))
        optional: dict[str, tuple[int, ...]] = {
            _HEAD: (self.draft_vocab_size, width),
            "model.d2t": (self.draft_vocab_size,),
            "model.fc.bias": (width,),
        }
        shapes |= {n: shape for n, shape in optional.items() if n in names}
        if TABLE in names:
            num_rows = source.shape(TABLE)[0]
            check_embedding(self.name, num_rows, target)
            shapes[TABLE] = (num_rows, width)
        if "model.t2d" in names:  # which tokens it can draft; d2t says the same
            shapes["model.t2d"] = source.shape("model.t2d")
        return list(shapes.items())

    def _tap_reader(self, read: Reader, stack: LayerStack) -> TapReader:
        norms: list[list[Tensor]] = []
        if self.norms_each_tap:
            each = range(len(self.tap_ids))
            norms.append([read.norm(f"model.fc_norm.{i}.weight") for i in each])
        if self.norms_taps_together:
            norms.append([read.norm("model.input_norm.weight")])
        fc, rms_norm = read.linear(["model.fc"]), stack.kernels.rms_norm
        return TapReader(fc, norms, rms_norm, stack.spec.norm_eps)


@dataclass(slots=True)
class TapReader:
    """One feature from the taps of the target: norms of some kind, then fc."""

    fc: Linear
    norms: list[list[Tensor]]  # applied in order: one norm for each tap, or one for all together
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    eps: float

    def __call__(self, tap_TD: Tensor) -> Tensor:
        for norms in self.norms:
            parts = [for_norm(x) for x in tap_TD.chunk(len(norms), dim=1)]
            normed = [self.rms_norm(x, w, self.eps) for x, w in zip(parts, norms, strict=True)]
            tap_TD = torch.cat(normed, dim=1)
        return self.fc(tap_TD)


@dataclass(slots=True)
class Eagle3Model:
    """Attention over [embedding; feature], each normed.

    Features are the residual stream after the last layer, before the final norm (with
    `norms_output`: after it).
    """

    spec: Eagle3Spec
    stack: LayerStack
    embedding: Embedding
    reader: TapReader | None
    token_norm: Tensor
    feature_norm: Tensor
    final_norm: Tensor
    lm_head: Linear
    vocab: VocabShards
    draft_to_target_ids: Tensor | None

    @property
    def tap_ids(self) -> tuple[int, ...]:
        return self.spec.tap_ids

    def read(self, target_TD: Tensor) -> Tensor:
        return target_TD if self.reader is None else self.reader(target_TD)

    def forward(
        self, inputs: ForwardInputs, feature_TD: Tensor, pages: Sequence[LayerStorage]
    ) -> Tensor:
        """The next features, fp32 unless they are normed."""
        stack, eps = self.stack, self.stack.spec.norm_eps
        rms_norm = stack.kernels.rms_norm
        token_TD = for_norm(self.embedding(inputs.token_T))
        normed_TD = rms_norm(for_norm(feature_TD), self.feature_norm, eps)
        x_TD = torch.cat((rms_norm(token_TD, self.token_norm, eps), normed_TD), dim=1)
        # A copy, because the stream is written in place and the features are used elsewhere too.
        start_TD = normed_TD if self.spec.norms_residual else feature_TD
        residual_TD = start_TD.to(torch.float32, copy=True)
        stream = stack.run(residual_TD, inputs, pages, x_TD)
        if not self.spec.norms_output:
            return stream.residual_TD.add_(stream.delta_TD)
        return stack.kernels.add_rms_norm(*stream, self.final_norm, eps)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """fp32 logits [B, draft vocabulary]."""
        if not self.spec.norms_output:
            eps = self.stack.spec.norm_eps
            hidden_BD = self.stack.kernels.rms_norm(hidden_BD, self.final_norm, eps)
        return self.lm_head(hidden_BD).float()
