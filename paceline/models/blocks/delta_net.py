"""The gated delta net of Qwen3.5 and Qwen3-Next: tensors, and the cut by heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.kernels.delta_rule.reference import DeltaSizes, DeltaWeights
from paceline.kernels.table import Kernels, delta_rule, gated_norm
from paceline.layers.delta_net import GatedDeltaNet, OutputNorm
from paceline.models.matrix import Order
from paceline.models.reader import Reader
from paceline.models.sharding import Cut, Cuts, even_cut, share_of
from paceline.models.weight_source import NamedShape
from paceline.parallel.groups import Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec:
    """A recurrent state per value head. Its tokens have no rows in pages."""

    hidden_size: int
    sizes: DeltaSizes
    norm_eps: float
    is_sigmoid: bool = False  # the gate of the output; else silu
    is_grouped: bool = False  # Qwen3-Next: two projections, whose rows are grouped by key head

    has_pages = False
    latent_size = None
    num_kv_heads = 0
    rope_size = 0

    @property
    def num_heads(self) -> int:
        return self.sizes.num_value_heads

    @property
    def head_size(self) -> int:
        return self.sizes.value_size

    @property
    def _values(self) -> int:
        """Numbers of all value heads."""
        return self.sizes.num_value_heads * self.sizes.value_size

    @property
    def num_parameters(self) -> int:
        sizes = self.sizes
        matrices = self.hidden_size * (sizes.width + 2 * self._values)
        return matrices + sizes.channels * sizes.conv_size + 2 * sizes.num_value_heads

    def shapes(self, at: str, names: set[str] | None) -> list[NamedShape]:
        at += "linear_attn."
        sizes, heads = self.sizes, self.sizes.num_value_heads
        projections = {
            "qkv": sizes.channels,
            "z": self._values,
            "b": heads,
            "a": heads,
        }
        if self.is_grouped:
            projections = {"qkvz": sizes.channels + self._values, "ba": 2 * heads}
        return [
            *((f"{at}in_proj_{x}.weight", (n, self.hidden_size)) for x, n in projections.items()),
            (at + "conv1d.weight", (sizes.channels, 1, sizes.conv_size)),
            (at + "A_log", (heads,)),
            (at + "dt_bias", (heads,)),
            (at + "norm.weight", (sizes.value_size,)),
            (at + "out_proj.weight", (self.hidden_size, self._values)),
        ]

    def cuts(self, at: str, names: set[str], groups: Groups) -> Cuts:
        """Ranks share out the key heads, each with its value heads."""
        tp = groups.tp
        if tp.size == 1:
            return {}
        shapes = dict(self.shapes(at, None))
        at += "linear_attn."
        del shapes[at + "norm.weight"]  # all heads have the same
        cuts = {name: even_cut(0, shape[0], tp) for name, shape in shapes.items()}
        cuts[at + "out_proj.weight"] = even_cut(1, self._values, tp)
        # Rows of all queries, then of all keys, then of all values.
        keys = self.sizes.num_key_heads * self.sizes.key_size
        ranges, first = [], 0
        for count in (keys, keys, self._values):
            ((start, stop),) = even_cut(0, count, tp).ranges
            ranges.append((first + start, first + stop))
            first += count
        for name in {at + "in_proj_qkv.weight", at + "conv1d.weight"} & set(shapes):
            cuts[name] = Cut(0, tuple(ranges))
        return cuts

    def local(self, groups: Groups) -> DeltaNetSpec:
        sizes, size = self.sizes, groups.tp.size
        keys = share_of(sizes.num_key_heads, "key heads of linear attention", size)
        values = share_of(sizes.num_value_heads, "value heads of linear attention", size)
        return replace(self, sizes=sizes._replace(num_key_heads=keys, num_value_heads=values))

    def load(self, read: Reader, at: str, kernels: Kernels) -> GatedDeltaNet:
        at, device = at + "linear_attn.", read.formats.device
        names = ["qkv", "b", "a", "z"]
        orders: list[Order | None] = [None] * 4
        if self.is_grouped:
            names, orders = ["qkvz", "ba", "qkvz"], [self._qkv_rows, self._ba_rows, self._z_rows]
        conv_C1J = read.tensor(at + "conv1d.weight")
        # Small numbers that decide over long sequences: never rounded.
        A_log_N, bias_N, norm_V = (
            read.source.load(at + x).to(device, torch.float32)
            for x in ("A_log", "dt_bias", "norm.weight")
        )
        return GatedDeltaNet(
            input=read.linear([f"{at}in_proj_{x}" for x in names], orders),
            output=read.reduced(at + "out_proj"),
            weights=DeltaWeights(
                conv_C1J.squeeze(1).to(device, read.formats.compute).contiguous(),
                -A_log_N.exp(),
                bias_N,
            ),
            sizes=self.sizes,
            norm=OutputNorm(norm_V, self.norm_eps, self.is_sigmoid, read.formats.pick(gated_norm)),
            delta_rule=read.formats.pick(delta_rule),
        )

    # ---- rows of Qwen3-Next's projections: each key head has its q, k, v and z, or its b and a

    def _qkv_rows(self, rows: Tensor) -> Tensor:
        return torch.cat([x.flatten(0, 1) for x in self._by_key_head(rows)[:3]])

    def _z_rows(self, rows: Tensor) -> Tensor:
        return self._by_key_head(rows)[3].flatten(0, 1)

    def _by_key_head(self, rows: Tensor) -> tuple[Tensor, ...]:
        sizes = self.sizes
        key, value = sizes.key_size, self._values // sizes.num_key_heads
        by_head: Tensor = rows.unflatten(0, (sizes.num_key_heads, -1))
        parts: tuple[Tensor, ...] = by_head.split((key, key, value, value), dim=1)
        return parts

    def _ba_rows(self, rows: Tensor) -> Tensor:
        by_head: Tensor = rows.unflatten(0, (self.sizes.num_key_heads, 2, -1))
        return by_head.transpose(0, 1).flatten(0, 2)
