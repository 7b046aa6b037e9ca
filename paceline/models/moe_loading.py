"""Checkpoint tensors to a block of experts: per expert or fused, under any family's names.

Every layer is looked at for itself, for one checkpoint may hold both layouts. A rank reads its own
experts (spread over ranks), or its slices of all of them (tensor parallel), and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from paceline.kernels.dispatch import Kernels, pick_moe_kernels
from paceline.kernels.experts import ExpertWeights
from paceline.kernels.routing import Routing
from paceline.layers.linear import CudaLinear, Linear, exact_linear
from paceline.layers.mlp import GatedMlp
from paceline.layers.moe import (
    Experts,
    MoeMlp,
    ReducedExperts,
    Router,
    SeparateExperts,
    SpreadExperts,
    StackedExperts,
)
from paceline.models.sharding import Cut, Cuts, even_cut
from paceline.models.spec import ModelSpec, MoeSpec
from paceline.parallel.groups import Groups

if TYPE_CHECKING:
    from paceline.models.loading import Reader

Shape = tuple[str, tuple[int, ...]]
# Mixtral's block and matrices had names of their own before transformers 5.
_OLD_BLOCK, _BLOCK = "block_sparse_moe.", "mlp."
_SHARED = "shared_experts."
_MATRICES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


class _Names(NamedTuple):
    """Where the tensors of one layer's experts are."""

    block: str  # prefix of all
    gate_up: str | None  # fused: [E, 2I, H]
    down: str | None  # fused: [E, H, I]
    matrices: tuple[str, str, str]  # of an expert, where they are not fused

    def expert(self, index: int, matrix: int) -> str:
        return f"{self.block}experts.{index}.{self.matrices[matrix]}"


def _find(at: str, names: set[str] | None) -> _Names:
    """`names` None: nothing is stored, and what is made up comes fused: few, large tensors."""
    new, olds = _MATRICES
    probes = ("gate.weight", "experts.gate_up_proj", f"experts.0.{olds[0]}.weight")
    is_old = names is not None and any(f"{at}{_OLD_BLOCK}{x}" in names for x in probes)
    block = at + (_OLD_BLOCK if is_old else _BLOCK)
    fused = [f"{block}experts.{x}" for x in ("gate_up_proj", "down_proj")]
    gate_up, down = (n if names is None or n in names else None for n in fused)
    has_olds = names is not None and any(f"{block}experts.0.{x}.weight" in names for x in olds)
    return _Names(block, gate_up, down, olds if has_olds else new)


def moe_shapes(spec: ModelSpec, moe: MoeSpec, at: str, names: set[str] | None) -> list[Shape]:
    """Every tensor of the block at `at`, in the layout that a checkpoint with `names` has."""
    width, inner, count = spec.hidden_size, moe.inner_size, moe.num_experts
    found = _find(at, names)
    shapes: list[Shape] = [(found.block + "gate.weight", (count, width))]
    if moe.router == "sigmoid":
        shapes.append((found.block + "gate.e_score_correction_bias", (count,)))
    if found.gate_up is not None:
        shapes.append((found.gate_up, (count, 2 * inner, width)))
    else:
        pairs = ((i, m) for i in range(count) for m in (0, 1))
        shapes += [(found.expert(i, m) + ".weight", (inner, width)) for i, m in pairs]
    if found.down is not None:
        shapes.append((found.down, (count, width, inner)))
    else:
        shapes += [(found.expert(i, 2) + ".weight", (width, inner)) for i in range(count)]
    if moe.shared_inner_size:
        shared = found.block + _SHARED
        for name in ("gate_proj", "up_proj"):
            shapes.append((f"{shared}{name}.weight", (moe.shared_inner_size, width)))
        shapes.append((f"{shared}down_proj.weight", (width, moe.shared_inner_size)))
    return shapes


def moe_cuts(
    spec: ModelSpec, moe: MoeSpec, at: str, names: set[str] | None, groups: Groups
) -> Cuts:
    """What this rank reads of the tensors of `moe_shapes`, where that is not all.

    Experts that are stored one by one and belong to other ranks are not here: nobody asks for them.
    """
    found, tp = _find(at, names), groups.tp
    cuts: Cuts = {}
    if moe.shared_inner_size and tp.size > 1:
        shared = found.block + _SHARED
        for dim, name in ((0, "gate_proj"), (0, "up_proj"), (1, "down_proj")):
            cuts[f"{shared}{name}.weight"] = even_cut(dim, moe.shared_inner_size, tp)
    if groups.exchange is not None:
        own = groups.exchange.share(moe.num_experts)
        fused = [x for x in (found.gate_up, found.down) if x is not None]
        return cuts | {x: Cut(0, ((own.start, own.stop),)) for x in fused}
    return cuts if tp.size == 1 else cuts | _sliced_experts(moe, found, groups)


def _sliced_experts(moe: MoeSpec, found: _Names, groups: Groups) -> Cuts:
    """The same slice of every expert: rows of gate and of up, columns of down."""
    rows, columns = (even_cut(dim, moe.inner_size, groups.tp) for dim in (0, 1))
    cuts: Cuts = {}
    if found.gate_up is not None:
        ((start, stop),) = rows.ranges
        up = (start + moe.inner_size, stop + moe.inner_size)
        cuts[found.gate_up] = Cut(1, ((start, stop), up))
    if found.down is not None:
        cuts[found.down] = even_cut(2, moe.inner_size, groups.tp)
    for i in range(moe.num_experts):
        if found.gate_up is None:
            cuts |= {found.expert(i, m) + ".weight": rows for m in (0, 1)}
        if found.down is None:
            cuts[found.expert(i, 2) + ".weight"] = columns
    return cuts


def load_moe(spec: ModelSpec, read: Reader, at: str, index: int, kernels: Kernels) -> MoeMlp:
    """The experts of layer `index`, whose names begin with `at` ("model.layers.3.")."""
    moe = spec.experts_of(index)
    assert moe is not None, f"layer {index} has no experts"
    found = _find(at, read.source.names())
    device = read.formats.device
    bias = None
    if moe.router == "sigmoid":
        # Added to scores that are near each other: never rounded.
        stored = read.source.load(found.block + "gate.e_score_correction_bias")
        bias = stored.to(device, torch.float32)
    fast = pick_moe_kernels(device)
    how = routing_of(moe)._replace(num_shared=_num_stacked(moe, read))
    is_apart = moe.shared_inner_size and not how.num_shared
    return MoeMlp(
        router=Router(_load_router(read, found), bias, how, fast.route),
        experts=_load_experts(moe, read, found, kernels),
        shared=_load_shared(read, found.block + _SHARED, kernels) if is_apart else None,
    )


def _num_stacked(moe: MoeSpec, read: Reader) -> int:
    """A shared expert as wide as n others is n more of them, which every row takes.

    So it costs no kernels of its own. Slices of all of them (tensor parallel) are as wide as each
    other, too; experts that are spread over ranks see other rows than the shared one.
    """
    is_stacked = read.formats.has_fixed_shapes and read.groups.exchange is None
    if not is_stacked or moe.shared_inner_size % moe.inner_size:
        return 0
    return moe.shared_inner_size // moe.inner_size


def _load_router(read: Reader, found: _Names) -> Linear:
    """Its logits are fp32 sums everywhere: choices hang on small differences."""
    weight, formats = read.tensor(found.block + "gate.weight"), read.formats
    if not formats.has_fixed_shapes:
        return exact_linear(formats.device)(weight, None)
    router = CudaLinear(weight.to(formats.device, formats.compute), None)
    router.out_dtype = torch.float32
    return router


def _load_shared(read: Reader, at: str, kernels: Kernels) -> GatedMlp:
    """An ordinary MLP, or this rank's part of one: the experts' sum over ranks takes it along."""
    return GatedMlp(
        gate_up=read.linear([at + "gate_proj", at + "up_proj"]),
        down=read.linear([at + "down_proj"]),
        silu_and_mul=kernels.silu_and_mul,
    )


def routing_of(moe: MoeSpec) -> Routing:
    return Routing(
        num_chosen=moe.num_chosen,
        is_sigmoid=moe.router == "sigmoid",
        is_normed=moe.is_normed,
        scaling=moe.scaling,
        num_groups=moe.num_groups,
        num_chosen_groups=moe.num_chosen_groups,
    )


def _load_experts(moe: MoeSpec, read: Reader, found: _Names, kernels: Kernels) -> Experts:
    groups, count = read.groups, moe.num_experts
    if groups.exchange is not None:
        own = groups.exchange.share(count)
        inner = _load_own(own, read, found, kernels, torch.float32, 0)
        # A draft that is whole on every rank of `tp` has its shared expert whole, too.
        return SpreadExperts(inner, groups.exchange, count, groups.tp is groups.exchange.tp)
    num_shared = _num_stacked(moe, read)
    if groups.tp.is_active:
        inner = _load_own(range(count), read, found, kernels, torch.float32, num_shared)
        return ReducedExperts(inner, groups.tp)
    return _load_own(range(count), read, found, kernels, None, num_shared)


def _load_own(
    own: range,
    read: Reader,
    found: _Names,
    kernels: Kernels,
    out_dtype: torch.dtype | None,
    num_shared: int,
) -> Experts:
    """The experts of this rank, numbered from 0, and shared ones behind them.

    A fused tensor is cut to them already.
    """
    formats = read.formats
    if formats.has_fixed_shapes:
        weights = ExpertWeights(
            _stacked(own, read, found, (0, 1), found.gate_up, num_shared),
            _stacked(own, read, found, (2,), found.down, num_shared),
        )
        apply = pick_moe_kernels(formats.device).apply_experts
        return StackedExperts(weights, apply, out_dtype)
    gate_up = _separate(own, read, found, (0, 1), found.gate_up)
    down = _separate(own, read, found, (2,), found.down)
    pairs = zip(gate_up, down, strict=True)
    return SeparateExperts([GatedMlp(*pair, kernels.silu_and_mul) for pair in pairs])


def _separate(
    own: range, read: Reader, found: _Names, parts: tuple[int, ...], fused: str | None
) -> list[Linear]:
    if fused is not None:
        return [read.formats.linear(x.contiguous(), None) for x in read.tensor(fused)]
    return [read.linear([found.expert(i, m) for m in parts]) for i in own]


def _stacked(
    own: range,
    read: Reader,
    found: _Names,
    parts: tuple[int, ...],
    fused: str | None,
    num_shared: int,
) -> Tensor:
    """One tensor of the experts on the device, filled expert by expert."""
    formats, whole = read.formats, None if fused is None else read.tensor(fused)
    if whole is not None and not num_shared:
        return whole.to(formats.device, formats.compute).contiguous()
    stack: Tensor | None = None
    if whole is not None:
        shape = (len(own) + num_shared, *whole.shape[1:])
        stack = torch.empty(shape, dtype=formats.compute, device=formats.device)
        stack[: len(own)].copy_(whole)
    names = [[found.expert(i, m) + ".weight" for m in parts] for i in own if whole is None]
    each = ([read.tensor(name) for name in expert] for expert in names)
    for index, rows in enumerate(chain(each, _shared_parts(read, found, parts, num_shared))):
        if stack is None:
            shape = (len(own) + num_shared, sum(len(x) for x in rows), rows[0].shape[1])
            stack = torch.empty(shape, dtype=formats.compute, device=formats.device)
        to = stack[index + len(own) - len(names)]
        for place, part in zip(to.split([len(x) for x in rows]), rows, strict=True):
            place.copy_(part)
    assert stack is not None
    return stack


def _shared_parts(
    read: Reader, found: _Names, parts: tuple[int, ...], count: int
) -> Iterator[tuple[Tensor, ...]]:
    """The matrices of a shared expert as those of `count` experts beside each other."""
    if not count:
        return iter(())
    names = [f"{found.block}{_SHARED}{_MATRICES[0][m]}.weight" for m in parts]
    cut = [read.tensor(n).chunk(count, dim=int(m == 2)) for m, n in zip(parts, names, strict=True)]
    return zip(*cut, strict=True)
