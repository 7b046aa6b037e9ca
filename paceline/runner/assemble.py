"""The parts of a step put together: the same for every device."""

from __future__ import annotations

import torch

from paceline.config import EngineConfig
from paceline.drafters.base import Drafter
from paceline.kernels.step_rows import PacketLayout
from paceline.models.decoder import Decoder
from paceline.parallel.groups import Groups
from paceline.runner.finding import forced_rates
from paceline.runner.step import Device
from paceline.sampling.custom import CustomProcessors
from paceline.sampling.verify import Synthetic
from paceline.state.pages import LayerPages, Pages
from paceline.state.slots import Slots
from paceline.state.step_buffers import Capacity, make_logprobs, make_ring, slot_tensors

# Where no packet travels, the ring holds the step's number and its results.
NO_PACKETS = PacketLayout(0, 0)


def assemble(
    config: EngineConfig,
    target: tuple[Decoder, list[LayerPages]],
    drafter: Drafter,
    state: tuple[Slots, Pages],
    groups: Groups,
    layout: PacketLayout = NO_PACKETS,
) -> Device:
    slots, pages = state
    capacity = Capacity(slots.num_slots, 0, slots.max_k)
    ring = make_ring(capacity, layout, slots.device)
    rates = forced_rates(config.speculative)
    return Device(
        model=target[0],
        layer_pages=target[1],
        drafter=drafter,
        slots=slots,
        pages=pages,
        state=slot_tensors(slots, pages),
        ring=ring,
        logprobs=make_logprobs(capacity, config.model.max_logprobs, ring),
        synthetic=None if rates is None else Synthetic(torch.tensor(rates, device=slots.device)),
        groups=groups,
    )


def custom_processors(config: EngineConfig, slots: Slots) -> CustomProcessors | None:
    names = config.model.logits_processors
    return CustomProcessors(names, slots.vocab_size, slots.device) if names else None
