"""The gated MLP of Llama and its relatives: gate, up and down projections."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.kernels.table import Kernels
from paceline.layers.mlp import GatedMlp
from paceline.models.reader import Reader
from paceline.models.sharding import Cuts, even_cut, share_of
from paceline.models.weight_source import NamedShape
from paceline.parallel.groups import Groups


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """down(silu(gate x) * up x)."""

    hidden_size: int
    inner_size: int
    has_bias: bool = False

    has_experts = False

    @property
    def num_parameters(self) -> int:
        return 3 * self.hidden_size * self.inner_size

    @property
    def peak_width(self) -> int:
        return 3 * self.inner_size

    def shapes(self, at: str, names: set[str] | None) -> list[NamedShape]:
        width, inner = self.hidden_size, self.inner_size
        shapes: list[NamedShape] = []
        for name, rows, columns in (
            ("gate", inner, width),
            ("up", inner, width),
            ("down", width, inner),
        ):
            shapes.append((f"{at}mlp.{name}_proj.weight", (rows, columns)))
            if self.has_bias:
                shapes.append((f"{at}mlp.{name}_proj.bias", (rows,)))
        return shapes

    def cuts(self, at: str, names: set[str], groups: Groups) -> Cuts:
        """Ranks share out the inner values."""
        if groups.tp.size == 1:
            return {}
        inner = even_cut(0, self.inner_size, groups.tp)
        cuts: Cuts = {f"{at}mlp.down_proj.weight": replace(inner, dim=1)}
        for name in ("gate", "up"):
            cuts[f"{at}mlp.{name}_proj.weight"] = inner
            cuts[f"{at}mlp.{name}_proj.bias"] = inner
        return cuts

    def local(self, groups: Groups) -> DenseSpec:
        what = "inner values of an MLP (intermediate_size)"
        return replace(self, inner_size=share_of(self.inner_size, what, groups.tp.size))

    def load(self, read: Reader, at: str, kernels: Kernels) -> GatedMlp:
        return GatedMlp(
            gate_up=read.linear([at + "mlp.gate_proj", at + "mlp.up_proj"]),
            down=read.reduced(at + "mlp.down_proj"),
            silu_and_mul=kernels.silu_and_mul,
        )
