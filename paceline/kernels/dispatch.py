"""Which twin of each kernel pair runs here: picked once for a model, never asked again.

A GPU takes Triton's, a CPU with numba the vector kernels; all else the torch references.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels import activation, attention, experts, matmul, mla, norm, rope, routing
from paceline.kernels.attention import AttentionBatch
from paceline.kernels.experts import ExpertWeights
from paceline.kernels.matmul import PanelWeight
from paceline.kernels.mla import LatentNorm
from paceline.kernels.rope import HeadNorms
from paceline.kernels.routing import Routing

logger = logging.getLogger(__name__)


class Kernels(NamedTuple):
    """What a decoder layer is made of, beside its linears."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    place_heads: Callable[[Tensor, Tensor, HeadNorms | None, Tensor, Tensor, Tensor], None]
    paged_attention: Callable[[Tensor, Tensor, Tensor, AttentionBatch, float], Tensor]
    # What all layers' attention shares, before the first of them; None: nothing.
    prepare_attention: Callable[[AttentionBatch, int, int], None] | None = None


REFERENCE = Kernels(
    norm.rms_norm,
    norm.add_rms_norm,
    activation.silu_and_mul,
    rope.place_heads,
    attention.paged_attention,
)


def pick_kernels(
    device: torch.device, head_size: int, group_size: int, has_fixed_shapes: bool = False
) -> Kernels:
    """The kernels of a decoder with these heads."""
    if device.type == "cuda":
        return _triton_kernels()
    if has_fixed_shapes or not has_numba(device):
        return REFERENCE
    from paceline.kernels import activation_numba, attention_numba, norm_numba, rope_numba

    set_threads()
    fits = (
        head_size <= attention_numba.MOST_HEAD_SIZE
        and group_size <= attention_numba.MOST_GROUP_SIZE
    )
    attend = attention_numba if fits else attention
    return Kernels(
        norm_numba.rms_norm,
        norm_numba.add_rms_norm,
        activation_numba.silu_and_mul,
        rope_numba.place_heads,
        attend.paged_attention,
    )


def _triton_kernels() -> Kernels:
    from paceline.kernels import activation_triton, attention_triton, norm_triton, rope_triton

    return Kernels(
        norm_triton.rms_norm,
        norm_triton.add_rms_norm,
        activation_triton.silu_and_mul,
        rope_triton.place_heads,
        attention_triton.paged_attention,
        attention_triton.prepare_attention,
    )


class LatentKernels(NamedTuple):
    """What latent attention is made of, beside its linears. Norms take rows with gaps."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    place_latent: Callable[[Tensor, Tensor, Tensor, LatentNorm, Tensor, Tensor, Tensor], None]
    mla_attention: Callable[[Tensor, Tensor, AttentionBatch, float, int], Tensor]


def pick_latent_kernels(device: torch.device) -> LatentKernels:
    if device.type != "cuda":
        return LatentKernels(norm.rms_norm, mla.place_latent, mla.mla_attention)
    from paceline.kernels import mla_triton, norm_triton

    return LatentKernels(norm_triton.rms_norm, mla_triton.place_latent, mla_triton.mla_attention)


Route = Callable[[Tensor, Tensor | None, Routing], tuple[Tensor, Tensor]]
ApplyExperts = Callable[
    [Tensor, Tensor, Tensor, ExpertWeights, Tensor | None, torch.dtype | None], Tensor
]


class MoeKernels(NamedTuple):
    """What a block of experts is made of, beside its linears."""

    route: Route
    apply_experts: ApplyExperts


def pick_moe_kernels(device: torch.device) -> MoeKernels:
    if device.type != "cuda":
        return MoeKernels(routing.route, experts.apply_experts)
    from paceline.kernels import experts_triton, routing_triton

    return MoeKernels(routing_triton.route, experts_triton.apply_experts)


def pick_matmul() -> Callable[[Tensor, PanelWeight], Tensor]:
    """The product with panels, on the CPU."""
    if not has_numba(torch.device("cpu")):
        return matmul.matmul
    from paceline.kernels import matmul_numba

    set_threads()
    return matmul_numba.matmul


def set_threads() -> None:
    """Let vector kernels use as many threads as torch does."""
    from paceline.kernels.numba_team import team

    team.set_threads(torch.get_num_threads())


def has_numba(device: torch.device) -> bool:
    return device.type == "cpu" and _numba_works()


@cache
def _numba_works() -> bool:
    if find_spec("numba") is None:
        return False
    try:
        import numba  # noqa: F401
    except ImportError as error:  # for instance a numpy that this numba does not know
        logger.warning("numba is installed but does not load (%s); kernels run in torch", error)
        return False
    return True
