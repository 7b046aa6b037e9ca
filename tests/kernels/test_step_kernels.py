"""Fixed-shape step kernels do what the path of true lengths does: same rows, tokens and slots."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.kernels.admit import Admission, AdmitRecord, AdmitTensors, admit, pack_admissions
from paceline.kernels.advance import advance
from paceline.kernels.draft_rows import next_rows, own_rows, shifted_tokens, store_drafts
from paceline.kernels.finish import Forced, end_step, finish_step
from paceline.kernels.ngram import ngram_propose, ngram_propose_reference
from paceline.kernels.step_rows import RESULT_TOKENS, Ring, SlotTensors, StepRows
from paceline.kernels.triton_cases import all_triton_cases
from paceline.kernels.triton_cases_step import (
    KINDS,
    NUM_EOS,
    NUM_STOP,
    PAGE_SIZE,
    STORED_DRAFTS,
    VOCAB,
    Scene,
    batch_rows,
    coin_scene,
    unwritten,
)
from paceline.layers.attention import ForwardInputs
from paceline.parallel.contract import Contract
from paceline.runner.inputs import StepInputs, build_inputs
from paceline.runner.varlen_drafts import VarlenDraftStep
from paceline.sampling.verify import Accepted, AcceptRules, Tail, verify
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from paceline.state.staging import StagedWrites, Staging
from paceline.step import PageAppends, StepPlan

CPU = torch.device("cpu")
WINDOWS = tuple(kind for kind in KINDS if kind not in ("final", "chunk"))
RATES = (0.8, 0.7, 0.9)


def scene_of(seed: int) -> Scene:
    """Rows of any kind in any order; every other scene is uniform."""
    generator = np.random.default_rng(1000 + seed)
    is_uniform = seed % 2 == 0
    kinds = generator.choice(WINDOWS if is_uniform else KINDS, generator.integers(1, 9))
    return Scene(
        k=(0, 3, 5, 1)[seed % 4],
        kinds=tuple(str(kind) for kind in kinds),
        is_uniform=is_uniform,
        num_padding=seed % 3,
        num_tail=seed % 5,
        seed=seed,
    )


SCENES = pytest.mark.parametrize("seed", range(24))


@dataclass
class Twice:
    """One scene in both worlds, after their inputs were made."""

    scene: Scene
    ring: Ring
    state: SlotTensors
    rows: StepRows
    slots: Slots
    pages: Pages
    inputs: StepInputs | None  # None: nobody is alive

    @property
    def live(self) -> StepInputs:
        if self.inputs is None:
            pytest.skip("a scene without a live row")
        return self.inputs

    def result_BR(self) -> Tensor:
        entry = int(self.ring.turn_1) % len(self.ring.stamp_E)
        return self.ring.result_EBR[entry]


def begin(seed: int) -> Twice:
    scene = scene_of(seed)
    slots = Slots(scene.num_slots, scene.max_model_len, STORED_DRAFTS, VOCAB, CPU)
    pages = Pages(999, PAGE_SIZE, scene.num_slots, scene.max_model_len, CPU)
    before = scene.state(CPU)
    for name in SlotTensors._fields[:9]:
        getattr(slots, name).copy_(getattr(before, name))
    slots.eos_ids_SE[:, :NUM_EOS] = before.eos_ids_SE
    slots.stop_ids_SE[:, :NUM_STOP] = before.stop_ids_SE
    pages.table_SP.copy_(before.table_SP)
    plan = plan_of(scene)
    Staging(slots, pages).apply(StagedWrites((), plan.page_appends))
    ring, state, rows = scene.begun(CPU)
    return Twice(scene, ring, state, rows, slots, pages, build_inputs(plan, slots, pages, 1))


def plan_of(scene: Scene) -> StepPlan:
    packet, layout = scene.packet(step=1), scene.layout
    count = packet[layout.NUM_APPENDS]
    starts = (layout.append_slot, layout.append_index, layout.append_page)
    is_window = np.array([kind in WINDOWS for kind in scene.kinds])
    return StepPlan(
        step=1,
        k=scene.k,
        uid_B=np.arange(len(scene.kinds)),
        slot_B=scene.slot_B,
        query_len_B=scene.planned_B,
        k_B=np.where(is_window, scene.planned_B - 1, 0).astype(np.int32),
        samples_B=scene.samples_B != 0,
        length_bound_B=np.zeros(len(scene.kinds), np.int32),
        page_appends=PageAppends(*(packet[at : at + count] for at in starts)),
    )


def advanced(seed: int, *, forced: bool = False) -> tuple[Twice, Accepted | None]:
    """Both worlds after the step's results are in."""
    world = begin(seed)
    inputs, rows = world.live, world.rows
    token_N, bad_N, _ = world.scene.verdicts(rows, CPU)
    if forced:
        bad_N.zero_()  # an unusable row may draw another token there
    rates_K = torch.tensor(RATES) if forced else None
    finish_step(
        *(token_N, bad_N, None, rows, world.state, world.ring),
        None if rates_K is None else Forced(rates_K),
    )
    is_chunk = ~inputs.samples_B
    chunk_slot = inputs.slot_B[is_chunk]
    world.slots.num_computed_S.numpy()[chunk_slot] += inputs.query_len_B[is_chunk].astype(np.int32)
    if not len(inputs.window.row_N):
        return world, None
    window = inputs.window
    plan_row_N = torch.from_numpy(inputs.row_B[inputs.samples_B])[window.row_N]
    at_N = plan_row_N * rows.shape.width + window.offset_N
    best_N = token_N[at_N].long()
    logits_NV = torch.zeros(len(at_N), VOCAB)
    value_N = torch.where(bad_N[at_N], float("nan"), 9.0)
    logits_NV[torch.arange(len(at_N)), best_N] = value_N
    accepted = verify(
        logits_NV,
        window,
        world.slots,
        tail=Tail.GREEDY,
        rules=AcceptRules(rates_K),
        custom=None,
        late_bits_NV=None,
    )
    slots = world.slots
    advance(
        *(slots.tokens_SL, slots.num_tokens_S, slots.num_computed_S, slots.done_S),
        *(window.slot_B, accepted.token_BW, accepted.count_B, accepted.done_B),
    )
    return world, accepted


def assert_equal(mine: Tensor, theirs: Any, what: str = "") -> None:
    theirs = torch.as_tensor(theirs)
    assert mine.tolist() == theirs.tolist(), what


def rows_of(forward: ForwardInputs) -> list[slice]:
    starts = forward.attention.row_start_B.tolist()
    return [slice(*pair) for pair in pairwise(starts)]


@SCENES
def test_step_inputs_are_those_of_true_lengths(seed: int) -> None:
    world = begin(seed)
    rows, batch, inputs = world.rows, world.rows.batch, world.live
    is_owned_T = torch.zeros(rows.shape.tokens, dtype=torch.bool)
    forward = inputs.forward
    for i, (row, theirs) in enumerate(zip(inputs.row_B.tolist(), rows_of(forward), strict=True)):
        start, count = int(batch.row_start_B[row]), int(batch.query_len_B[row])
        mine = slice(start, start + count)
        is_owned_T[mine] = True
        assert_equal(batch.token_T[mine], forward.token_T[theirs])
        assert_equal(batch.position_T[mine], forward.position_T[theirs])
        assert_equal(batch.page_slot_T[mine], forward.page_slot_T[theirs])
        assert (rows.row_T[mine] == row).all()
        assert int(rows.start_B[row]) == inputs.start_B[i]
        assert int(batch.length_B[row]) == forward.attention.length_B[i]
        assert int(batch.slot_B[row]) == inputs.slot_B[i]
    assert (batch.token_T[~is_owned_T] == 0).all()
    assert (batch.position_T[~is_owned_T] == 0).all()
    assert (batch.page_slot_T[~is_owned_T] == -1).all()
    assert (rows.row_T[~is_owned_T] == -1).all()
    dead = [row for row in range(rows.shape.rows) if row not in inputs.row_B]
    for nothing_B in (batch.query_len_B, batch.length_B, rows.width_B):
        assert (nothing_B[dead] == 0).all()
    assert_equal(world.state.table_SP, world.pages.table_SP)


@SCENES
def test_windows_are_those_of_true_lengths(seed: int) -> None:
    world = begin(seed)
    rows, inputs = world.rows, world.live
    window, width = inputs.window, rows.shape.width
    plan_row = inputs.row_B[inputs.samples_B]
    live_row = np.flatnonzero(inputs.samples_B)
    their_start = inputs.forward.attention.row_start_B[live_row]
    shift_B = rows.batch.row_start_B[plan_row] - their_start
    assert_equal(rows.width_B[plan_row], window.width_B)
    assert_equal(rows.draft_BK[plan_row], window.draft_BK)
    assert_equal(rows.num_tokens_B[plan_row], window.length_B)
    at_N = torch.from_numpy(plan_row)[window.row_N] * width + window.offset_N
    assert_equal(rows.sample_N[at_N], inputs.sample_T + shift_B[window.row_N])
    others = torch.ones(len(rows.sample_N), dtype=torch.bool)
    others[at_N] = False
    assert (rows.sample_N[others] == 0).all()


@pytest.mark.parametrize("forced", [False, True], ids=["equality", "forced"])
@SCENES
def test_a_finished_step_emits_and_moves_what_verify_and_advance_do(
    seed: int, forced: bool
) -> None:
    world, accepted = advanced(seed, forced=forced)
    state, rows, inputs = world.state, world.rows, world.live
    for name in ("num_tokens_S", "num_computed_S", "done_S"):
        assert_equal(getattr(state, name), getattr(world.slots, name), name)
    assert_equal(state.tokens_SL[:-1], world.slots.tokens_SL[:-1])
    result_BR = world.result_BR()
    sampling = inputs.row_B[inputs.samples_B]
    if accepted is not None:
        assert_equal(result_BR[sampling, 0], accepted.count_B)
        assert_equal(result_BR[sampling, 1], accepted.done_B)
        assert_equal(result_BR[sampling, 2], accepted.num_drafts_B)
        assert_equal(result_BR[sampling, 3], accepted.num_accepted_B)
        tokens = slice(RESULT_TOKENS, RESULT_TOKENS + rows.shape.width)
        assert_equal(result_BR[sampling, tokens], accepted.token_BW)
        assert_equal(rows.token_BW[sampling], accepted.token_BW)
    silent = [row for row in range(rows.shape.rows) if row not in sampling]
    assert (result_BR[silent, :RESULT_TOKENS] == 0).all()
    assert (rows.count_B[silent] == 0).all()
    assert (world.ring.stamp_E == 40 + seed).sum() == 1
    assert int(world.ring.ticket_1) == 0


def test_a_rate_of_one_always_accepts_and_a_rate_of_nothing_never_does() -> None:
    """With the largest coin that there is, and with one of the smallest."""
    scene = coin_scene()
    ring, state, rows = scene.begun(CPU)
    token_N, bad_N, _ = scene.verdicts(rows, CPU)
    assert not bad_N[: 2 * rows.shape.width].any()
    finish_step(token_N, bad_N, None, rows, state, ring, Forced(torch.tensor((1.0, 0.0))))
    assert_equal(rows.count_B[:2], [2, 2])
    assert_equal(rows.token_BW[:2, 0], [5, 5])


@SCENES
def test_the_last_entry_of_a_row_holds_its_last_committed_position(seed: int) -> None:
    world, _ = advanced(seed)
    rows, batch, inputs = world.rows, world.rows.batch, world.live
    for row in range(rows.shape.rows):
        if row not in inputs.row_B:
            assert int(rows.last_B[row]) == 0
            continue
        slot, last = int(batch.slot_B[row]), int(rows.last_B[row])
        assert int(rows.row_T[last]) == row
        # The newest token was not computed; a chunk ends where its computing ended.
        assert int(batch.position_T[last]) == int(world.state.num_computed_S[slot]) - 1


def drafts_of(world: Twice) -> VarlenDraftStep:
    nothing = torch.empty(0, 0)
    return VarlenDraftStep(world.slots, world.pages, world.scene.k, world.live, nothing, Contract())


def drafting_rows(world: Twice) -> list[int]:
    inputs, done_S = world.live, world.slots.done_S.numpy()
    is_drafting = inputs.samples_B & (done_S[inputs.slot_B] == 0)
    return [int(row) for row in inputs.row_B[is_drafting]]


@SCENES
def test_a_draft_model_first_computes_what_it_does_at_true_lengths(seed: int) -> None:
    world, _ = advanced(seed)
    rows, inputs, scene = world.rows, world.live, world.scene
    batch = batch_rows(CPU, rows.shape.rows, scene.num_draft_entries)
    last_B = unwritten(CPU, rows.shape.rows)
    own_rows(world.ring, scene.layout, rows, world.state, batch, last_B, PAGE_SIZE)
    expected = drafts_of(world).own(1)
    is_owned_T = torch.zeros(len(batch.token_T), dtype=torch.bool)
    alive = []
    for row, theirs in zip(inputs.row_B.tolist(), rows_of(expected.inputs), strict=True):
        alive.append(row)
        start, count = int(scene.draft_start_B[row]), int(batch.query_len_B[row])
        mine = slice(start, start + count)
        is_owned_T[mine] = True
        assert_equal(batch.token_T[mine], expected.inputs.token_T[theirs])
        assert_equal(batch.position_T[mine], expected.inputs.position_T[theirs])
        assert_equal(batch.page_slot_T[mine], expected.inputs.page_slot_T[theirs])
        assert int(batch.row_start_B[row]) == start
        assert int(batch.length_B[row]) == int(batch.position_T[mine][-1]) + 1
        assert int(last_B[row]) == start + count - 1
    assert (batch.token_T[~is_owned_T] == 0).all()
    assert (batch.page_slot_T[~is_owned_T] == -1).all()
    others = [row for row in range(rows.shape.rows) if row not in alive]
    for nothing_B in (batch.query_len_B, batch.length_B, last_B):
        assert (nothing_B[others] == 0).all()


@SCENES
def test_shifted_tokens_are_the_committed_ones_one_further_on(seed: int) -> None:
    world, _ = advanced(seed)
    rows, inputs = world.rows, world.live
    token_T = unwritten(CPU, rows.shape.tokens)
    shifted_tokens(rows, world.state, token_T)
    expected = drafts_of(world).shifted(1).inputs
    is_known_T = torch.zeros(len(token_T), dtype=torch.bool)
    for row, theirs in zip(inputs.row_B.tolist(), rows_of(expected), strict=True):
        start = int(rows.batch.row_start_B[row])
        mine = slice(start, start + theirs.stop - theirs.start)
        is_known_T[mine] = True
        assert_equal(token_T[mine], expected.token_T[theirs])
    assert (token_T[~is_known_T] == 0).all()


@pytest.mark.parametrize("is_shifted", [False, True], ids=["own", "shifted"])
@SCENES
def test_a_drafters_next_pass_computes_its_last_drafts(seed: int, is_shifted: bool) -> None:
    world, _ = advanced(seed)
    num_rows, drafting = world.rows.shape.rows, drafting_rows(world)
    token_B = torch.randint(VOCAB, (num_rows,), generator=torch.Generator().manual_seed(seed))
    for j in (1, 3):
        batch = batch_rows(CPU, num_rows, num_rows)
        next_rows(token_B, j, world.rows, world.state, batch, PAGE_SIZE, is_shifted)
        theirs = drafts_of(world).next(j, token_B[drafting], 1, is_shifted=is_shifted)
        assert_equal(batch.token_T[drafting], theirs.token_T)
        assert_equal(batch.position_T[drafting], theirs.position_T)
        assert_equal(batch.page_slot_T[drafting], theirs.page_slot_T)
        assert_equal(batch.length_B[drafting], theirs.attention.length_B)
        assert_equal(batch.slot_B[drafting], theirs.attention.slot_B)
        assert_equal(batch.row_start_B, range(num_rows))
        assert_equal(batch.query_len_B, [int(row in drafting) for row in range(num_rows)])
        others = [row for row in range(num_rows) if row not in drafting]
        assert (batch.length_B[others] == 0).all()
        assert (batch.page_slot_T[others] == -1).all()


@pytest.mark.parametrize("k", [0, 2, STORED_DRAFTS])
@SCENES
def test_drafts_are_stored_for_rows_that_go_on_and_for_no_other(seed: int, k: int) -> None:
    world, _ = advanced(seed)
    draft_BK = torch.randint(-1, VOCAB, (world.rows.shape.rows, k), dtype=torch.int32)
    store_drafts(draft_BK, world.rows, world.state, is_onehot=seed % 3 == 0)
    drafts_of(world).store(draft_BK[drafting_rows(world)], is_onehot=seed % 3 == 0)
    assert_equal(world.state.drafts_SK, world.slots.drafts_SK)
    assert_equal(world.state.drafts_onehot_S, world.slots.drafts_onehot_S)


@pytest.mark.parametrize("seed", range(30))
def test_ngrams_in_torch_propose_what_the_numpy_search_does(seed: int) -> None:
    draw = np.random.default_rng(seed).integers
    tokens_SL = torch.from_numpy(draw(0, 4, (9, 40), np.int32))
    num_tokens_S = torch.from_numpy(draw(0, 41, 9).astype(np.int32))
    slot_B = torch.from_numpy(draw(0, 9, 12).astype(np.int32))
    min_n = int(draw(1, 4))
    sizes = int(draw(1, 9)), min_n, int(draw(min_n, 7))
    expected = ngram_propose(tokens_SL, num_tokens_S, slot_B, *sizes)
    found = ngram_propose_reference(tokens_SL, num_tokens_S, slot_B, *sizes)
    assert found.dtype == torch.int32
    assert_equal(found, expected)


def test_an_admission_writes_its_slot_and_nothing_else() -> None:
    shapes = (4, 6), (6, 3), (6, 11), (6, 2), (6, 5)
    tensors = AdmitTensors(*(unwritten(CPU, *shape) for shape in shapes))
    fields_F, ids_E = np.arange(4, dtype=np.int32), np.arange(10, 13, dtype=np.int32)
    admissions = [
        Admission(4, fields_F, ids_E, np.array([7, 8, 9], np.int32), np.array([5], np.int32)),
        Admission(1, fields_F + 50, ids_E + 50, np.arange(11, dtype=np.int32), ids_E),
    ]
    record_W = torch.from_numpy(pack_admissions(AdmitRecord.of(tensors), admissions))
    admit(record_W, len(admissions), tensors)
    for admission in admissions:
        slot, count = admission.slot, len(admission.tokens)
        assert_equal(tensors.fields_FS[:, slot], admission.fields_F)
        assert_equal(tensors.ids_SE[slot], admission.ids_E)
        assert_equal(tensors.tokens_SL[slot, :count], admission.tokens)
        assert (tensors.drafts_SK[slot] == -1).all()
        assert_equal(tensors.table_SP[slot, : len(admission.pages)], admission.pages)
        assert (tensors.table_SP[slot, len(admission.pages) :] == -1).all()
    others = [0, 2, 3, 5]
    by_slot = (tensors.fields_FS.T, *tensors[1:])
    for name, table_S in zip(AdmitTensors._fields, by_slot, strict=True):
        assert_equal(table_S[others], unwritten(CPU, *table_S[others].shape), name)


def test_the_turn_goes_to_the_next_packet() -> None:
    ring = scene_of(1).ring(CPU)
    turn = int(ring.turn_1)
    end_step(ring)
    assert int(ring.turn_1) == turn + 1


class NoLooking(TorchDispatchMode):
    """Refuses what would make a host wait for its device."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name.startswith("index"):  # by a mask, an index is as long as the mask has ones
            masks = [a for a in _flat(args[1:2]) if a.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{name} by a mask"
        assert name not in self.WAITS, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def _flat(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [t for v in values for t in _flat(v)] if isinstance(values, list | tuple) else []


REFERENCES = {
    case.reference: case
    for case in all_triton_cases()
    if case.reference.partition(":")[0].rpartition(".")[2]
    in ("step_inputs", "finish", "admit", "draft_rows", "ngram")
}


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_references_never_wait_for_the_device(name: str) -> None:
    case = REFERENCES[name]
    arguments = case.make(CPU, torch.float32)
    with NoLooking():
        case.function("reference")(*arguments)


def test_a_wait_for_the_device_would_be_seen() -> None:
    numbers = torch.arange(4)
    for look in (lambda: numbers[0].item(), lambda: numbers[numbers > 1], numbers.nonzero):
        with NoLooking(), pytest.raises(AssertionError):
            look()
