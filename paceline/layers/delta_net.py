"""Gated delta net: a recurrent state per value head instead of keys and values.

It replaces attention in most layers of Qwen3.5 and Qwen3-Next. The state is described in
kernels/delta_rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from paceline.kernels.delta_rule.reference import DeltaRows, DeltaSizes, DeltaState, DeltaWeights
from paceline.layers.attention import ForwardInputs, WantedEntries
from paceline.layers.linear import Linear
from paceline.state.recurrent import LayerStorage


@dataclass(slots=True)
class OutputNorm:
    """Of each value head, before the output's projection: the norm first, then the gate."""

    weight_V: Tensor  # fp32; the same for all heads
    eps: float
    is_sigmoid: bool  # else silu
    gated_norm: Callable[[Tensor, Tensor, Tensor, float, bool], Tensor]

    def __call__(self, x_TV: Tensor, gate_TV: Tensor) -> Tensor:
        return self.gated_norm(x_TV, gate_TV, self.weight_V, self.eps, self.is_sigmoid)


@dataclass(slots=True)
class GatedDeltaNet:
    """See layers/attention.Attention. One product gives q, k, v, b, a and the output's gate."""

    input: Linear
    output: Linear
    weights: DeltaWeights
    sizes: DeltaSizes
    norm: OutputNorm
    delta_rule: Callable[[Tensor, DeltaWeights, DeltaSizes, DeltaState, DeltaRows], Tensor]

    def __call__(
        self,
        x_TD: Tensor,
        rotation_TH: Tensor,
        inputs: ForwardInputs,
        storage: LayerStorage,
        wanted: WantedEntries | None = None,
    ) -> Tensor:
        return self.output(self.mix(self.input(x_TD), rotation_TH, inputs, storage, wanted))

    def mix(
        self,
        product_TP: Tensor,
        rotation_TH: Tensor,
        inputs: ForwardInputs,
        storage: LayerStorage,
        wanted: WantedEntries | None = None,
    ) -> Tensor:
        """Everything between the two projections."""
        assert isinstance(storage, DeltaState)
        assert inputs.recurrent is not None, "the pass has no rows for recurrent layers"
        sizes = self.sizes
        own_TP, gate_TV = product_TP[:, : sizes.width], product_TP[:, sizes.width :]
        out_TV = self.delta_rule(own_TP, self.weights, sizes, storage, inputs.recurrent)
        if wanted is not None:
            out_TV, gate_TV = (x.index_select(0, wanted.entry_N) for x in (out_TV, gate_TV))
        return self.norm(out_TV, gate_TV)

    def store(
        self, x_TD: Tensor, rotation_TH: Tensor, inputs: ForwardInputs, storage: LayerStorage
    ) -> None:
        raise AssertionError("a recurrent layer has no KV")

    @property
    def nbytes(self) -> int:
        return self.input.nbytes + self.output.nbytes
