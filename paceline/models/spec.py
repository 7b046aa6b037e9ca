"""A model as data: the sizes of a decoder and the blocks of its layers.

Families (models/families) make specs from config.json; models/loading builds a decoder from one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

from paceline.layers.vocab import VocabShards
from paceline.models.rope import RopeSpec

if TYPE_CHECKING:
    from paceline.kernels.delta_rule.reference import DeltaSizes
    from paceline.kernels.table import Kernels
    from paceline.layers.attention import Attention
    from paceline.layers.mlp import Mlp
    from paceline.models.reader import Reader
    from paceline.models.sharding import Cuts
    from paceline.models.weight_source import NamedShape
    from paceline.parallel.groups import Groups


class BlockSpec(Protocol):
    """One block of a layer. A class of models/blocks knows everything about its kind of block:
    sizes, tensor names, how ranks share it and how it is loaded.

    `at` is the prefix of the layer's tensor names, such as "model.layers.3.".
    """

    @property
    def num_parameters(self) -> int: ...

    def shapes(self, at: str, names: set[str] | None) -> list[NamedShape]:
        """Every tensor of the block. `names` are the checkpoint's, for blocks that are stored in
        several layouts; None stands for dummy weights."""

    def cuts(self, at: str, names: set[str], groups: Groups) -> Cuts:
        """What this rank reads of each tensor. A tensor that is not listed is read whole."""

    def local(self, groups: Groups) -> Self:
        """The sizes of one rank's part. Raises ConfigError if the block does not divide."""


class AttentionSpec(BlockSpec, Protocol):
    """Attention, or what replaces it. A token has `num_kv_heads` rows of `head_size` numbers in
    each cache tensor."""

    @property
    def has_pages(self) -> bool:
        """False: the layer has a recurrent state instead."""

    @property
    def sizes(self) -> DeltaSizes | None:
        """Of the recurrent state; None: the layer has pages."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_size(self) -> int: ...

    @property
    def rope_size(self) -> int:
        """Numbers of a head that are rotated."""

    @property
    def latent_size(self) -> int | None:
        """See Pages.add_layers."""

    def load(self, read: Reader, at: str, kernels: Kernels) -> Attention: ...


class MlpSpec(BlockSpec, Protocol):
    """An MLP, or experts."""

    @property
    def has_experts(self) -> bool: ...

    @property
    def peak_width(self) -> int:
        """Numbers of one token that are in memory at once inside the block."""

    def load(self, read: Reader, at: str, kernels: Kernels) -> Mlp: ...


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Attention and MLP, each behind its norm."""

    attention: AttentionSpec
    mlp: MlpSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One causal decoder: layers over a residual stream. The attention of all layers has the same
    heads; recurrent layers have the same sizes."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    rope: RopeSpec
    max_position: int
    is_tied: bool
    sliding_window: int | None = None  # of every layer
    has_first_norm: bool = True  # False: layer 0 reads its input without a norm
    has_unit_norms: bool = False  # norms are stored as what is added to 1

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> AttentionSpec:
        """Of the layers with pages."""
        return next(x.attention for x in self.layers if x.attention.has_pages)

    @property
    def recurrent(self) -> DeltaSizes | None:
        """Of the layers without pages; None if there are none."""
        return next((x.attention.sizes for x in self.layers if x.attention.sizes), None)

    @property
    def num_recurrent_layers(self) -> int:
        return sum(not x.attention.has_pages for x in self.layers)

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_size(self) -> int:
        return self.attention.head_size

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def has_experts(self) -> bool:
        return any(x.mlp.has_experts for x in self.layers)

    @property
    def mlp_width(self) -> int:
        return max(x.mlp.peak_width for x in self.layers)

    @property
    def num_parameters(self) -> int:
        return self.weight_bytes(1)

    def weight_bytes(self, itemsize: int, *, is_fp8: bool = False) -> int:
        """`itemsize`: of what is not rounded to fp8."""
        blocks = sum(x.attention.num_parameters + x.mlp.num_parameters for x in self.layers)
        tables = (1 if self.is_tied else 2) * self.vocab_size * self.hidden_size
        return blocks * (1 if is_fp8 else itemsize) + tables * itemsize

    def kv_bytes_per_token(self, itemsize: int) -> int:
        tensors = 2 if self.attention.latent_size is None else 1
        num_layers = self.num_layers - self.num_recurrent_layers
        return tensors * num_layers * self.num_kv_heads * self.head_size * itemsize

    def local(self, groups: Groups) -> ModelSpec:
        """The sizes of one rank's part. The vocabulary stays whole: see layers/vocab."""
        VocabShards(self.vocab_size, groups.tp)  # refuses what does not divide
        layers = (LayerSpec(x.attention.local(groups), x.mlp.local(groups)) for x in self.layers)
        return replace(self, layers=tuple(layers))
