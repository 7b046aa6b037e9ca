"""Every operation of the kernels and the files that compute it: where an implementation is picked.

An operation is a function of a folder's `reference.py`, in torch, which runs on any device. Files
beside it have a function with the same name and signature:

    numba   the CPU's vector units; optional, like all of numba
    numpy   the CPU, where a torch call costs more than its arithmetic
    triton  NVIDIA GPUs
    hopper  those of an H100 or H200; the triton file takes it where it is faster

Files are imported when they are first picked, so neither numba nor Triton has to be installed.
Pick with `on` when a model is built; a call of the operation itself picks by its first argument.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from paceline.kernels.admit import reference as _admit
from paceline.kernels.attention import reference as _attention
from paceline.kernels.attention.reference import AttentionBatch
from paceline.kernels.delta_rule import reference as _delta_rule
from paceline.kernels.draft_rows import reference as _draft_rows
from paceline.kernels.elementwise import reference as _elementwise
from paceline.kernels.elementwise.reference import HeadNorms
from paceline.kernels.experts import reference as _experts
from paceline.kernels.finish import reference as _finish
from paceline.kernels.fp8 import reference as _fp8
from paceline.kernels.host_drafts import reference as _host_drafts
from paceline.kernels.kv_codes.reference import KvScales
from paceline.kernels.linear import reference as _linear
from paceline.kernels.logprobs import reference as _logprobs
from paceline.kernels.mla import reference as _mla
from paceline.kernels.mla.reference import LatentNorm
from paceline.kernels.ngram import reference as _ngram
from paceline.kernels.panels import reference as _panels
from paceline.kernels.processors import reference as _processors
from paceline.kernels.rng import reference as _rng
from paceline.kernels.sampling import reference as _sampling
from paceline.kernels.step_inputs import reference as _step_inputs
from paceline.kernels.verify import reference as _verify

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# By type of device, the best first; the reference where there is none of them.
_BACKENDS = {"cpu": ("numba", "numpy"), "cuda": ("triton",)}


class Operation(Generic[P, R]):
    """A reference, and the files beside it that compute the same: `triton.draw` is triton/draw.py.

    The first part of a file's name is its backend.
    """

    def __init__(self, reference: Callable[P, R], *files: str) -> None:
        self.reference = reference
        self.files = {file.partition(".")[0]: file for file in ("reference", *files)}
        self._picked: dict[str, Callable[P, R]] = {}  # by type of device

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        device: torch.device = first.device
        picked = self._picked.get(device.type)
        if picked is None:
            picked = self._picked[device.type] = self.on(device)
        return picked(*args, **kwargs)

    def on(self, device: torch.device) -> Callable[P, R]:
        """What runs on a device of this type."""
        for backend in _BACKENDS.get(device.type, ()):
            if backend in self.files and (backend != "numba" or has_numba(device)):
                return self.by(backend)
        return self.reference

    def by(self, backend: str) -> Callable[P, R]:
        """The implementation of one backend."""
        if backend == "numba":
            set_threads()
        folder = self.reference.__module__.rpartition(".")[0]
        module = import_module(f"{folder}.{self.files[backend]}")
        found: Callable[P, R] = getattr(module, self.reference.__name__)
        return found


# -- layers --------------------------------------------------------------------------------------

rms_norm = Operation(_elementwise.rms_norm, "numba", "triton")
add_rms_norm = Operation(_elementwise.add_rms_norm, "numba", "triton")
silu_and_mul = Operation(_elementwise.silu_and_mul, "numba", "triton")
sigmoid_mul = Operation(_elementwise.sigmoid_mul, "numba", "triton")
place_heads = Operation(_elementwise.place_heads, "numba", "triton")
# Prompts on Hopper: attention/hopper, which triton/attend takes.
paged_attention = Operation(_attention.paged_attention, "numba", "triton.attend")
place_latent = Operation(_mla.place_latent, "triton.attend")
mla_attention = Operation(_mla.mla_attention, "triton.attend")
delta_rule = Operation(_delta_rule.delta_rule, "numba", "triton.apply")
gated_norm = Operation(_delta_rule.gated_norm, "numba", "triton.norm")
route = Operation(_experts.route, "triton.routing")
apply_experts = Operation(_experts.apply_experts, "triton.products")

# -- products: with packed weights on the CPU, fused with their neighbours on a GPU ---------------

matmul = Operation(_panels.matmul, "numba")
scale_rows = Operation(_linear.scale_rows, "triton.products")
linear = Operation(_linear.linear, "triton.products")
norm_linear = Operation(_linear.norm_linear, "triton.products")
norm_linear_silu = Operation(_linear.norm_linear_silu, "triton.products")
linear_silu = Operation(_linear.linear_silu, "triton.products", "hopper")
norm_linear_heads = Operation(_linear.norm_linear_heads, "triton.products")
linear_add = Operation(_linear.linear_add, "triton.products")
quantise_rows = Operation(_fp8.quantise_rows, "triton.rows")
norm_rows = Operation(_fp8.norm_rows, "triton.rows")
silu_rows = Operation(_fp8.silu_rows, "triton.rows")
fp8_linear = Operation(_fp8.fp8_linear, "triton.products")
round_rows = Operation(_fp8.round_rows, "numba")  # fp8 on the CPU
scale_outputs = Operation(_fp8.scale_outputs, "numba")

# -- from logits to tokens -------------------------------------------------------------------------
# Their references run on CPU tensors, where they may look at values.

uniform = Operation(_rng.uniform, "numpy")
greedy = Operation(_sampling.greedy, "triton.draw")
draw = Operation(_sampling.draw, "numpy", "triton.draw")
draft = Operation(_sampling.draft, "numpy", "triton.draft")
judge = Operation(_verify.judge, "triton")
accept_by_rate = Operation(_verify.accept_by_rate, "triton")
keep_allowed = Operation(_processors.keep_allowed, "triton")
keep_late = Operation(_processors.keep_late, "triton")
ban_early_stops = Operation(_processors.ban_early_stops, "triton")
add_bias = Operation(_processors.add_bias, "triton")
apply_penalties = Operation(_processors.apply_penalties, "triton")
ban_bad_words = Operation(_processors.ban_bad_words, "triton")
write_logprobs = Operation(_logprobs.write_logprobs, "triton")

# -- around a step ---------------------------------------------------------------------------------

admit = Operation(_admit.admit, "triton")
take_host_drafts = Operation(_host_drafts.take_host_drafts, "triton")
step_inputs = Operation(_step_inputs.step_inputs, "triton")
read_marks = Operation(_step_inputs.read_marks, "triton")
finish_step = Operation(_finish.finish_step, "triton")
publish_drafts = Operation(_finish.publish_drafts, "triton")
note_late = Operation(_finish.note_late, "triton")
end_step = Operation(_finish.end_step, "triton")
shifted_tokens = Operation(_draft_rows.shifted_tokens, "triton")
own_rows = Operation(_draft_rows.own_rows, "triton")
block_rows = Operation(_draft_rows.block_rows, "triton")
next_rows = Operation(_draft_rows.next_rows, "triton")
store_drafts = Operation(_draft_rows.store_drafts, "triton")
ngram_propose = Operation(_ngram.ngram_propose, "numpy", "triton")


def operations() -> dict[str, Operation[Any, Any]]:
    """All of the above, by name."""
    return {name: found for name, found in globals().items() if isinstance(found, Operation)}


# -- what models are built with --------------------------------------------------------------------


class Kernels(NamedTuple):
    """What a decoder layer is made of, beside its linears."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    place_heads: Callable[
        [Tensor, Tensor, HeadNorms | None, Tensor, Tensor, Tensor, KvScales | None], None
    ]
    paged_attention: Callable[
        [Tensor, Tensor, Tensor, AttentionBatch, float, KvScales | None], Tensor
    ]
    # What all layers' attention shares, before the first of them; None: nothing.
    prepare_attention: Callable[[AttentionBatch, int, int], None] | None = None

    def giving(self, dtype: torch.dtype) -> Kernels:
        """The same, with norms whose results have this type, whatever type the weights have."""
        norm: Any = self.rms_norm
        add_norm: Any = self.add_rms_norm
        return self._replace(
            rms_norm=partial(norm, dtype=dtype), add_rms_norm=partial(add_norm, dtype=dtype)
        )


REFERENCE = Kernels(
    rms_norm.reference,
    add_rms_norm.reference,
    silu_and_mul.reference,
    place_heads.reference,
    paged_attention.reference,
)


def pick_kernels(
    device: torch.device, head_size: int, group_size: int, has_fixed_shapes: bool = False
) -> Kernels:
    """The kernels of a decoder with these heads."""
    is_cuda = device.type == "cuda"
    if not is_cuda and (has_fixed_shapes or not has_numba(device)):
        return REFERENCE
    picked = Kernels(
        rms_norm.on(device),
        add_rms_norm.on(device),
        silu_and_mul.on(device),
        place_heads.on(device),
        paged_attention.on(device),
    )
    if is_cuda:
        from paceline.kernels.attention.triton.attend import prepare_attention

        return picked._replace(prepare_attention=prepare_attention)
    from paceline.kernels.attention.numba import MOST_GROUP_SIZE, MOST_HEAD_SIZE

    if head_size <= MOST_HEAD_SIZE and group_size <= MOST_GROUP_SIZE:
        return picked
    return picked._replace(paged_attention=paged_attention.reference)


class LatentKernels(NamedTuple):
    """What latent attention is made of, beside its linears. Norms take rows with gaps."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    place_latent: Callable[
        [Tensor, Tensor, Tensor, LatentNorm, Tensor, Tensor, Tensor, KvScales | None], None
    ]
    mla_attention: Callable[[Tensor, Tensor, AttentionBatch, float, int, KvScales | None], Tensor]


def pick_latent_kernels(device: torch.device) -> LatentKernels:
    # The norm of numba takes no gaps.
    norm = rms_norm.on(device) if device.type == "cuda" else rms_norm.reference
    return LatentKernels(norm, place_latent.on(device), mla_attention.on(device))


# -- numba -----------------------------------------------------------------------------------------


def set_threads() -> None:
    """Let vector kernels use as many threads as torch does."""
    from paceline.kernels.vector.team import team

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
