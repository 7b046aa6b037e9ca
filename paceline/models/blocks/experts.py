"""A mixture of experts: stored per expert or fused, under any family's names.

The layout is found for each layer, because one checkpoint may hold both. A rank reads its own
experts (expert parallel) or its slices of all of them (tensor parallel), and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from paceline.kernels.experts.reference import ExpertWeights, Routing
from paceline.kernels.table import Kernels, apply_experts, route
from paceline.layers.linear import CudaLinear, Linear, exact_linear
from paceline.layers.mlp import GatedMlp
from paceline.layers.moe import (
    Experts,
    MoeMlp,
    ReducedExperts,
    Router,
    SeparateExperts,
    SharedExpert,
    SpreadExperts,
    StackedExperts,
)
from paceline.models.matrix import Matrix, as_wide, divided, kind_of, one_matrix, stacked
from paceline.models.reader import Reader
from paceline.models.sharding import Cut, Cuts, even_cut, share_of
from paceline.models.weight_source import NamedShape
from paceline.parallel.groups import Groups

_SHARED, _GATED_SHARED, _SHARED_GATE = "shared_experts.", "shared_expert.", "shared_expert_gate"
# An expert's matrices: gate, up, down. Mixtral had other names before transformers 5, and another
# prefix.
_MATRICES, _OLD_MATRICES = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
_PREFIX, _OLD_PREFIX = "mlp.", "block_sparse_moe."
_GATE_UP, _DOWN = (0, 1), (2,)  # indices into the matrices


class _Names(NamedTuple):
    """Where the tensors of one layer's experts are."""

    block: str  # prefix of all
    gate_up: str | None  # the fused tensor [E, 2I, H]; None: one matrix per expert
    down: str | None  # the fused tensor [E, H, I]
    matrices: tuple[str, str, str]

    def expert(self, index: int, matrix: int) -> str:
        return f"{self.block}experts.{index}.{self.matrices[matrix]}"


def _find(at: str, names: set[str] | None) -> _Names:
    """`names` None (dummy weights): the fused layout, which has few and large tensors."""
    probes = ("gate.weight", "experts.gate_up_proj", f"experts.0.{_OLD_MATRICES[0]}.weight")
    is_old = names is not None and any(f"{at}{_OLD_PREFIX}{x}" in names for x in probes)
    block = at + (_OLD_PREFIX if is_old else _PREFIX)
    fused = [f"{block}experts.{x}" for x in ("gate_up_proj", "down_proj")]
    gate_up, down = (n if names is None or n in names else None for n in fused)
    old = (f"{block}experts.0.{x}.weight" for x in _OLD_MATRICES)
    has_old = names is not None and any(x in names for x in old)
    return _Names(block, gate_up, down, _OLD_MATRICES if has_old else _MATRICES)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """An MLP whose tokens choose among experts."""

    hidden_size: int
    num_experts: int
    num_chosen: int  # experts of a token
    inner_size: int  # of one expert
    router: Literal["softmax", "sigmoid"] = "softmax"  # sigmoid: DeepSeek's, with a bias by expert
    is_normed: bool = True  # the weights of the chosen experts are scaled to sum 1
    scaling: float = 1.0
    num_groups: int = 1  # experts are in groups, and some groups are dropped before the choice
    num_chosen_groups: int = 1
    shared_inner_size: int = 0  # of the expert that every token takes; 0: there is none
    has_shared_gate: bool = False  # it is scaled by a sigmoid of a product with the token

    has_experts = True

    @property
    def num_parameters(self) -> int:
        inner = self.num_experts * self.inner_size + self.shared_inner_size
        return self.hidden_size * (3 * inner + self.num_experts + self.has_shared_gate)

    @property
    def peak_width(self) -> int:
        # Each choice has its inner values and, in fp32, its output.
        choice = self.inner_size + 2 * self.hidden_size
        # The shared expert is an MLP, or counts as additional choices.
        shared = max(
            3 * self.shared_inner_size, -(-self.shared_inner_size // self.inner_size) * choice
        )
        return self.num_chosen * choice + shared + 2 * self.num_experts

    def shapes(self, at: str, names: set[str] | None) -> list[NamedShape]:
        width, inner, count = self.hidden_size, self.inner_size, self.num_experts
        found = _find(at, names)
        shapes: list[NamedShape] = [(found.block + "gate.weight", (count, width))]
        if self.router == "sigmoid":
            shapes.append((found.block + "gate.e_score_correction_bias", (count,)))
        if found.gate_up is not None:
            shapes.append((found.gate_up, (count, 2 * inner, width)))
        else:
            pairs = ((i, m) for i in range(count) for m in _GATE_UP)
            shapes += [(found.expert(i, m) + ".weight", (inner, width)) for i, m in pairs]
        if found.down is not None:
            shapes.append((found.down, (count, width, inner)))
        else:
            shapes += [(found.expert(i, 2) + ".weight", (width, inner)) for i in range(count)]
        if self.shared_inner_size:
            gate, up, down = (f"{found.block}{self.shared}{x}.weight" for x in _MATRICES)
            shapes += [(x, (self.shared_inner_size, width)) for x in (gate, up)]
            shapes.append((down, (width, self.shared_inner_size)))
        if self.has_shared_gate:
            shapes.append((f"{found.block}{_SHARED_GATE}.weight", (1, width)))
        return shapes

    def cuts(self, at: str, names: set[str], groups: Groups) -> Cuts:
        """Experts of other ranks that are stored one by one are not listed: they are not read."""
        found, tp = _find(at, names), groups.tp
        cuts: Cuts = {}
        if self.shared_inner_size and tp.size > 1:
            for dim, name in zip((0, 0, 1), _MATRICES, strict=True):
                cut = even_cut(dim, self.shared_inner_size, tp)
                cuts[f"{found.block}{self.shared}{name}.weight"] = cut
        if groups.exchange is not None:
            own = groups.exchange.share(self.num_experts)
            fused = [x for x in (found.gate_up, found.down) if x is not None]
            return cuts | {x: Cut(0, ((own.start, own.stop),)) for x in fused}
        return cuts if tp.size == 1 else cuts | self._slices(found, groups)

    def _slices(self, found: _Names, groups: Groups) -> Cuts:
        """The same slice of every expert: rows of gate and up, columns of down."""
        rows, columns = (even_cut(dim, self.inner_size, groups.tp) for dim in (0, 1))
        cuts: Cuts = {}
        if found.gate_up is not None:
            ((start, stop),) = rows.ranges
            up = (start + self.inner_size, stop + self.inner_size)
            cuts[found.gate_up] = Cut(1, ((start, stop), up))
        if found.down is not None:
            cuts[found.down] = even_cut(2, self.inner_size, groups.tp)
        for i in range(self.num_experts):
            if found.gate_up is None:
                cuts |= {found.expert(i, m) + ".weight": rows for m in _GATE_UP}
            if found.down is None:
                cuts[found.expert(i, 2) + ".weight"] = columns
        return cuts

    def local(self, groups: Groups) -> MoeSpec:
        inner, shared, size = self.inner_size, self.shared_inner_size, groups.tp.size
        if groups.exchange is None:
            inner = share_of(inner, "inner values of an expert (moe_intermediate_size)", size)
        if shared:
            shared = share_of(shared, "inner values of the shared experts", size)
        return replace(self, inner_size=inner, shared_inner_size=shared)

    def load(self, read: Reader, at: str, kernels: Kernels) -> MoeMlp:
        return _ExpertLoader(self, read, _find(at, read.source.names()), kernels).load()

    @property
    def shared(self) -> str:
        """Prefix of the shared expert's tensors."""
        return _GATED_SHARED if self.has_shared_gate else _SHARED

    @property
    def routing(self) -> Routing:
        return Routing(
            num_chosen=self.num_chosen,
            is_sigmoid=self.router == "sigmoid",
            is_normed=self.is_normed,
            scaling=self.scaling,
            num_groups=self.num_groups,
            num_chosen_groups=self.num_chosen_groups,
        )


@dataclass(frozen=True, slots=True)
class _ExpertLoader:
    """Builds one layer's experts. `moe` has the sizes of this rank's part."""

    moe: MoeSpec
    read: Reader
    found: _Names
    kernels: Kernels

    def load(self) -> MoeMlp:
        moe, found, device = self.moe, self.found, self.read.formats.device
        bias = None
        if moe.router == "sigmoid":
            # Added to scores that lie close together, so it is never rounded.
            stored = self.read.source.load(found.block + "gate.e_score_correction_bias")
            bias = stored.to(device, torch.float32)
        num_stacked = self._num_stacked()
        # The gate of shared experts that are stacked is one more row of the router.
        has_gate = bool(moe.has_shared_gate and num_stacked)
        routing = moe.routing._replace(num_shared=num_stacked, has_shared_gate=has_gate)
        is_apart = moe.shared_inner_size and not num_stacked
        logits = self._exact("gate", *[_SHARED_GATE] * has_gate)
        return MoeMlp(
            router=Router(logits, bias, routing, route.on(device)),
            experts=self._experts(num_stacked),
            shared=self._shared() if is_apart else None,
        )

    def _num_stacked(self) -> int:
        """A shared expert that is n times as wide as the others is stacked behind them as n more
        experts, which every row chooses. So it needs no separate kernels.

        This also works for slices of all experts (tensor parallel). It does not for experts
        spread over ranks: they see other rows than the shared expert does. Nor does it where a
        checkpoint has the shared expert in another format than the others.
        """
        moe, read = self.moe, self.read
        is_stacked = read.formats.has_fixed_shapes and read.groups.exchange is None
        count, rest = divmod(moe.shared_inner_size, moe.inner_size)
        if not is_stacked or not count or rest:
            return 0
        if read.formats.fp8 is None or read.formats.rounds_by is not None:
            return count
        for parts, fused in ((_GATE_UP, self.found.gate_up), (_DOWN, self.found.down)):
            shared = self._shared_parts(parts, count)
            first = next(self._each(range(1), parts, fused))
            if shared is None or len({kind_of(x) for x in (*first, *next(shared))}) > 1:
                return 0
        return count

    def _exact(self, *names: str) -> Linear:
        """The router's logits are fp32 in every format: small differences decide the choice."""
        formats = self.read.formats
        weight = torch.cat([self.read.tensor(f"{self.found.block}{x}.weight") for x in names])
        if not formats.has_fixed_shapes:
            return exact_linear(formats.device)(weight, None)
        router = CudaLinear(weight.to(formats.device, formats.compute), None)
        router.out_dtype = torch.float32
        return router

    def _shared(self) -> SharedExpert:
        """An MLP, or this rank's part of one, which the experts' sum over ranks adds up."""
        gate, up, down = (f"{self.found.block}{self.moe.shared}{x}" for x in _MATRICES)
        linear = self.read.linear
        mlp = GatedMlp(linear([gate, up]), linear([down]), self.kernels.silu_and_mul)
        is_gated = self.moe.has_shared_gate
        return SharedExpert(mlp, self._exact(_SHARED_GATE) if is_gated else None)

    def _experts(self, num_stacked: int) -> Experts:
        groups, count = self.read.groups, self.moe.num_experts
        if groups.exchange is not None:
            inner = self._own(groups.exchange.share(count), torch.float32, 0)
            # A draft model that is whole on every rank of `tp` has a whole shared expert, too.
            return SpreadExperts(inner, groups.exchange, count, groups.tp is groups.exchange.tp)
        if groups.tp.is_active:
            inner = self._own(range(count), torch.float32, num_stacked)
            return ReducedExperts(inner, groups.tp)
        return self._own(range(count), None, num_stacked)

    def _own(self, own: range, out_dtype: torch.dtype | None, num_shared: int) -> Experts:
        """The experts of this rank, numbered from 0, then the stacked shared ones.

        A fused tensor is read cut to them.
        """
        formats, found = self.read.formats, self.found
        if formats.has_fixed_shapes:
            stacks = [
                self._stacked(own, _GATE_UP, found.gate_up, num_shared),
                self._stacked(own, _DOWN, found.down, num_shared),
            ]
            if len({scale is None for _, scale in stacks}) > 1:
                stacks = [(as_wide(*x).to(formats.compute), None) for x in stacks]
            (gate_up, gate_up_scale), (down, down_scale) = stacks
            weights = ExpertWeights(gate_up, down, gate_up_scale, down_scale)
            return StackedExperts(weights, apply_experts.on(formats.device), out_dtype)
        pairs = zip(
            self._separate(own, _GATE_UP, found.gate_up),
            self._separate(own, _DOWN, found.down),
            strict=True,
        )
        return SeparateExperts([GatedMlp(*pair, self.kernels.silu_and_mul) for pair in pairs])

    def _separate(self, own: range, parts: tuple[int, ...], fused: str | None) -> list[Linear]:
        read = self.read
        if fused is not None:
            return [read.product(x) for x in read.fused(fused)]
        return [read.linear([self.found.expert(i, m) for m in parts]) for i in own]

    def _each(
        self, own: range, parts: tuple[int, ...], fused: str | None
    ) -> Iterator[list[Matrix]]:
        """The matrices of each expert."""
        if fused is not None:
            return ([x] for x in self.read.fused(fused))
        names = ([self.found.expert(i, m) + ".weight" for m in parts] for i in own)
        return ([self.read.matrix(name) for name in expert] for expert in names)

    def _stacked(
        self, own: range, parts: tuple[int, ...], fused: str | None, num_shared: int
    ) -> tuple[Tensor, Tensor | None]:
        """One tensor of all experts on the device, filled expert by expert, and their scales."""
        formats, read = self.read.formats, self.read
        shared = self._shared_parts(parts, num_shared)
        assert shared is not None, "else none is stacked"
        each = chain(self._each(own, parts, fused), shared)
        matrices = (read.rounded(one_matrix(x)) for x in each)
        return stacked(matrices, len(own) + num_shared, formats.compute, formats.device)

    def _shared_parts(
        self, parts: tuple[int, ...], count: int
    ) -> Iterator[tuple[Matrix, ...]] | None:
        """The matrices of the shared expert, divided into those of `count` experts."""
        if not count:
            return iter(())
        names = [f"{self.found.block}{self.moe.shared}{_MATRICES[m]}.weight" for m in parts]
        pairs = zip(parts, names, strict=True)
        cut = [divided(self.read.matrix(n), count, int(m == 2)) for m, n in pairs]
        found = [x for x in cut if x is not None]
        return zip(*found, strict=True) if len(found) == len(cut) else None
