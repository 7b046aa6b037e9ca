"""Reads tensors in the numeric formats that a model computes with.

Knows formats and ranks; which tensors a block has is decided by models/blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.kernels.fp8.reference import Fp8Weight, quantise_weight
from paceline.kernels.table import Operation
from paceline.layers.fp8 import Fp8Format, JoinedLinear
from paceline.layers.linear import BlockFormat, Linear, LinearFormat, Reduced, for_logits
from paceline.models.matrix import Matrix, Order, joined, num_rows, ordered
from paceline.models.weight_source import WeightSource
from paceline.parallel.groups import ALONE, Groups

P = ParamSpec("P")
R = TypeVar("R")
# Projections that --quantization leaves alone: gates of a delta net, and those of draft heads that
# read two vectors side by side, which one scale by row fits badly.
_WIDE = tuple(f"{x}.weight" for x in ("in_proj_a", "in_proj_b", "in_proj_ba", "fc", "eh_proj"))


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
    has_fp8_pages: bool = False  # keys and values have scales
    has_fixed_shapes: bool = False  # steps are padded and lengths live on the device
    blocks: BlockFormat | None = None  # linears that stay quantised
    fp8: Fp8Format | None = None  # linears in e4m3; None: they are dequantised
    # --quantization: weights are rounded to e4m3 with a scale by output, or by block of 128 by 128.
    rounds_by: Literal["channel", "block"] | None = None

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
    num_kv_heads: int = 1  # of the whole model

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
        """The product that gives logits, with weights that are not rounded."""
        return for_logits(self.linear([name], is_wide=True))

    def linear(
        self, names: list[str], orders: list[Order | None] | None = None, *, is_wide: bool = False
    ) -> Linear:
        """Several projections as one product, or side by side if their weights are of several
        kinds. An order takes the rows of a projection, all or some; None: all of them as stored.
        A name may occur twice."""
        orders = orders or [None] * len(names)
        weights = [f"{n}.weight" for n in names]
        pairs = list(zip(weights, orders, strict=True))
        stored = [self.optional(f"{n}.bias") for n in names]
        biases = [b if b is None else _ordered(b, x) for b, x in zip(stored, orders, strict=True)]
        quantised = self._blocks(weights, orders)
        if quantised is not None and self.formats.blocks is not None:
            kind, rows = quantised
            kept = self.formats.blocks(kind, torch.cat(rows), _bias(biases, [len(x) for x in rows]))
            if kept is not None:
                return kept
        matrices = [self.wide_matrix(w, x) if is_wide else self.matrix(w, x) for w, x in pairs]
        bias = _bias(biases, [num_rows(x) for x in matrices])
        rounds = self.formats.rounds_by is not None
        products: list[tuple[Matrix, bool]] = []
        for name, matrix in zip(weights, matrices, strict=True):
            stays_wide = is_wide or (rounds and name.endswith(_WIDE))
            is_like = bool(products) and products[-1][1] == stays_wide
            both = joined(products[-1][0], matrix) if is_like else None
            if both is not None:
                products.pop()
            products.append((matrix if both is None else both, stays_wide))
        sizes = [num_rows(x) for x, _ in products]
        parts = [None] * len(sizes) if bias is None else bias.split(sizes)
        linears = [self.product(*x, bias) for x, bias in zip(products, parts, strict=True)]
        return linears[0] if len(linears) == 1 else JoinedLinear(linears)

    def product(
        self, matrix: Matrix, stays_wide: bool = False, bias: Tensor | None = None
    ) -> Linear:
        """In the format of its kind."""
        matrix = matrix if stays_wide else self.rounded(matrix)
        if isinstance(matrix, Tensor):
            return self.formats.linear(matrix, bias)
        assert self.formats.fp8 is not None, "e4m3 is read only where there is a format for it"
        return self.formats.fp8(matrix, bias)

    def matrix(self, name: str, order: Order | None = None) -> Matrix:
        """In e4m3 if it is stored so, and if rows in this order have whole blocks."""
        stored = None if self.formats.fp8 is None else self.source.blocks(name)
        found = ordered(stored, order) if isinstance(stored, Fp8Weight) else None
        return self.wide_matrix(name, order) if found is None else found

    def wide_matrix(self, name: str, order: Order | None = None) -> Tensor:
        return _ordered(self.tensor(name), order)

    def fused(self, name: str) -> Iterator[Matrix]:
        """The matrices of a stack of experts."""
        stored = None if self.formats.fp8 is None else self.source.blocks(name)
        if not isinstance(stored, Fp8Weight):
            return iter(self.tensor(name))
        codes, scale, is_blocked = stored
        return (Fp8Weight(*x, is_blocked) for x in zip(codes, scale, strict=True))

    def rounded(self, matrix: Matrix) -> Matrix:
        """With --quantization: in e4m3."""
        by = self.formats.rounds_by
        if by is None or isinstance(matrix, Fp8Weight):
            return matrix
        return quantise_weight(matrix.to(self.formats.device), by == "block")

    def reduced(self, name: str) -> Linear:
        """A projection whose inputs are divided over ranks: results are summed over `tp`."""
        part, tp = self.linear([name]), self.groups.tp
        return Reduced(part, tp) if tp.is_active else part

    def _blocks(
        self, names: list[str], orders: list[Order | None]
    ) -> tuple[str, list[Tensor]] | None:
        """The GGUF blocks of each projection. None if their types differ, if some are not
        quantised, or if --dtype asks for rounding."""
        if self.formats.blocks is None or self.formats.round_to is not None:
            return None
        stored = [self.source.blocks(name) for name in names]
        found = [x for x in stored if x is not None and not isinstance(x, Fp8Weight)]
        if len(found) < len(names) or len({kind for kind, _ in found}) > 1:
            return None
        rows = [_ordered(x, order) for (_, x), order in zip(found, orders, strict=True)]
        return found[0][0], rows


def _bias(biases: list[Tensor | None], sizes: list[int]) -> Tensor | None:
    """Of all projections together: zeros for one that has none."""
    known = [x for x in biases if x is not None]
    if not known:
        return None
    pairs = zip(biases, sizes, strict=True)
    return torch.cat([known[0].new_zeros(size) if x is None else x for x, size in pairs])


def _ordered(rows: Tensor, order: Order | None) -> Tensor:
    return rows if order is None else order(rows)
