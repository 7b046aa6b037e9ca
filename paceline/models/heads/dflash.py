"""DFlash heads: context from tapped layers of the target, then one block of masks.

A context row is no token: each layer makes its key and value from the target's fused taps. Queries
are the newest token and K masks. Heads that add something to these layers (DFlash2, DSpark) are
read here too and have their parts in files of their own. Two formats: z-lab's and speculators'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.kernels.step_rows import BlockLayout
from paceline.layers.attention import BlockPass, WantedEntries
from paceline.layers.linear import Linear
from paceline.layers.vocab import Embedding, VocabShards
from paceline.models.config_json import Config, value_of
from paceline.models.decoder import Decoder, LayerStack
from paceline.models.heads.base import (
    TABLE,
    Chain,
    as_stored,
    draft_to_target_ids,
    for_norm,
    pick_embedding,
    renamed,
)
from paceline.models.heads.block_config import BlockConfig, LayerKind, is_dspark
from paceline.models.heads.dflash2 import (
    BlockConv,
    ConvSpec,
    SelectorSpec,
    read_convs,
    read_selector,
)
from paceline.models.heads.dspark import MarkovSpec, read_markov
from paceline.models.loading import check_names, layer_shapes, load_stack, open_reader
from paceline.models.quantised_config import refuse_quantised
from paceline.models.reader import WeightFormats
from paceline.models.spec import ModelSpec
from paceline.models.weight_source import NamedShape, WeightSource
from paceline.parallel.groups import ALONE, Groups
from paceline.speculation import SpeculativeConfig
from paceline.state.recurrent import LayerStorage

_HEAD = "model.lm_head.weight"
_NORMS = ("model.hidden_norm.weight", "model.norm.weight")


def read_dflash(
    name: str, values: Config, target: ModelSpec, options: SpeculativeConfig
) -> DFlashSpec:
    """Refuses heads that cannot work with this target, from the two configs alone."""
    refuse_quantised(values)
    config = BlockConfig(name, values)
    layers, kinds = config.layers(target), config.kinds()
    chain: MarkovSpec | SelectorSpec | None = None
    convs = None
    if is_dspark(values):
        chain = read_markov(config)
    elif config.has_convs:
        convs = read_convs(config, layers.hidden_size)
        chain = read_selector(config, layers.vocab_size)
    return DFlashSpec(
        name=name,
        title=config.title,
        layers=layers,
        layout=config.layout(options.num_speculative_tokens, target, kinds),
        target_size=config.target_size(target),
        draft_vocab_size=config.draft_vocab_size,
        tap_ids=config.tap_ids(target),
        kinds=kinds,
        chain=chain,
        convs=convs,
        scales=Scales.read(config),
    )


@dataclass(frozen=True, slots=True)
class DFlashSpec:
    """See HeadSpec."""

    name: str
    title: str
    layers: ModelSpec
    layout: BlockLayout
    target_size: int  # the target's hidden size
    draft_vocab_size: int
    tap_ids: tuple[int, ...]
    kinds: tuple[LayerKind, ...]
    chain: MarkovSpec | SelectorSpec | None
    convs: ConvSpec | None
    scales: Scales

    def shapes(self, target: ModelSpec) -> list[NamedShape]:
        """With tables only if they cannot be the target's."""
        width = self.layers.hidden_size
        shapes = [
            *layer_shapes(self.layers),
            *((name, (width,)) for name in _NORMS),
            ("model.fc.weight", (width, len(self.tap_ids) * self.target_size)),
        ]
        has_own_ids = self.draft_vocab_size != target.vocab_size
        has_own_width = width != target.hidden_size
        if has_own_ids:
            shapes.append(("model.d2t", (self.draft_vocab_size,)))
        if has_own_ids or has_own_width:
            shapes.append((_HEAD, (self.draft_vocab_size, width)))
        if has_own_width:
            shapes.append((TABLE, (target.vocab_size, width)))
        if self.chain is not None:
            shapes += self.chain.shapes(width, target.vocab_size, self.draft_vocab_size)
        if self.convs is not None:
            shapes += self.convs.shapes(width, self.layers.num_layers)
        return shapes

    def load(
        self, source: WeightSource, formats: WeightFormats, target: Decoder, groups: Groups = ALONE
    ) -> DFlashModel:
        source = renamed(source)
        names = source.names()
        head = replace(self, layers=as_stored(self.layers, names))
        layers = head.layers
        check_names(layers, source, head._stored_shapes(source, target.spec))
        tables = {n: VocabShards(source.shape(n)[0], groups.tp) for n in {TABLE, _HEAD} & names}
        read = open_reader(layers, source, formats, groups, tables)
        rotation = layers.rope.table(layers.attention.rope_size, len(target.rotation), source)
        stack = load_stack(layers, read, rotation)
        has_head = _HEAD in names
        vocab = tables[_HEAD] if has_head else target.vocab
        return DFlashModel(
            spec=head,
            stack=stack,
            embedding=pick_embedding(read, TABLE, tables.get(TABLE), target),
            fc=read.linear(["model.fc"]),
            context_norm=read.norm(_NORMS[0]),
            final_norm=read.norm(_NORMS[1]),
            lm_head=read.head("model.lm_head") if has_head else target.lm_head,
            vocab=vocab,
            draft_to_target_ids=draft_to_target_ids(
                self.title, self.name, read, target.spec.vocab_size
            ),
            chain=None if self.chain is None else self.chain.load(read, vocab),
            convs=None if self.convs is None else self.convs.load(read, layers.num_layers),
        )

    def _stored_shapes(self, source: WeightSource, target: ModelSpec) -> list[NamedShape]:
        """`shapes`, and the optional tensors that the checkpoint has."""
        names, width = source.names(), self.layers.hidden_size
        shapes = dict(self.shapes(target))
        optional: dict[str, tuple[int, ...]] = {
            _HEAD: (self.draft_vocab_size, width),
            TABLE: (target.vocab_size, width),
            "model.d2t": (self.draft_vocab_size,),
            "model.fc.bias": (width,),
        }
        shapes |= {n: shape for n, shape in optional.items() if n in names}
        for name in names:  # which tokens it can draft, as d2t says; a head that trims drafts
            if name == "model.t2d" or name.startswith("model.confidence_head."):
                shapes[name] = source.shape(name)
            if name.endswith("self_attn.attention_sink_bias"):
                raise CheckpointError(
                    f"the {self.title} head {self.name!r} has attention sinks ({name}), which are "
                    "not supported."
                )
        return list(shapes.items())


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors that a head states for the embedding and the logits that it borrows."""

    embedding: float = 1.0
    logits: float = 1.0
    softcap: float = 0.0  # 0: none

    @classmethod
    def read(cls, config: BlockConfig) -> Scales:
        def number(name: str, default: float) -> float:
            return value_of({name: config.key(name)}, name, float, default)

        multiplier = number("output_multiplier", 1.0) * number("logit_scale", 1.0)
        softcap = number("final_logit_softcapping", 0.0)
        return cls(number("input_embedding_scale", 1.0), multiplier, softcap)

    def of_logits(self, logits_NV: Tensor) -> Tensor:
        if self.logits != 1.0:
            logits_NV = logits_NV * self.logits
        if self.softcap:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        return logits_NV


@dataclass(slots=True)
class DFlashModel:
    """See BlockModel. Context rows enter every layer as they are; only keys and values are made."""

    spec: DFlashSpec
    stack: LayerStack
    embedding: Embedding
    fc: Linear
    context_norm: Tensor
    final_norm: Tensor
    lm_head: Linear
    vocab: VocabShards
    draft_to_target_ids: Tensor | None
    chain: Chain | None
    convs: list[tuple[BlockConv, BlockConv]] | None

    @property
    def layout(self) -> BlockLayout:
        return self.spec.layout

    @property
    def tap_ids(self) -> tuple[int, ...]:
        return self.spec.tap_ids

    def forward(self, batch: BlockPass, target_TD: Tensor, pages: Sequence[LayerStorage]) -> Tensor:
        stack, inputs = self.stack, batch.inputs
        kernels, eps = stack.kernels, stack.spec.norm_eps
        fused_TD = for_norm(self.fc(batch.of_target(target_TD)))
        context_TD = kernels.rms_norm(fused_TD, self.context_norm, eps)
        rotation_TH = stack.rotation.index_select(0, inputs.position_T)
        if not len(batch.offset_E):
            for layer, storage in zip(stack.layers, pages, strict=True):
                layer.attention.store(context_TD, rotation_TH, inputs, storage)
            return context_TD[:0]
        wanted = self._wanted(batch)
        token_ED = self.embedding(inputs.token_T[batch.num_committed :])
        residual_ED = token_ED.float() * self.spec.scales.embedding
        delta_ED: Tensor | None = None
        for i, layer in enumerate(stack.layers):
            assert layer.input_norm is not None
            seen = wanted[self.spec.kinds[i]]

            def attend(u_ED: Tensor, i: int = i, seen: WantedEntries = seen) -> Tensor:
                both_TD = torch.cat((context_TD, u_ED))
                return stack.layers[i].attention(both_TD, rotation_TH, inputs, pages[i], seen)

            def think(u_ED: Tensor, i: int = i) -> Tensor:
                return stack.layers[i].mlp(u_ED, inputs)

            if delta_ED is None:
                x_ED = kernels.rms_norm(residual_ED, layer.input_norm, eps)
            else:
                x_ED = kernels.add_rms_norm(residual_ED, delta_ED, layer.input_norm, eps)
            delta_ED = self._part(i, 0, x_ED, batch, attend)
            x_ED = kernels.add_rms_norm(residual_ED, delta_ED, layer.post_norm, eps)
            delta_ED = self._part(i, 1, x_ED, batch, think)
        assert delta_ED is not None
        hidden_ED = kernels.add_rms_norm(residual_ED, delta_ED, self.final_norm, eps)
        return hidden_ED.index_select(0, batch.output_N - batch.num_committed)

    def _part(
        self,
        layer: int,
        index: int,
        x_ED: Tensor,
        batch: BlockPass,
        part: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Attention (0) or the MLP (1) of a layer, convolved if the head does so."""
        if self.convs is None:
            return part(x_ED)
        return self.convs[layer][index].around(x_ED, batch.offset_E, part)

    def _wanted(self, batch: BlockPass) -> dict[LayerKind, WantedEntries]:
        """What blocks attend to, in the layers of each kind."""
        stack, num_entries = self.stack, len(batch.offset_E)
        first, device = batch.num_committed, batch.offset_E.device
        entry_E = torch.arange(first, first + num_entries, device=device)
        found: dict[LayerKind, WantedEntries] = {}
        for kind in sorted(set(self.spec.kinds), key=str):
            part = replace(batch.block, **kind._asdict())
            if stack.kernels.prepare_attention is not None:
                stack.kernels.prepare_attention(part, num_entries, stack.spec.num_kv_heads)
            found[kind] = WantedEntries(entry_E, part)
        return found

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self.spec.scales.of_logits(self.lm_head(hidden_ND).float())
