"""Cases of the kernels that begin and end a step: slots in every state, in packed and uniform rows.

`Scene` builds a plan and the state it meets; the other step kernels' cases build on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.kernels.rows import WindowRows
from paceline.kernels.step_inputs.reference import step_inputs
from paceline.kernels.step_rows import (
    PACKET_APPENDS,
    PACKET_HAS_MARKS,
    PACKET_ROWS,
    PACKET_STEP,
    RESULT_TOKENS,
    BatchRows,
    PacketLayout,
    PaddedRows,
    Ring,
    SlotTensors,
    StepRows,
    StepShape,
)
from paceline.kernels.verify.reference import Verdicts
from paceline.step import HostDrafts
from tests.kernels.cases.pairs import TritonCase

Ints = npt.NDArray[np.int32]
Numbers = dict[str, Ints]

UNWRITTEN = -77
PAGE_SIZE = 4
MAX_MODEL_LEN = 44  # also the longest sequence; its last page is a whole one
STORED_DRAFTS = 5
VOCAB = 13  # few, so that drafts, stops and n-grams meet often
NUM_EOS, NUM_STOP = 2, 3
RING = 3
MAX_APPENDS = 80

# What a row may be. Of a sequence that may grow to max_model_len, "full" lacks one token, "brink"
# two: its drafts run past the end.
KINDS = ("decode", "verify", "final", "chunk", "done", "full", "brink")


@dataclass
class Scene:
    """One plan over slots in given states. The same seed gives the same scene."""

    k: int
    kinds: tuple[str, ...]
    is_uniform: bool = False
    num_padding: int = 1
    num_tail: int = 0  # token entries behind all rows
    gap: int = 0  # and between packed ones
    max_model_len: int = MAX_MODEL_LEN
    past_limit: bool = False  # limits beyond max_model_len, so that windows run over it
    num_free: int = 3  # slots without a row
    num_foreign: int = 2  # appends for such slots
    seed: int = 0
    generator: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = np.random.default_rng(self.seed)
        self.num_slots = len(self.kinds) + self.num_free
        self.padding_slot = self.num_slots
        num_rows = len(self.kinds)
        self.slot_B = self.generator.permutation(self.num_slots)[:num_rows].astype(np.int32)
        self.planned_B = np.ones(num_rows, np.int32)
        self.samples_B = np.ones(num_rows, np.int32)
        self.numbers = self._numbers()
        for row, kind in enumerate(self.kinds):
            self._cast(row, kind)
        self.table_SP = self._table()
        self.layout = PacketLayout.of(num_rows + self.num_padding + 2, MAX_APPENDS)

    @property
    def shape(self) -> StepShape:
        rows = len(self.kinds) + self.num_padding
        packed = int(self.planned_B.sum()) + self.gap * len(self.kinds)
        entries = rows * (self.k + 1) if self.is_uniform else packed
        return StepShape(rows, entries + self.num_tail, self.k, self.is_uniform)

    @property
    def row_start_B(self) -> Ints:
        extent_B = self.planned_B + self.gap
        return (np.cumsum(extent_B) - extent_B).astype(np.int32)

    @property
    def draft_start_B(self) -> Ints:
        """Chunks and the token after them, or two tokens; a gap of one behind each row."""
        return self.row_start_B + 3 * np.arange(len(self.kinds), dtype=np.int32)

    @property
    def _is_chunk_B(self) -> npt.NDArray[np.bool_]:
        return np.array([kind in ("final", "chunk") for kind in self.kinds], np.bool_)

    @property
    def has_host_drafts_B(self) -> npt.NDArray[np.bool_]:
        """Every other window may verify drafts that a draft model has not made."""
        is_odd_B: npt.NDArray[np.bool_] = np.arange(len(self.kinds)) % 2 == 1
        return ~self._is_chunk_B & is_odd_B

    @property
    def host_drafts(self) -> HostDrafts:
        """Only whose they are."""
        row_R = self.has_host_drafts_B.nonzero()[0].astype(np.int32)
        return HostDrafts(row_R, row_R, np.full((len(row_R), 1), -1, np.int32), row_R)

    @property
    def draft_len_B(self) -> Ints:
        """What the step computes and samples; of a draft model's own drafts the last two tokens."""
        whole_B = self._is_chunk_B | self.has_host_drafts_B
        return np.where(whole_B, self.planned_B + self.samples_B, 2).astype(np.int32)

    @property
    def num_draft_entries(self) -> int:
        return int(self.planned_B.sum()) + (3 + self.gap) * len(self.kinds) + 5

    def _numbers(self) -> Numbers:
        """Slots that no plan names: free, and the padding slot."""
        rows, draw = self.num_slots + 1, self.generator.integers
        numbers = {
            name: np.zeros(rows, np.int32)
            for name in ("num_tokens_S", "num_computed_S", "done_S", "max_len_S", "min_len_S")
        }
        numbers["drafts_onehot_S"] = np.ones(rows, np.int32)
        numbers["tokens_SL"] = draw(0, VOCAB, (rows, self.max_model_len), np.int32)
        numbers["drafts_SK"] = np.full((rows, STORED_DRAFTS), -1, np.int32)
        numbers["ids_SE"] = draw(-1, VOCAB, (rows, 2 + NUM_EOS + NUM_STOP), np.int32)
        numbers["ids_SE"][:, :2] = draw(-(2**31), 2**31 - 1, (rows, 2))
        return numbers

    def _cast(self, row: int, kind: str) -> None:
        """Put the row's slot into the state of its kind, and plan what fits it."""
        draw, numbers, slot = self.generator.integers, self.numbers, self.slot_B[row]
        longest = self.max_model_len
        length = int(draw(3, longest - 1))
        max_len = int(draw(length + 1, longest + 1))
        computed = length - 1
        if kind in ("verify", "done", "full"):
            self.planned_B[row] = 1 + draw(0, self.k + 1)
            count = draw(0, STORED_DRAFTS + 1)
            numbers["drafts_SK"][slot, :count] = draw(0, VOCAB, count)
        if kind == "verify" and draw(0, 3) == 0:
            numbers["drafts_SK"][slot, 1] = -1  # a hole: what is behind it does not count
        if kind == "full":
            length = longest - 1
            max_len = longest + (STORED_DRAFTS if self.past_limit else 0)
            self.planned_B[row], computed = self.k + 1, length - 1
            numbers["drafts_SK"][slot] = draw(0, VOCAB, STORED_DRAFTS)
        if kind == "brink":
            length, computed, max_len = longest - 2, longest - 3, longest
        if kind == "done":
            numbers["done_S"][slot] = draw(1, 6)
        if kind in ("final", "chunk"):
            computed = int(draw(0, length - 1))
            self.planned_B[row] = length - computed
        if kind == "chunk":
            self.planned_B[row] = draw(1, length - computed)
            self.samples_B[row] = 0
        numbers["num_tokens_S"][slot], numbers["num_computed_S"][slot] = length, computed
        numbers["max_len_S"][slot] = max_len
        numbers["min_len_S"][slot] = length + draw(-1, 3)

    def _table(self) -> Ints:
        num_pages = -(-self.max_model_len // PAGE_SIZE)
        table = self.generator.permutation((self.num_slots + 1) * num_pages).astype(np.int32)
        table = table.reshape(self.num_slots + 1, num_pages)
        # Some sequences have no page yet for what comes next.
        lengths = self.numbers["num_tokens_S"]
        has_room = self.generator.integers(0, 2, len(lengths))
        needed = -(-lengths // PAGE_SIZE) + has_room
        table[np.arange(num_pages) >= needed[:, None]] = -1
        return table

    def packet(self, step: int) -> Ints:
        """The plan. Words that must not be read hold nonsense."""
        layout, num_rows = self.layout, len(self.kinds)
        packet = np.full(layout.num_words, 2**30, np.int32)
        packet[[PACKET_STEP, PACKET_ROWS]] = step, num_rows
        for at, values in (
            (layout.slot, self.slot_B),
            (layout.planned, self.planned_B),
            (layout.samples, self.samples_B),
            (layout.row_start, self.row_start_B),
            (layout.draft_start, self.draft_start_B),
            (layout.draft_len, self.draft_len_B),
        ):
            packet[at : at + num_rows] = values
        # The page that a row's window needs, where the table has none; then those of others.
        lengths = self.numbers["num_tokens_S"]
        index_S = np.minimum(lengths // PAGE_SIZE, self.table_SP.shape[1] - 1)
        wanted = [s for s in self.slot_B if self.table_SP[s, index_S[s]] < 0]
        others = sorted(set(range(self.num_slots)) - set(self.slot_B.tolist()))
        wanted += others[: self.num_foreign]
        packet[PACKET_APPENDS] = len(wanted)
        for i, slot in enumerate(wanted):
            words = (slot, index_S[slot], self.table_SP.size + i)
            packet[[layout.append_slot + i, layout.append_index + i, layout.append_page + i]] = (
                words
            )
        return packet

    def ring(self, device: torch.device) -> Ring:
        turn = 1 + self.seed % RING
        words = np.full((RING, self.layout.num_words), UNWRITTEN, np.int32)
        words[turn % RING] = self.packet(step=40 + self.seed)
        num_rows, num_words = self.layout.max_rows, RESULT_TOKENS + STORED_DRAFTS + 1
        return Ring(
            packet_EP=torch.from_numpy(words).to(device),
            result_EBR=unwritten(device, RING, num_rows, num_words),
            stamp_E=unwritten(device, RING),
            time_E2=torch.zeros(RING, 2, dtype=torch.int64, device=device),
            turn_1=torch.tensor([turn], dtype=torch.int32, device=device),
            ticket_1=torch.zeros(1, dtype=torch.int32, device=device),
            draft_EBK=unwritten(device, RING, num_rows, STORED_DRAFTS),
            draft_stamp_E=unwritten(device, RING),
            late_time_E2=torch.zeros(RING, 2, dtype=torch.int64, device=device),
        )

    def state(self, device: torch.device) -> SlotTensors:
        tensors = {name: torch.tensor(array).to(device) for name, array in self.numbers.items()}
        ids_SE = tensors.pop("ids_SE")
        return SlotTensors(
            **tensors,
            seed_S2=ids_SE[:, :2],
            eos_ids_SE=ids_SE[:, 2 : 2 + NUM_EOS],
            stop_ids_SE=ids_SE[:, 2 + NUM_EOS :],
            table_SP=torch.tensor(self.table_SP).to(device),
        )

    def rows(self, device: torch.device) -> PaddedRows:
        shape = self.shape
        batch = batch_rows(device, shape.rows, shape.tokens)
        first_B, width_B, length_B, start_B, count_B, last_B = (
            unwritten(device, shape.rows) for _ in range(6)
        )
        draft_BK = unwritten(device, shape.rows, shape.k)
        windows = WindowRows(batch.slot_B, first_B, width_B, length_B, draft_BK)
        places = (batch.row_start_B, batch.query_len_B)
        return PaddedRows(
            shape=shape,
            batch=batch,
            row_T=unwritten(device, shape.tokens),
            sample_N=unwritten(device, shape.num_logits),
            rows=StepRows(windows, start_B, *places, count_B, last_B),
        )

    def begun(self, device: torch.device) -> tuple[Ring, SlotTensors, PaddedRows]:
        """The scene after step_inputs."""
        ring, state, rows = self.ring(device), self.state(device), self.rows(device)
        step_inputs(ring, self.layout, state, rows, PAGE_SIZE, self.padding_slot)
        return ring, state, rows

    def verdicts(self, padded: PaddedRows, device: torch.device) -> Verdicts:
        """Tokens that often equal the drafts, a few unusable rows, verdicts of a coin."""
        generator = np.random.default_rng(self.seed + 1)
        num_rows, width = padded.shape.rows, padded.shape.width
        token_BW = generator.integers(0, VOCAB, (num_rows, width)).astype(np.int32)
        draft_BK = padded.rows.windows.draft_BK.cpu().numpy()
        is_equal = (generator.random((num_rows, self.k)) < 0.7) & (draft_BK >= 0)
        token_BW[:, : self.k][is_equal] = draft_BK[is_equal]
        bad_N = generator.random(num_rows * width) < 0.1
        ok_N = generator.random(num_rows * width) < 0.6
        return Verdicts(
            torch.from_numpy(token_BW.flatten()).to(device),
            torch.from_numpy(bad_N).to(device),
            torch.from_numpy(ok_N).to(device),
        )


def unwritten(device: torch.device, *shape: int) -> Tensor:
    return torch.full(shape, UNWRITTEN, dtype=torch.int32, device=device)


def batch_rows(device: torch.device, num_rows: int, num_entries: int) -> BatchRows:
    sizes = [num_entries if name.endswith("_T") else num_rows for name in BatchRows._fields]
    return BatchRows(*(unwritten(device, size) for size in sizes))


def tensors_of(rows: PaddedRows | StepRows | WindowRows | BatchRows) -> list[Tensor]:
    if isinstance(rows, PaddedRows):
        return [rows.row_T, rows.sample_N, *tensors_of(rows.batch), *tensors_of(rows.rows)]
    inner = [t for v in rows if isinstance(v, WindowRows) for t in tensors_of(v)]
    return [v for v in rows if isinstance(v, Tensor)] + inner


def state_outputs(state: SlotTensors) -> list[Tensor]:
    """All of the state but the padding slot's tokens, which mean nothing."""
    return [state.tokens_SL[:-1], *state[1:]]


def _inputs_case(name: str, scene: Callable[[], Scene]) -> TritonCase:
    def make(device: torch.device, _: torch.dtype) -> tuple[Any, ...]:
        made = scene()
        world = made.ring(device), made.layout, made.state(device), made.rows(device)
        return (*world, PAGE_SIZE, made.padding_slot)

    return TritonCase(
        "step_inputs",
        name,
        make,
        lambda arguments, _: [
            # What the end of the step writes stays as it was.
            *tensors_of(arguments[3]),
            *state_outputs(arguments[2]),
        ],
    )


def _finish_case(name: str, scene: Callable[[], Scene], *, has_ok: bool = False) -> TritonCase:
    def make(device: torch.device, _: torch.dtype) -> tuple[Any, ...]:
        made = scene()
        ring, state, padded = made.begun(device)
        verdicts = made.verdicts(padded, device)
        return verdicts if has_ok else verdicts._replace(ok_N=None), padded.rows, state, ring

    def outputs(arguments: tuple[Any, ...], _: None) -> list[Tensor]:
        _, rows, state, ring = arguments
        return [*tensors_of(rows), *state_outputs(state), *ring[:3], *ring[4:]]

    return TritonCase(
        "finish_step",
        name,
        make,
        outputs,
    )


def _rate_case(name: str, scene: Callable[[], Scene], rates: tuple[float, ...]) -> TritonCase:
    def make(device: torch.device, _: torch.dtype) -> tuple[Any, ...]:
        state, padded = scene().begun(device)[1:]
        # Each slot has other rates: the given ones, and those of a request that accepts less.
        falling_S1 = torch.linspace(1.0, 0.0, len(state.seed_S2), device=device)[:, None]
        rates_SK = torch.tensor(rates, device=device) * falling_S1
        rates_SK[: len(rates_SK) // 2] = torch.tensor(rates, device=device)
        return padded.rows.windows, state.seed_S2, rates_SK, padded.shape.num_logits

    return TritonCase(
        "accept_by_rate",
        name,
        make,
        lambda arguments, ok_N: [_in_windows(arguments[0], ok_N)],
    )


def _in_windows(windows: WindowRows, value_N: Tensor) -> Tensor:
    """The values of logits rows that a window has."""
    return value_N.cpu()[windows.on_cpu().logit_rows.row_M]


# Seeds whose coins are the largest that there is for a draft at position 3, and one of the smallest
# at position 4.
COIN_SEEDS = (35517372, 48176533)


def coin_scene() -> Scene:
    """Two rows of three tokens and two drafts, with the seeds above."""
    scene = Scene(2, ("verify",) * 2, is_uniform=True, seed=90)
    slot_B, numbers = scene.slot_B, scene.numbers
    numbers["num_tokens_S"][slot_B], numbers["num_computed_S"][slot_B] = 3, 2
    numbers["min_len_S"][slot_B] = numbers["max_len_S"][slot_B] = 9  # no row ends
    numbers["drafts_SK"][slot_B] = 5
    numbers["ids_SE"][slot_B, :2] = [(seed, 0) for seed in COIN_SEEDS]
    scene.planned_B[:] = 3
    return scene


def mixed_scenes() -> Iterator[tuple[str, Callable[[], Scene]]]:
    """Every kind of row, packed and uniform, with and without drafts."""
    every = KINDS * 2
    windows = tuple(kind for kind in every if kind not in ("final", "chunk"))
    for k in (0, 3):
        yield f"packed-k{k}", partial(Scene, k, every, num_tail=7, seed=k)
        yield f"uniform-k{k}", partial(Scene, k, windows, is_uniform=True, seed=10 + k)
    yield "uniform-tail", partial(Scene, 2, windows, is_uniform=True, num_tail=3, seed=20)
    yield "verify", partial(Scene, 5, ("verify",) * 24, is_uniform=True, seed=25)
    yield "gaps", partial(Scene, 1, every, gap=2, seed=26)
    yield "one-row", partial(Scene, 3, ("verify",), is_uniform=True, num_padding=0, seed=30)
    yield "no-row", partial(Scene, 3, (), num_padding=3, num_tail=9, seed=40)


def _marks_case(name: str, has_marks: int) -> TritonCase:
    """A packet of three rows, read for a shape of five."""
    layout = PacketLayout.of(6, 2, num_marks=4)

    def make(device: torch.device, _: torch.dtype) -> tuple[Any, ...]:
        ring = Scene(0, ("decode",), seed=81).ring(device)
        generator = torch.Generator().manual_seed(5)
        shape = (len(ring.packet_EP), layout.num_words)
        packet_EP = torch.randint(0, 999, shape, dtype=torch.int32, generator=generator)
        packet_EP[:, PACKET_ROWS], packet_EP[:, PACKET_HAS_MARKS] = 3, has_marks
        return ring._replace(packet_EP=packet_EP.to(device)), layout, 5

    return TritonCase("read_marks", name, make, lambda _, found: list(found))


def cases() -> Iterator[TritonCase]:
    for name, scene in mixed_scenes():
        yield _inputs_case(name, scene)
        yield _finish_case(name, scene)
        if name in ("packed-k3", "uniform-k0", "verify"):
            yield _finish_case(f"{name}-verdicts", scene, has_ok=True)
            yield _rate_case(name, scene, rates=(0.8, 0.7, 0.9))
    yield _rate_case("sure", coin_scene, rates=(1.0, 0.0))
    over = partial(Scene, 4, ("full", "verify") * 2, past_limit=True, num_tail=2, seed=50)
    yield _inputs_case("past-limit", over)
    many = partial(Scene, 1, ("decode",) * 5, num_free=70, num_foreign=70, seed=60)
    yield _inputs_case("many-appends", many)
    kinds = ("chunk", "final", "verify")
    long = partial(Scene, 2, kinds, max_model_len=3000, num_tail=1500, seed=70)
    yield _inputs_case("long", long)
    for name, has_marks in (("marks", 1), ("no-marks", 0)):
        yield _marks_case(name, has_marks)
    yield TritonCase(
        "note_late",
        "turn",
        lambda device, _: (Scene(0, ("decode",), seed=80).ring(device), 1),
        lambda arguments, _: [*arguments[0][:3], *arguments[0][4:-1]],  # clocks differ
    )
    yield TritonCase(
        "end_step",
        "turn",
        lambda device, _: (Scene(0, ("decode",), seed=80).ring(device),),
        lambda arguments, _: [*arguments[0][:3], *arguments[0][4:]],
    )
