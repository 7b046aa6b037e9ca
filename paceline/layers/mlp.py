"""MLP blocks: normed activations in, the update of the residual stream out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.layers.attention import ForwardInputs
from paceline.layers.linear import Linear


class Mlp(Protocol):
    def __call__(self, x_TD: Tensor, inputs: ForwardInputs) -> Tensor: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True)
class GatedMlp:
    """down(silu(gate x) * up x). gate and up are one product."""

    gate_up: Linear
    down: Linear
    silu_and_mul: Callable[[Tensor], Tensor]

    def __call__(self, x_TD: Tensor, inputs: ForwardInputs | None = None) -> Tensor:
        return self.down(self.silu_and_mul(self.gate_up(x_TD)))

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes
