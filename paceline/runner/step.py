"""One step on the device as two closed functions: A (inputs, target) and B (verify ... draft).

Everything they read or change is in their arguments. The rows of a step come from a builder: of
exactly the size that is needed on CPU, padded to fixed shapes on CUDA, where A and B are one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.drafters.base import Drafter, DraftStep
from paceline.kernels.logprobs.reference import LogprobResults
from paceline.kernels.step_rows import Ring, SlotTensors, StepRows
from paceline.kernels.table import end_step, finish_step, note_late, publish_drafts
from paceline.kernels.verify.reference import Verdicts
from paceline.layers.attention import ForwardInputs, Unwanted
from paceline.models.decoder import Decoder
from paceline.parallel.groups import Groups
from paceline.sampling.verify import NO_EXTRAS, Extras, SamplingMode, Synthetic, verify
from paceline.state.pages import Pages
from paceline.state.recurrent import LayerStorage, Recurrent, advance_state, delta_rows
from paceline.state.slots import Slots


@dataclass(slots=True)
class Device:
    """All that a step works on; built once by runner/startup."""

    model: Decoder
    layer_pages: list[LayerStorage]
    drafter: Drafter
    slots: Slots
    pages: Pages
    state: SlotTensors
    ring: Ring
    logprobs: LogprobResults
    synthetic: Synthetic | None
    groups: Groups
    recurrent: Recurrent | None = None  # of models with recurrent layers
    is_block: bool = False  # sampled drafts are accepted by block verification

    @property
    def reads_last_layer(self) -> bool:
        """Whether the drafter reads what the target's last layer makes of every entry."""
        drafter, num_layers = self.drafter, len(self.model.layers)
        return drafter.reads_features and (not drafter.tap_ids or num_layers in drafter.tap_ids)


@dataclass(slots=True)
class TargetPass:
    """The target's batch, and which of its entries get logits."""

    inputs: ForwardInputs
    sample_N: Tensor | None = None  # entry of each logits row; None: all outputs, in order


class RowBuilder(DraftStep, Protocol):
    """Lays out the rows of one step: the target's pass, then those of the drafter."""

    feature_TD: Tensor  # set between the two

    @property
    def rows(self) -> StepRows:
        """Made by `target`."""

    @property
    def marks(self) -> tuple[Tensor, Tensor]:
        """[B, M]: lengths and entries of the snapshots that each row is to leave; -1: none."""

    def target(self, group_size: int, *, reads_all: bool) -> TargetPass | None:
        """Inputs from plan and slot state; None: the step computes nothing.

        `reads_all`: the target's outputs are read at every entry, not only where rows sample.
        """


@dataclass(slots=True)
class Forwarded:
    """What A leaves for B."""

    builder: RowBuilder
    hidden_TD: Tensor | None = None  # None: nothing was computed
    logits_NV: Tensor | None = None  # None: no row samples


def step_a(
    device: Device, builder: RowBuilder, *, keeps_all: bool = False, is_late: bool = False
) -> Forwarded:
    """Inputs from slot state, the target's forward, logits of the rows that sample.

    `keeps_all`: the hidden states of every entry are wanted, as prompt logprobs do.
    `is_late`: B comes later, with masks.
    """
    forwarded = _forward(device, builder, keeps_all)
    if is_late:
        note_late(device.ring, 0)
    return forwarded


def _forward(device: Device, builder: RowBuilder, keeps_all: bool) -> Forwarded:
    device.groups.contract.phase = "target"
    reads_all = keeps_all or device.reads_last_layer
    batch = builder.target(device.model.spec.group_size, reads_all=reads_all)
    if batch is None:
        return Forwarded(builder)
    if device.recurrent is not None:
        batch.inputs.recurrent = delta_rows(
            builder.rows, device.slots.state_len_S, builder.marks, batch.inputs.longest
        )
    try:
        hidden_TD, builder.feature_TD = device.model.forward_with_features(
            batch.inputs, device.layer_pages, device.drafter.tap_ids
        )
    except Unwanted:
        return Forwarded(builder)
    if batch.inputs.recurrent is not None:
        advance_state(batch.inputs.recurrent, device.slots.state_len_S)
    sampled_ND = hidden_TD
    if batch.sample_N is not None:
        sampled_ND = hidden_TD.index_select(0, batch.sample_N)
    logits_NV = device.model.logits(sampled_ND) if len(sampled_ND) else None
    return Forwarded(builder, hidden_TD, logits_NV)


def step_b(
    device: Device,
    forwarded: Forwarded,
    mode: SamplingMode,
    extras: Extras = NO_EXTRAS,
    on_result: Callable[[], None] | None = None,
    *,
    is_late: bool = False,
) -> None:
    """Verify, settle and hand out, advance the slots, propose the next drafts.

    `on_result` is called when the results are in the ring, before drafting, so that the host
    commits while the drafter runs. A GPU's host waits for the ring's stamp instead.
    `is_late`: A ran before, apart. The host needs the drafts as well, to compute the next masks.
    """
    if is_late:
        note_late(device.ring, 1)
    device.groups.contract.phase = "verify"
    builder = forwarded.builder
    verdicts = _NO_VERDICTS
    if forwarded.logits_NV is not None:
        if mode is SamplingMode.FULL:
            results = device.logprobs._replace(place_B=builder.rows.plan_row_B)
            extras = extras._replace(results=results)
        verdicts = verify(
            forwarded.logits_NV,
            builder.rows.windows,
            device.slots,
            mode=mode,
            synthetic=device.synthetic,
            is_block=device.is_block,
            extras=extras,
            vocab=device.model.vocab,
        )
    finish_step(verdicts, builder.rows, device.state, device.ring)
    if on_result is not None:
        on_result()
    if forwarded.hidden_TD is not None:
        device.drafter.propose(builder)
    if is_late:
        publish_drafts(device.ring, builder.rows, device.state)
    end_step(device.ring)


_NO_VERDICTS = Verdicts(torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.bool), None)
