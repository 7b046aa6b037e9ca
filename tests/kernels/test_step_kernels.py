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

from paceline.kernels.admit.reference import (
    Admission,
    AdmitRecord,
    AdmitTensors,
    admit,
    pack_admissions,
)
from paceline.kernels.draft_rows.reference import (
    block_rows,
    next_rows,
    own_rows,
    shifted_tokens,
    store_drafts,
)
from paceline.kernels.finish.reference import end_step, finish_step
from paceline.kernels.rows import WindowRows
from paceline.kernels.step_rows import (
    PACKET_APPENDS,
    RESULT_TOKENS,
    BlockLayout,
    PaddedRows,
    Ring,
    SlotTensors,
)
from paceline.kernels.table import ngram_propose
from paceline.kernels.verify.reference import Verdicts, accept_by_rate
from paceline.layers.attention import ForwardInputs
from paceline.parallel.contract import Contract
from paceline.runner.compact_rows import CompactRows
from paceline.runner.step import TargetPass
from paceline.state.pages import Pages
from paceline.state.slots import Slots
from paceline.state.staging import StagedWrites, Staging
from paceline.state.step_buffers import slot_tensors
from paceline.step import PageAppends, StepPlan
from tests.kernels.cases.pairs import all_triton_cases
from tests.kernels.cases.step import (
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

CPU = torch.device("cpu")
WINDOWS = tuple(kind for kind in KINDS if kind not in ("final", "chunk"))


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
    padded: PaddedRows
    slots: Slots
    pages: Pages
    compact: CompactRows
    compact_ring: Ring
    target: TargetPass | None  # None: no row is alive

    @property
    def live(self) -> TargetPass:
        if self.target is None:
            pytest.skip("a scene without a live row")
        return self.target

    @property
    def plan_rows(self) -> list[int]:
        """The plan's row of each compact row."""
        plan_row_B = self.compact.rows.plan_row_B
        count = len(self.compact.rows.start_B)
        return list(range(count)) if plan_row_B is None else plan_row_B.tolist()

    @property
    def sampling(self) -> list[int]:
        """The plan's rows that sample."""
        is_sampling = self.compact.rows.windows.width_B > 0
        return [row for row, samples in zip(self.plan_rows, is_sampling, strict=True) if samples]

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
    ring, state, padded = scene.begun(CPU)
    own_ring = scene.ring(CPU)
    compact = CompactRows(plan, slots, pages, own_ring, Contract(), plan.k)
    target = compact.target(1, reads_all=True)
    return Twice(scene, ring, state, padded, slots, pages, compact, own_ring, target)


def plan_of(scene: Scene) -> StepPlan:
    packet, layout = scene.packet(step=1), scene.layout
    count = packet[PACKET_APPENDS]
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
        host_drafts=scene.host_drafts,
    )


def advanced(seed: int, *, by_verdict: bool = False) -> Twice:
    """Both worlds after the step's results are in."""
    world = begin(seed)
    _ = world.live  # skips a scene without one
    verdicts = world.scene.verdicts(world.padded, CPU)
    if not by_verdict:
        verdicts = verdicts._replace(ok_N=None)
    finish_step(verdicts, world.padded.rows, world.state, world.ring)
    rows = world.compact.rows
    at_N = padded_rows_of(world, rows.windows)
    theirs = Verdicts(*(None if t is None else t[at_N] for t in verdicts))  # type: ignore[arg-type]
    finish_step(theirs, rows, slot_tensors(world.slots, world.pages), world.compact_ring)
    return world


def padded_rows_of(world: Twice, windows: WindowRows) -> Tensor:
    """The padded logits row of each compact one."""
    at = windows.logit_rows
    plan_row_B = torch.tensor(world.plan_rows, dtype=torch.int64)
    return plan_row_B[at.owner_M] * world.padded.shape.width + at.offset_M


def assert_equal(mine: Tensor, theirs: Any, what: str = "") -> None:
    theirs = torch.as_tensor(theirs)
    assert mine.tolist() == theirs.tolist(), what


def rows_of(forward: ForwardInputs) -> list[slice]:
    starts = forward.attention.row_start_B.tolist()
    return [slice(*pair) for pair in pairwise(starts)]


@SCENES
def test_step_inputs_are_those_of_true_lengths(seed: int) -> None:
    world = begin(seed)
    padded, batch, compact = world.padded, world.padded.batch, world.compact
    is_owned_T = torch.zeros(padded.shape.tokens, dtype=torch.bool)
    forward = world.live.inputs
    for i, (row, theirs) in enumerate(zip(world.plan_rows, rows_of(forward), strict=True)):
        start, count = int(batch.row_start_B[row]), int(batch.query_len_B[row])
        mine = slice(start, start + count)
        is_owned_T[mine] = True
        assert_equal(batch.token_T[mine], forward.token_T[theirs])
        assert_equal(batch.position_T[mine], forward.position_T[theirs])
        assert_equal(batch.page_slot_T[mine], forward.page_slot_T[theirs])
        assert (padded.row_T[mine] == row).all()
        assert int(padded.rows.start_B[row]) == int(compact.rows.start_B[i])
        assert int(batch.length_B[row]) == forward.attention.length_B[i]
        assert int(batch.slot_B[row]) == int(compact.rows.windows.slot_B[i])
    assert (batch.token_T[~is_owned_T] == 0).all()
    assert (batch.position_T[~is_owned_T] == 0).all()
    assert (batch.page_slot_T[~is_owned_T] == -1).all()
    assert (padded.row_T[~is_owned_T] == -1).all()
    dead = [row for row in range(padded.shape.rows) if row not in world.plan_rows]
    for nothing_B in (batch.query_len_B, batch.length_B, padded.rows.windows.width_B):
        assert (nothing_B[dead] == 0).all()
    assert_equal(world.state.table_SP, world.pages.table_SP)


@SCENES
def test_windows_are_those_of_true_lengths(seed: int) -> None:
    world = begin(seed)
    mine, theirs, plan_rows = world.padded.rows, world.compact.rows, world.plan_rows
    for name in ("width_B", "draft_BK", "length_B", "slot_B"):
        found = getattr(mine.windows, name)[plan_rows]
        assert_equal(found, getattr(theirs.windows, name), name)
    at_N = padded_rows_of(world, theirs.windows)
    sample_N = world.live.sample_N
    if sample_N is None:  # every entry has its logits row
        sample_N = torch.arange(len(world.live.inputs.token_T))
    shift_B = mine.row_start_B[plan_rows] - theirs.row_start_B
    owner_N = theirs.windows.logit_rows.owner_M
    assert_equal(world.padded.sample_N[at_N], sample_N + shift_B[owner_N])
    others = torch.ones(len(world.padded.sample_N), dtype=torch.bool)
    others[at_N] = False
    assert (world.padded.sample_N[others] == 0).all()


@pytest.mark.parametrize("by_verdict", [False, True], ids=["equality", "verdicts"])
@SCENES
def test_a_finished_step_emits_and_moves_the_same_in_both_layouts(
    seed: int, by_verdict: bool
) -> None:
    world = advanced(seed, by_verdict=by_verdict)
    state, padded = world.state, world.padded
    for name in ("num_tokens_S", "num_computed_S", "done_S"):
        assert_equal(getattr(state, name), getattr(world.slots, name), name)
    assert_equal(state.tokens_SL[:-1], world.slots.tokens_SL[:-1])
    entry = int(world.ring.turn_1) % len(world.ring.stamp_E)
    result_BR, theirs_BR = (r.result_EBR[entry] for r in (world.ring, world.compact_ring))
    num_words = RESULT_TOKENS + padded.shape.width
    num_rows = len(world.scene.kinds)
    assert_equal(result_BR[:num_rows, :num_words], theirs_BR[:num_rows, :num_words])
    silent = [row for row in range(padded.shape.rows) if row not in world.sampling]
    assert (result_BR[silent, :RESULT_TOKENS] == 0).all()
    assert padded.rows.count_B is not None
    assert (padded.rows.count_B[silent] == 0).all()
    assert (world.ring.stamp_E == 40 + seed).sum() == 1
    assert int(world.ring.ticket_1) == 0


def test_a_rate_of_one_always_accepts_and_a_rate_of_nothing_never_does() -> None:
    """With the largest coin that there is, and with one of the smallest."""
    scene = coin_scene()
    _, state, padded = scene.begun(CPU)
    windows = padded.rows.windows
    rates_SK = torch.tensor((1.0, 0.0)).expand(len(state.seed_S2), 2)
    ok_N = accept_by_rate(windows, state.seed_S2, rates_SK, padded.shape.num_logits)
    assert_equal(ok_N[windows.logit_rows.row_M], [True, False, False] * 2)


@SCENES
def test_the_last_entry_of_a_row_holds_its_last_committed_position(seed: int) -> None:
    world = advanced(seed)
    padded, batch, last_B = world.padded, world.padded.batch, world.padded.rows.last_B
    assert last_B is not None
    for row in range(padded.shape.rows):
        if row not in world.plan_rows:
            assert int(last_B[row]) == 0
            continue
        slot, last = int(batch.slot_B[row]), int(last_B[row])
        assert int(padded.row_T[last]) == row
        # The newest token was not computed; a chunk ends where its computing ended.
        assert int(batch.position_T[last]) == int(world.state.num_computed_S[slot]) - 1


def drafting_rows(world: Twice) -> list[int]:
    done_S, slot_B = world.slots.done_S, world.padded.batch.slot_B
    return [row for row in world.sampling if int(done_S[int(slot_B[row])]) == 0]


@SCENES
def test_a_draft_model_first_computes_what_it_does_at_true_lengths(seed: int) -> None:
    world = advanced(seed)
    padded, scene = world.padded, world.scene
    batch = batch_rows(CPU, padded.shape.rows, scene.num_draft_entries)
    last_B = unwritten(CPU, padded.shape.rows)
    own_rows(world.ring, scene.layout, padded, world.state, batch, last_B, PAGE_SIZE)
    expected = world.compact.own(1)
    assert expected is not None
    is_owned_T = torch.zeros(len(batch.token_T), dtype=torch.bool)
    alive = []
    for row, theirs in zip(world.plan_rows, rows_of(expected.inputs), strict=True):
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
    others = [row for row in range(padded.shape.rows) if row not in alive]
    for nothing_B in (batch.query_len_B, batch.length_B, last_B):
        assert (nothing_B[others] == 0).all()


@SCENES
def test_shifted_tokens_are_the_committed_ones_one_further_on(seed: int) -> None:
    world = advanced(seed)
    padded = world.padded
    token_T = unwritten(CPU, padded.shape.tokens)
    shifted_tokens(padded, world.state, token_T)
    first = world.compact.shifted(1)
    assert first is not None
    expected = first.inputs
    is_known_T = torch.zeros(len(token_T), dtype=torch.bool)
    for row, theirs in zip(world.plan_rows, rows_of(expected), strict=True):
        start = int(padded.batch.row_start_B[row])
        mine = slice(start, start + theirs.stop - theirs.start)
        is_known_T[mine] = True
        assert_equal(token_T[mine], expected.token_T[theirs])
    assert (token_T[~is_known_T] == 0).all()


@pytest.mark.parametrize("first_output", [1, 0, -1], ids=["fill-in", "anchor", "shifted"])
@SCENES
def test_a_block_drafters_pass_is_what_it_is_at_true_lengths(seed: int, first_output: int) -> None:
    world = advanced(seed)
    padded, num_rows = world.padded, world.padded.shape.rows
    layout = BlockLayout(4, 3, first_output)
    num_entries = padded.shape.tokens + num_rows * layout.width
    batch = batch_rows(CPU, 2 * num_rows, num_entries)
    block_rows(padded, world.state, layout, layout.width, batch, PAGE_SIZE)
    world.compact.k = layout.k
    expected = world.compact.block(1, layout).inputs
    start, length = expected.attention.row_start_B.tolist(), expected.attention.length_B.tolist()
    rows = iter(zip(start, start[1:], length, strict=False))
    is_owned_T = torch.zeros(num_entries, dtype=torch.bool)
    for row in range(2 * num_rows):
        count = int(batch.query_len_B[row])
        if not count:
            assert int(batch.length_B[row]) == 0
            continue
        first, stop, total = next(rows)
        mine = slice(int(batch.row_start_B[row]), int(batch.row_start_B[row]) + count)
        assert (stop - first, total) == (count, int(batch.length_B[row]))
        is_owned_T[mine] = True
        for name in ("token_T", "position_T", "page_slot_T"):
            assert_equal(getattr(batch, name)[mine], getattr(expected, name)[first:stop])
    assert next(rows, None) is None
    assert (batch.page_slot_T[~is_owned_T] == -1).all()
    assert (batch.token_T[~is_owned_T] == 0).all()


@pytest.mark.parametrize("is_shifted", [False, True], ids=["own", "shifted"])
@SCENES
def test_a_drafters_next_pass_computes_its_last_drafts(seed: int, is_shifted: bool) -> None:
    world = advanced(seed)
    world.compact.k = STORED_DRAFTS
    num_rows, drafting = world.padded.shape.rows, drafting_rows(world)
    assert_equal(world.compact.slot_B, world.padded.batch.slot_B[drafting])
    token_B = torch.randint(VOCAB, (num_rows,), generator=torch.Generator().manual_seed(seed))
    for j in (1, 3):
        batch = batch_rows(CPU, num_rows, num_rows)
        next_rows(token_B, j, world.padded, world.state, batch, PAGE_SIZE, is_shifted)
        theirs = world.compact.next(j, token_B[drafting], 1, is_shifted=is_shifted)
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


@pytest.mark.parametrize("k", [1, 2, STORED_DRAFTS])
@SCENES
def test_drafts_are_stored_for_rows_that_go_on_and_for_no_other(seed: int, k: int) -> None:
    world = advanced(seed)
    world.compact.k = k
    draft_BK = torch.randint(-1, VOCAB, (world.padded.shape.rows, k), dtype=torch.int32)
    store_drafts(draft_BK, world.padded, world.state, is_onehot=seed % 3 == 0)
    assert_equal(world.compact.slot_B, world.padded.batch.slot_B[drafting_rows(world)])
    world.compact.store(draft_BK[drafting_rows(world)], is_onehot=seed % 3 == 0)
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
    found = ngram_propose.reference(tokens_SL, num_tokens_S, slot_B, *sizes)
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


# Padded rows and admissions are laid out by references that a device could run as well.
NEVER_WAIT = ("admit", "step_inputs", "block_rows", "next_rows", "store_drafts", "ngram_propose")


@pytest.mark.parametrize("name", [*NEVER_WAIT, "shifted_tokens", "own_rows"])
def test_references_never_wait_for_the_device(name: str) -> None:
    case = next(case for case in all_triton_cases() if case.operation == name)
    arguments = case.make(CPU, torch.float32)
    with NoLooking():
        case.function("reference")(*arguments)


def test_a_wait_for_the_device_would_be_seen() -> None:
    numbers = torch.arange(4)
    for look in (lambda: numbers[0].item(), lambda: numbers[numbers > 1], numbers.nonzero):
        with NoLooking(), pytest.raises(AssertionError):
            look()
