"""Snapshots on their way to the device: marks in packets, restores before the step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.kernels.delta_rule.reference import DeltaSizes
from paceline.kernels.step_rows import PACKET_HAS_MARKS, PacketLayout
from paceline.sampling.params import slot_rows
from paceline.state.packets import PacketWriter
from paceline.state.pages import Pages
from paceline.state.recurrent import Recurrent
from paceline.state.slots import Slots
from paceline.state.staging import StagedWrites, Staging
from paceline.state.step_buffers import Capacity, make_ring
from paceline.step import MARKS, SlotInit, SnapshotMarks, StepPlan
from tests.engine.harness import request

CPU = torch.device("cpu")
NUM_SLOTS, VOCAB = 3, 64
LAYOUT = PacketLayout.of(NUM_SLOTS, 8, MARKS)
SIZES = DeltaSizes(num_key_heads=1, num_value_heads=2, key_size=3, value_size=2)


class World:
    def __init__(self) -> None:
        self.slots = Slots(NUM_SLOTS, 96, 2, VOCAB, CPU)
        self.pages = Pages(20, 16, NUM_SLOTS, 96, CPU)
        self.ring = make_ring(Capacity(NUM_SLOTS, 64, 2), LAYOUT, CPU)
        self.recurrent = Recurrent(2, SIZES, NUM_SLOTS, 2, 4, torch.float32, CPU)
        self.packets = PacketWriter(self.slots, self.pages, self.ring, LAYOUT, self.recurrent)
        self.staging = Staging(self.slots, self.pages, self.recurrent)

    def admit(self, way: str, init: SlotInit) -> None:
        row = slot_rows(init.request, init.max_len, init.prompt_len, vocab_size=VOCAB)
        if way == "packets":
            self.packets.admit(0, [(init, row)])
        else:
            self.staging.apply(StagedWrites([(init, row)], None))


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def plan(step: int, marks: SnapshotMarks | None) -> StepPlan:
    zeros = ints(0, 0)
    samples = np.array([True, True])
    return StepPlan(
        step, 0, np.array([1, 2]), ints(0, 2), ints(1, 1), zeros, samples, zeros, marks=marks
    )


def init(snapshot: int, num_cached: int) -> SlotInit:
    prompt = list(range(40))
    pages = ints(1, 2, 3)
    return SlotInit(1, request(7, prompt), ints(*prompt), 40, num_cached, 50, pages, snapshot)


def test_a_packet_carries_the_marks_of_every_row() -> None:
    world = World()
    length_BM, entry_BM = np.arange(4 * MARKS, dtype=np.int32).reshape(2, 2, MARKS)
    world.packets.write(3, plan(1, SnapshotMarks(length_BM, entry_BM)), ints(0, 1), ints(0, 1))
    words = world.ring.packet_EP[3].numpy()
    assert words[PACKET_HAS_MARKS] == 1
    for start, marks_BM in ((LAYOUT.mark_len, length_BM), (LAYOUT.mark_entry, entry_BM)):
        assert words[start : start + 2 * MARKS].tolist() == marks_BM.reshape(-1).tolist()
    assert LAYOUT.mark_entry + NUM_SLOTS * MARKS == len(words)


def test_a_step_without_marks_leaves_none_of_the_last_steps() -> None:
    world = World()
    marks = SnapshotMarks(*np.ones((2, 2, MARKS), np.int32))
    world.packets.write(3, plan(1, marks), ints(0, 1), ints(0, 1))
    world.packets.write(3, plan(2, None), ints(0, 1), ints(0, 1))
    assert world.ring.packet_EP[3, PACKET_HAS_MARKS] == 0
    world.packets.write(3, plan(3, marks), ints(0, 1), ints(0, 1))
    world.packets.write_empty(3)
    assert world.ring.packet_EP[3, PACKET_HAS_MARKS] == 0


def test_models_without_recurrent_state_have_no_words_for_marks() -> None:
    assert PacketLayout.of(256, 512).num_words == PacketLayout.of(256, 512).mark_len


@pytest.mark.parametrize("way", ["packets", "staging"])
def test_a_slot_continues_from_the_snapshot_of_its_admission(way: str) -> None:
    world = World()
    recurrent = world.recurrent
    recurrent.saved_state_LENVK.normal_()
    recurrent.saved_input_LEJP.normal_()
    recurrent.state_LSNVK.fill_(9)
    world.admit(way, init(snapshot=2, num_cached=16))
    assert torch.equal(recurrent.state_LSNVK[:, 1], recurrent.saved_state_LENVK[:, 2])
    kept = recurrent.input_LSRP.shape[2]
    for j, position in enumerate((13, 14, 15)):  # the taps before position 16
        at = recurrent.input_LSRP[:, 1, position % kept]
        assert torch.equal(at, recurrent.saved_input_LEJP[:, 2, j])
    assert bool((recurrent.state_LSNVK[:, [0, 2]] == 9).all()), "other slots keep their states"


@pytest.mark.parametrize("way", ["packets", "staging"])
def test_without_a_snapshot_no_state_is_copied(way: str) -> None:
    world = World()
    world.recurrent.state_LSNVK.fill_(9)
    world.admit(way, init(snapshot=-1, num_cached=0))
    assert bool((world.recurrent.state_LSNVK == 9).all())
