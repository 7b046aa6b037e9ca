"""Cases of routers and experts for the Triton twins: ties, NaN rows, groups, experts that no row
or every row chose, choices of no expert, and as many rows as a tile holds, or one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.experts.reference import ExpertWeights, Routing, route
from paceline.kernels.fp8.reference import quantise_weight
from tests.kernels.cases.pairs import FLOATS, Arguments, TritonCase

Make = Callable[[torch.device, torch.dtype], Arguments]


@dataclass(frozen=True, slots=True)
class _Shape:
    """Experts and the rows that choose among them."""

    rows: int
    experts: int
    chosen: int
    width: int
    inner: int
    has_shared: bool = False
    favourite: float = 0.0  # how much expert 1 is preferred
    is_spread: bool = False  # half of the experts are elsewhere, and sums leave in fp32
    num_shared: int = 0  # experts behind the others, which all rows take
    scales: str = ""  # of e4m3 weights: by channels or by blocks


def cases() -> Iterator[TritonCase]:
    for name, rows, experts, how, has_bias in _routings():
        yield TritonCase(
            operation="route",
            name=name,
            make=_routing_arguments(rows, experts, how, has_bias),
            outputs=lambda _, result: list(result),
        )
    for name, shape, is_large in _shapes():
        yield TritonCase(
            operation="apply_experts",
            name=name,
            make=_expert_arguments(shape),
            outputs=_in_computed_type,
            dtypes=FLOATS,
            scale=2.0,  # of two products behind each other
            is_large=is_large,
        )
    for name, shape, is_large in _fp8_shapes():
        # A last bit of the first product may be another code of the second one's rows.
        for dtype, scale in ((torch.float32, 2e3), (torch.bfloat16, 2.0)):
            yield TritonCase(
                operation="apply_experts",
                name=f"{name}, {shape.scales}",
                make=_expert_arguments(shape),
                outputs=_in_computed_type,
                dtypes=(dtype,),
                scale=scale,
                is_large=is_large,
                least_arch=89,
            )


def _in_computed_type(arguments: Arguments, result: Tensor) -> list[Tensor]:
    """fp32 sums are of products in the type of x, and agree as well as those do."""
    return [result.to(arguments[0].dtype), torch.tensor(result.element_size())]


def _routings() -> Iterator[tuple[str, int, int, Routing, bool]]:
    yield "mixtral", 5, 8, Routing(2), False
    yield "qwen3", 3, 128, Routing(8, is_normed=False), False
    yield "odd", 4, 11, Routing(3, scaling=1.5), False
    yield "all", 2, 4, Routing(4), False
    glm = Routing(4, is_sigmoid=True, scaling=1.8)
    yield "glm", 6, 64, glm, True
    yield "shared", 6, 64, glm._replace(num_shared=1), True
    yield "shared odd", 3, 11, Routing(3, is_normed=False, num_shared=2), False
    yield "shared gate", 5, 9, Routing(3, num_shared=2, has_shared_gate=True), False
    groups = Routing(8, is_sigmoid=True, scaling=2.5, num_groups=8, num_chosen_groups=4)
    yield "deepseek", 5, 256, groups, True
    odd = Routing(4, is_sigmoid=True, is_normed=False, num_groups=3, num_chosen_groups=2)
    yield "odd groups", 7, 15, odd, True


def _shapes() -> Iterator[tuple[str, _Shape, bool]]:
    yield "one row", _Shape(1, 8, 2, 48, 24), False
    yield "few rows", _Shape(7, 5, 2, 40, 36, has_shared=True), False
    yield "all choose one", _Shape(40, 4, 2, 32, 32, favourite=9.0), False
    yield "most of few", _Shape(64, 6, 3, 16, 20), False
    yield "many rows", _Shape(70, 6, 3, 40, 36, has_shared=True, favourite=2.0), False
    yield "many, unused experts", _Shape(100, 40, 1, 16, 16, favourite=4.0), False
    yield "few, spread", _Shape(9, 10, 2, 40, 36, has_shared=True, is_spread=True), False
    yield "many, spread", _Shape(90, 8, 3, 24, 20, is_spread=True), False
    yield "no expert", _Shape(5, 6, 1, 16, 16, favourite=99.0, is_spread=True), False
    for rows in (1, 16, 17, 33, 64, 65):
        yield f"stacked {rows}", _Shape(rows, 5, 2, 40, 24, num_shared=1), False
    yield "many experts", _Shape(3, 70, 3, 16, 8, num_shared=2), False
    for rows in (1, 8, 17, 32, 64, 65, 2048):
        yield f"glm {rows}", _Shape(rows, 64, 4, 2048, 1536, num_shared=1), True
    for rows in (16, 33, 128):
        yield f"glm one {rows}", _Shape(rows, 64, 4, 2048, 1536, favourite=9.0), True
    yield "glm apart", _Shape(8, 64, 4, 2048, 1536, has_shared=True), True
    for rows in (1, 64, 300):
        yield f"qwen3 {rows}", _Shape(rows, 128, 8, 2048, 768, is_spread=True), True
    for rows in (1, 8, 32, 64, 65, 2048):
        yield f"mixtral {rows}", _Shape(rows, 8, 2, 4096, 14336), True


def _fp8_shapes() -> Iterator[tuple[str, _Shape, bool]]:
    for scales in ("channels", "blocks"):
        few = _Shape(7, 5, 2, 144, 80, has_shared=True, scales=scales)
        yield "fp8 few", few, False
        yield "fp8 many, spread", _Shape(70, 6, 3, 40, 36, is_spread=True, scales=scales), False
        for rows in (1, 64, 300):
            yield f"fp8 qwen3 {rows}", _Shape(rows, 128, 8, 2048, 768, scales=scales), True


def _routing_arguments(rows: int, experts: int, how: Routing, has_bias: bool) -> Make:
    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        random = torch.Generator(device).manual_seed(rows * experts)
        logits_TE = torch.randn(rows + 3, experts, generator=random, device=device)
        logits_TE[0, :] = 0.25  # ties
        logits_TE[1, :] = float("nan")
        logits_TE[2, experts // 2] = float("nan")
        bias_E = torch.randn(experts, generator=random, device=device) if has_bias else None
        return logits_TE, bias_E, how

    return make


def _expert_arguments(shape: _Shape) -> Make:
    def make(device: torch.device, dtype: torch.dtype) -> Arguments:
        random = torch.Generator(device).manual_seed(shape.rows)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=random, device=device)

        logits_TE = normal(shape.rows, shape.experts)
        logits_TE[:, 1] += shape.favourite
        x_TD = normal(shape.rows, shape.width)
        if shape.rows > 2:
            logits_TE[2] = x_TD[2] = float("nan")
        how = Routing(shape.chosen, num_shared=shape.num_shared)
        chosen_TK, weight_TK = route(logits_TE, None, how)
        count = shape.experts + shape.num_shared
        if shape.is_spread:
            count = shape.experts // 2
            is_here_TK = chosen_TK >= shape.experts - count
            chosen_TK = torch.where(is_here_TK, chosen_TK - (shape.experts - count), -1)
            weight_TK = torch.where(is_here_TK, weight_TK, float("nan"))  # never read
        gate_up = normal(count, 2 * shape.inner, shape.width) * shape.width**-0.5
        down = normal(count, shape.width, shape.inner) * shape.inner**-0.5
        experts = ExpertWeights(gate_up.to(dtype), down.to(dtype))
        if shape.scales:
            experts = in_e4m3(gate_up, down, shape.scales == "blocks")
        shared_TD = normal(shape.rows, shape.width).to(dtype) if shape.has_shared else None
        out_dtype = torch.float32 if shape.is_spread else None
        return x_TD.to(dtype), chosen_TK, weight_TK, experts, shared_TD, out_dtype

    return make


def in_e4m3(gate_up_EIH: Tensor, down_EHI: Tensor, is_blocked: bool) -> ExpertWeights:
    pairs = [[quantise_weight(x, is_blocked)[:2] for x in m] for m in (gate_up_EIH, down_EHI)]
    gate_up, down = ([torch.stack(x) for x in zip(*pair, strict=True)] for pair in pairs)
    return ExpertWeights(gate_up[0], down[0], gate_up[1], down[1])
