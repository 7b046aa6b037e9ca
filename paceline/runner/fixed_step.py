"""One step with fixed shapes as two closed functions, A and B: what CUDA captures as one graph.

Reads the plan from its packet and the rest from slot state; no host read, no shape that depends
on a value. The same functions run on CPU tensors with the kernels' references.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.drafters.base import Drafter
from paceline.kernels.finish import Forced, end_step, finish_step
from paceline.kernels.logprobs import LogprobResults
from paceline.kernels.step_inputs import step_inputs
from paceline.kernels.step_rows import PacketLayout, Ring, SlotTensors, StepRows, StepShape
from paceline.layers.vocab import WHOLE
from paceline.models.decoder import Decoder
from paceline.parallel.groups import Groups
from paceline.runner.fixed_drafts import (
    FixedDraftStep,
    forward_inputs,
    is_worth_it,
    wanted_entries,
)
from paceline.sampling.custom import CustomProcessors
from paceline.sampling.fixed import verify, write_logprobs
from paceline.sampling.verify import Tail
from paceline.state.pages import LayerPages, Pages
from paceline.state.slots import Slots
from paceline.state.step_buffers import StepBuffers, cut_logprobs


@dataclass(slots=True)
class FixedDevice:
    """All that a step works on; built once by runner/startup."""

    model: Decoder
    layer_pages: list[LayerPages]
    drafter: Drafter
    slots: Slots
    pages: Pages
    state: SlotTensors
    buffers: StepBuffers
    ring: Ring
    layout: PacketLayout
    logprobs: LogprobResults
    forced: Forced | None  # synthetic acceptance
    groups: Groups


@dataclass(slots=True)
class Forwarded:
    """What A leaves for B."""

    rows: StepRows
    hidden_TD: Tensor  # of those that sample alone, unless the step keeps them all
    feature_TD: Tensor  # for the drafter, if it reads features
    logits_NV: Tensor


def step_a(device: FixedDevice, shape: StepShape, *, keeps_all: bool = False) -> Forwarded:
    """Inputs from packet and slot state, the target's forward, logits of every window.

    `keeps_all`: the hidden states of every entry, which nobody reads as a rule.
    """
    device.groups.contract.phase = "target"
    rows = device.buffers.rows(shape)
    page_size, padding_slot = device.pages.page_size, device.slots.padding_slot
    step_inputs(device.ring, device.layout, device.state, rows, page_size, padding_slot)
    longest = shape.width if shape.is_uniform else shape.tokens
    inputs = forward_inputs(rows.batch, device.pages, device.model.spec.group_size, longest)
    if not keeps_all and is_worth_it(shape, shape.num_logits) and not _reads_last(device):
        is_read_BW = torch.arange(shape.width, device=rows.width_B.device) < rows.width_B[:, None]
        is_read_N = is_read_BW.flatten()
        inputs.wanted = wanted_entries(rows.batch, rows.sample_N, is_read_N, inputs.attention)
    hidden_TD, feature_TD = device.model.forward_with_features(
        inputs, device.layer_pages, device.drafter.tap_ids
    )
    # In a uniform step every token entry has its logits row, in the same order.
    is_sampled = shape.is_uniform or inputs.wanted is not None
    sampled_ND = hidden_TD if is_sampled else hidden_TD.index_select(0, rows.sample_N)
    return Forwarded(rows, hidden_TD, feature_TD, device.model.logits(sampled_ND))


def _reads_last(device: FixedDevice) -> bool:
    """Whether the drafter reads what the target's last layer makes of every entry."""
    drafter, num_layers = device.drafter, len(device.model.layers)
    return drafter.reads_features and (not drafter.tap_ids or num_layers in drafter.tap_ids)


def step_b(
    device: FixedDevice,
    forwarded: Forwarded,
    tail: Tail,
    *,
    custom: CustomProcessors | None = None,
    late_bits_NV: Tensor | None = None,
) -> None:
    """Verify, settle and hand out, advance the slots, propose the next drafts.

    `custom` and late masks are for eager steps: they may read the device.
    """
    rows, contract = forwarded.rows, device.groups.contract
    contract.phase = "verify"
    vocab, logits_NV = device.model.vocab, forwarded.logits_NV
    if tail is Tail.FULL:  # logprobs are of whole rows
        vocab, logits_NV = WHOLE, vocab.gather(logits_NV)
    verdicts = verify(
        logits_NV,
        rows,
        device.slots,
        tail=tail,
        custom=custom,
        late_bits_NV=late_bits_NV,
        is_forced=device.forced is not None,
        vocab=vocab,
    )
    if tail is Tail.FULL:
        rates_K = None if device.forced is None else device.forced.rates_K
        results = cut_logprobs(device.logprobs, rows.shape)
        write_logprobs(logits_NV, verdicts, rows, device.slots, results, rates_K)
    finish_step(*verdicts, rows, device.state, device.ring, device.forced)
    device.drafter.propose(
        FixedDraftStep(
            slots=device.slots,
            pages=device.pages,
            state=device.state,
            buffers=device.buffers,
            ring=device.ring,
            layout=device.layout,
            rows=rows,
            feature_TD=forwarded.feature_TD,
            contract=contract,
        )
    )
    end_step(device.ring)
