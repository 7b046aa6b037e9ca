"""Reads tensors in the numeric formats that a model computes with.

Knows formats and ranks; which tensors a block has is decided by models/blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.kernels.table import Operation
from paceline.layers.linear import BlockFormat, Linear, LinearFormat, Reduced, for_logits
from paceline.models.weight_source import WeightSource
from paceline.parallel.groups import ALONE, Groups

P = ParamSpec("P")
R = TypeVar("R")
Order = Callable[[Tensor], Tensor]  # rows of a projection to those of a product


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """How weights are kept in memory: linears by `linear`, tables and norms in the given dtypes."""

    linear: LinearFormat
    embedding: torch.dtype
    norm: torch.dtype
    device: torch.device
    round_to: torch.dtype | None = None  # --dtype: round the checkpoint's values to this first
    name: str = "float32"  # shown to the user
    compute: torch.dtype = torch.float32  # of activations
    has_fixed_shapes: bool = False  # steps are padded and lengths live on the device
    blocks: BlockFormat | None = None  # linears that stay quantised

    def pick(self, operation: Operation[P, R]) -> Callable[P, R]:
        """Fixed shapes on the CPU are computed by the references, which take any type."""
        if self.has_fixed_shapes and self.device.type == "cpu":
            return operation.reference
        return operation.on(self.device)


@dataclass(slots=True)
class Reader:
    """Reads one rank's tensors of a model."""

    source: WeightSource
    formats: WeightFormats
    groups: Groups = ALONE
    has_unit_norms: bool = False  # norms are stored as what is added to 1

    def tensor(self, name: str) -> Tensor:
        value = self.source.load(name)
        if not value.is_floating_point() or value.dtype.itemsize == 1:
            raise CheckpointError(
                f"tensor {name!r} is stored in {value.dtype} and has no scales that Paceline can "
                "read (fp8 blocks: weight_scale_inv); use the original weights."
            )
        return value if self.formats.round_to is None else value.to(self.formats.round_to)

    def optional(self, name: str) -> Tensor | None:
        return self.tensor(name) if name in self.source.names() else None

    def table(self, name: str) -> Tensor:
        return self.tensor(name).to(self.formats.device, self.formats.embedding)

    def norm(self, name: str) -> Tensor:
        """In fp32 if 1 is added: the sum would lose the bits of a small weight in bf16."""
        stored, device = self.tensor(name), self.formats.device
        if self.has_unit_norms:
            return stored.to(device, torch.float32) + 1
        return stored.to(device, self.formats.norm)

    def head(self, name: str) -> Linear:
        """The product that gives logits."""
        return for_logits(self.linear([name]))

    def linear(self, names: list[str], orders: list[Order | None] | None = None) -> Linear:
        """Several projections as one product. An order takes the rows of a projection, all or
        some; None: all of them as stored. A name may occur twice."""
        orders = orders or [None] * len(names)
        biases = [self.optional(f"{n}.bias") for n in names]
        known = [_ordered(b, x) for b, x in zip(biases, orders, strict=True) if b is not None]
        bias = torch.cat(known) if known else None
        weights = [f"{n}.weight" for n in names]
        quantised = self._blocks(weights, orders)
        if quantised is not None and self.formats.blocks is not None:
            kept = self.formats.blocks(*quantised, bias)
            if kept is not None:
                return kept
        rows = [_ordered(self.tensor(n), x) for n, x in zip(weights, orders, strict=True)]
        return self.formats.linear(torch.cat(rows), bias)

    def reduced(self, name: str) -> Linear:
        """A projection whose inputs are divided over ranks: results are summed over `tp`."""
        part, tp = self.linear([name]), self.groups.tp
        return Reduced(part, tp) if tp.is_active else part

    def _blocks(self, names: list[str], orders: list[Order | None]) -> tuple[str, Tensor] | None:
        """The quantised rows of all projections. None if their types differ, if some are not
        quantised, or if --dtype asks for rounding."""
        if self.formats.blocks is None or self.formats.round_to is not None:
            return None
        found = [x for name in names if (x := self.source.blocks(name)) is not None]
        if len(found) < len(names) or len({kind for kind, _ in found}) > 1:
            return None
        rows = [_ordered(x, order) for (_, x), order in zip(found, orders, strict=True)]
        return found[0][0], torch.cat(rows)


def _ordered(rows: Tensor, order: Order | None) -> Tensor:
    return rows if order is None else order(rows)
