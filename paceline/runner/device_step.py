"""One step on the device as two closed functions: A (inputs, target) and B (verify ... draft).

Everything they read or change is in their arguments. B calls `on_result` as soon as the outcome is
final, before drafting, so that the host commits while the drafter runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.base import Drafter
from paceline.kernels.advance import advance
from paceline.models.decoder import Decoder
from paceline.parallel.groups import Groups
from paceline.runner.inputs import StepInputs, build_inputs
from paceline.runner.prompt_logprobs import prompt_logprobs
from paceline.runner.varlen_drafts import VarlenDraftStep
from paceline.sampling.custom import CustomProcessors
from paceline.sampling.verify import Accepted, AcceptRules, Tail, verify
from paceline.state.pages import LayerPages, Pages
from paceline.state.readback import to_host
from paceline.state.slots import Slots
from paceline.step import LateMasks, StepPlan, StepResult


@dataclass(slots=True)
class Device:
    """All that a step works on; built once by runner/startup."""

    model: Decoder
    layer_pages: list[LayerPages]
    drafter: Drafter
    slots: Slots
    pages: Pages
    rules: AcceptRules
    custom: CustomProcessors | None
    groups: Groups


@dataclass(slots=True)
class Forwarded:
    """What A leaves for B."""

    inputs: StepInputs
    hidden_TD: Tensor | None = None
    feature_TD: Tensor | None = None  # for the drafter
    logits_NV: Tensor | None = None


def step_a(device: Device, plan: StepPlan) -> Forwarded:
    """Inputs from slot state, the target's forward, logits of the rows that sample."""
    spec, contract = device.model.spec, device.groups.contract
    contract.step, contract.phase = plan.step, "target"
    inputs = build_inputs(plan, device.slots, device.pages, spec.group_size)
    # A step of several replicas has the same phases on all of them, whoever has rows.
    if not len(inputs.row_B) and plan.agreed is None:
        return Forwarded(inputs)
    hidden_TD, feature_TD = device.model.forward_with_features(
        inputs.forward, device.layer_pages, device.drafter.tap_ids
    )
    if not len(inputs.sample_T):
        return Forwarded(inputs, hidden_TD, feature_TD)
    every_row = len(inputs.sample_T) == len(hidden_TD)
    sampled_ND = hidden_TD if every_row else hidden_TD.index_select(0, inputs.sample_T)
    return Forwarded(inputs, hidden_TD, feature_TD, device.model.logits(sampled_ND))


def step_b(
    device: Device,
    plan: StepPlan,
    forwarded: Forwarded,
    tail: Tail,
    late: LateMasks | None,
    on_result: Callable[[StepResult], None],
) -> None:
    """Verify and cut, hand the result out, advance the slots, propose the next drafts."""
    result = _empty_result(plan)
    contract = device.groups.contract
    contract.step, contract.phase = plan.step, "verify"
    inputs, feature_TD = forwarded.inputs, forwarded.feature_TD
    if forwarded.hidden_TD is None or feature_TD is None:
        if late is not None:
            result.draft_BK = np.full((plan.num_rows, plan.k), -1, np.int32)
        on_result(result)
        return
    accepted: Accepted | None = None
    if forwarded.logits_NV is not None:
        late_bits = None if late is None else _late_bits(late, inputs)
        accepted = verify(
            forwarded.logits_NV,
            inputs.window,
            device.slots,
            tail=tail,
            rules=device.rules,
            custom=device.custom,
            late_bits_NV=late_bits,
            vocab=device.model.vocab,
        )
        _fill_result(result, inputs, accepted)
    result.prompt_logprobs = prompt_logprobs(
        device.model, device.slots, inputs, forwarded.hidden_TD
    )
    if late is None:
        on_result(result)
    _advance(device.slots, inputs, accepted)
    slots, pages = device.slots, device.pages
    device.drafter.propose(
        VarlenDraftStep(slots, pages, plan.k, inputs, feature_TD, contract, plan.agreed)
    )
    if late is not None:
        # The host needs the drafts to build the next masks, so these results come after drafting.
        result.draft_BK = device.slots.drafts_SK.numpy()[plan.slot_B, : plan.k].copy()
        on_result(result)


def _empty_result(plan: StepPlan) -> StepResult:
    def zeros() -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return np.zeros(plan.num_rows, np.int32)

    return StepResult(
        step=plan.step,
        count_B=zeros(),
        token_BW=np.full((plan.num_rows, plan.k + 1), -1, np.int32),
        done_B=zeros(),
        num_drafts_B=zeros(),
        num_accepted_B=zeros(),
    )


def _fill_result(result: StepResult, inputs: StepInputs, accepted: Accepted) -> None:
    rows = inputs.row_B[inputs.samples_B]
    result.count_B[rows] = to_host(accepted.count_B)
    result.token_BW[rows] = to_host(accepted.token_BW)
    result.done_B[rows] = to_host(accepted.done_B)
    result.num_drafts_B[rows] = to_host(accepted.num_drafts_B)
    result.num_accepted_B[rows] = to_host(accepted.num_accepted_B)
    if accepted.logprobs is not None:
        result.logprobs = accepted.logprobs.by_plan_row(result.count_B[rows], rows.tolist())


def _advance(slots: Slots, inputs: StepInputs, accepted: Accepted | None) -> None:
    is_chunk = ~inputs.samples_B
    if is_chunk.any():
        chunk_slot = inputs.slot_B[is_chunk]
        slots.num_computed_S.numpy()[chunk_slot] += inputs.query_len_B[is_chunk].astype(np.int32)
    if accepted is not None:
        advance(
            slots.tokens_SL,
            slots.num_tokens_S,
            slots.num_computed_S,
            slots.done_S,
            inputs.window.slot_B,
            accepted.token_BW,
            accepted.count_B,
            accepted.done_B,
        )


def _late_bits(late: LateMasks, inputs: StepInputs) -> Tensor:
    """Masks of the late rows, per logits row; all bits set for rows that brought none."""
    window = inputs.window
    words = late.mask_RWV.shape[2]
    bits_NV = np.full((len(window.row_N), words), -1, np.int32)
    late_of_row = {int(row): i for i, row in enumerate(late.row_R)}
    plan_row = inputs.row_B[inputs.samples_B]
    for n, (row, offset) in enumerate(
        zip(window.row_N.tolist(), window.offset_N.tolist(), strict=True)
    ):
        index = late_of_row.get(int(plan_row[row]))
        if index is not None:
            bits_NV[n] = late.mask_RWV[index, offset]
    return torch.from_numpy(bits_NV)
