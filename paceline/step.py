"""What scheduler and runner exchange: plans go down, results come up. No torch, no policy.

Shape letters: B rows of the step, K drafts, W = K + 1 window, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.request import EngineRequest

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SlotInit:
    """A request takes a slot: everything the device must know that a step does not compute.

    A resumed request comes with its output so far: `tokens` is prompt + output and must be
    recomputed (prefilled) from `num_cached` on; `prompt_len` stays the prompt's.
    """

    slot: int
    request: EngineRequest
    tokens: Ints  # prompt, or prompt + output when resumed
    prompt_len: int
    num_cached: int  # positions whose KV is already in `pages` (a prefix hit)
    max_len: int  # committed length at which the device ends the request (LENGTH)
    pages: Ints  # the slot's page table so far, in order


@dataclass(frozen=True, slots=True)
class PageAppends:
    """New entries of page tables: table[slot, index] = page, in launch order."""

    slot: Ints
    index: Ints
    page: Ints


@dataclass(frozen=True, slots=True)
class StepSize:
    """How much a step computes. Shapes, padding, draft passes and the CUDA graph follow from it.

    It is the size of one plan, or joined over the plans of all replicas: then every rank has the
    same.
    """

    tokens: int = 0  # entries of the target's pass
    draft_tokens: int = 0  # entries of the first pass of a separate draft model
    rows: int = 0
    k: int = 0
    tail: int = 0  # 0: all rows are greedy; see sampling.verify.Tail
    is_uniform: bool = True  # every row decodes or verifies
    has_graph: bool = True  # no row needs an eager step

    @classmethod
    def joined(cls, sizes: Sequence[StepSize]) -> StepSize:
        """The smallest size with room for all of them."""
        return cls(
            tokens=max(x.tokens for x in sizes),
            draft_tokens=max(x.draft_tokens for x in sizes),
            rows=max(x.rows for x in sizes),
            k=max(x.k for x in sizes),
            tail=max(x.tail for x in sizes),
            is_uniform=all(x.is_uniform for x in sizes),
            has_graph=all(x.has_graph for x in sizes),
        )

    def packed(self) -> list[int]:
        return [int(getattr(self, name)) for name in self.__slots__]

    @classmethod
    def unpacked(cls, numbers: Sequence[int]) -> StepSize:
        tokens, draft_tokens, rows, k, tail, is_uniform, has_graph = numbers
        return cls(tokens, draft_tokens, rows, k, tail, bool(is_uniform), bool(has_graph))


@dataclass(slots=True)
class StepPlan:
    """One device step. Holds no token value of a running request: the device has the truth.

    Row i computes `query_len_B[i]` positions of slot `slot_B[i]`, from the slot's own
    num_computed on. Prefill rows: the chunk length. Verify and decode rows: 1 + k_B[i] (last
    committed token and k_i drafts). Rows are ordered: sampling rows of width 1 + k first, then
    prefill chunks.
    """

    step: int  # counts from 1, no gaps
    k: int  # drafts that the step proposes for each sampling row, and the widest k_B
    uid_B: Longs  # the request each row belongs to
    slot_B: Ints
    query_len_B: Ints
    k_B: Ints  # drafts verified by the row; 0 for prefill chunks
    samples_B: Bools  # False for a non-final prefill chunk
    length_bound_B: Ints  # >= the row's true KV length after this step
    admissions: Sequence[SlotInit] = ()
    page_appends: PageAppends | None = None
    late_B: Bools | None = None  # rows whose token masks arrive through bind()
    agreed: StepSize | None = None  # of the plans of all replicas, where they step together
    # One number that a device may read while it computes. Not 0: every row's request was aborted,
    # nothing that this step computes is read any more, and it may end early.
    unwanted: Longs = field(default_factory=lambda: np.zeros(1, np.int64))

    @property
    def num_rows(self) -> int:
        return len(self.slot_B)

    @property
    def num_tokens(self) -> int:
        return int(self.query_len_B.sum())

    def step_size(self) -> StepSize:
        """Of this plan alone; a runner adds what it knows of its rows."""
        is_decode_B = self.query_len_B == self.k_B + 1
        draft_len_B = np.where(is_decode_B, 2, self.query_len_B + self.samples_B)
        return StepSize(
            tokens=self.num_tokens,
            draft_tokens=int(draft_len_B.sum()),
            rows=self.num_rows,
            k=self.k,
            is_uniform=bool(is_decode_B.all()),
        )


@dataclass(frozen=True, slots=True)
class LateMasks:
    """Token masks for the late rows of a step, bound after the previous result was committed.

    mask_RWV: bit v of word v // 32 set = token v allowed at window position w of plan row
    `row_R[r]`. Positions past the row's k_B are ignored.
    """

    row_R: Ints
    mask_RWV: Ints  # [R, W, ceil(V / 32)]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of emitted (or prompt) tokens of one row: raw model distribution.

    Entry 0 of the last axis is the token itself, then the top ones in descending order.
    `rank` is the token's own rank, from 1.
    """

    row: int  # plan row
    ids: Ints  # [positions, 1 + top]
    values: Floats  # [positions, 1 + top]
    rank: Ints  # [positions]


@dataclass(slots=True)
class StepResult:
    """What a step did, row by row in the order of its plan. Belongs to the plan's requests."""

    step: int
    count_B: Ints  # tokens emitted; 0 for a non-final chunk or a row that was already done
    token_BW: Ints  # emitted tokens, -1 after count
    done_B: Ints  # request.Done codes
    num_drafts_B: Ints  # real drafts (not -1) that were verified
    num_accepted_B: Ints  # drafts among the emitted tokens; never the bonus
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # for prompt positions computed by this step
    draft_BK: Ints | None = None  # the drafts proposed for the next step; only for late plans
    # time.perf_counter of the engine process, whatever clock the device has. The end, drafting
    # included, is final when the next step's result is there (or nothing runs any more).
    device_start_s: float = 0.0
    device_end_s: float = 0.0


class InFlightStep(Protocol):
    """A launched step."""

    def bind(self, late: LateMasks) -> None:
        """Deliver the masks of a plan with late rows; exactly once, and only for those."""

    def is_over(self, within_s: float) -> bool:
        """Wait up to `within_s` for the result. A device whose steps are short may say True at
        once: then `wait` waits."""

    def wait(self) -> StepResult:
        """Block until the result (not the drafting) is there. Raises what the device raised."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What the host needs to know of a runner; sent to the front process as well."""

    num_pages: int  # pages that may be handed out; the padding page is not among them
    page_size: int
    num_slots: int
    max_model_len: int
    vocab_size: int
    max_k: int  # 0 without a drafter
    draft_lookahead: int  # extra positions past the window whose KV the drafter writes
    # A position's KV depends on the token after it too: the drafter reads the target's features.
    draft_reads_features: bool = False
    # Positions up to a sequence's next one, itself included, that some layer may read; None: all.
    kv_window: int | None = None
    # Steps have fixed shapes: a row pays for its k whether the drafter found anything or not.
    pays_for_missing_drafts: bool = False
    # Pages that a step can bring to a row that runs; None: any number.
    max_row_appends: int | None = None
    max_num_batched_tokens: int = 2048  # where the configuration leaves it open
    model_name: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    weights_bytes: int = 0
    kv_cache_bytes: int = 0
    startup_s: dict[str, float] = field(default_factory=dict)  # by stage, as the front saw them


@dataclass(frozen=True, slots=True)
class StepProposal:
    """What one replica brings to the agreement on the next step."""

    step_size: StepSize = StepSize()
    has_plan: bool = False
    is_unfinished: bool = False  # some request has not ended, or a result has not been read
    is_draining: bool = False
    has_spare_time: bool = False  # it has been idle for a while and could capture graphs


@dataclass(frozen=True, slots=True)
class StepAgreement:
    """The proposals of all replicas combined; every replica gets the same value."""

    step_size: StepSize
    has_plan: bool  # True if any replica has a plan; then all launch a step
    is_unfinished: bool  # True if any replica has unfinished work; then none may sleep
    is_draining: bool  # True if all replicas drain
    has_spare_time: bool  # True if any replica has spare time


class Lockstep(Protocol):
    """The agreement of replicas whose steps contain collectives across replicas."""

    @property
    def number(self) -> int:
        """The number of agreements so far; between two agreements it is the same on all leaders."""

    def agree(self, proposal: StepProposal) -> StepAgreement:
        """Exchange proposals with the other leaders. Raises CollectiveError on a timeout."""


class Runner(Protocol):
    """Runs plans in launch order on one device. Never plans, never sees text."""

    @property
    def info(self) -> RunnerInfo: ...

    @property
    def lockstep(self) -> Lockstep | None:
        """None: its steps wait for nobody outside this replica."""

    def step_size(self, plan: StepPlan) -> StepSize:
        """The plan's, with the tail that its rows need and whether a graph can hold it."""

    def launch(self, plan: StepPlan) -> InFlightStep:
        """Queue a step and return at once."""

    @property
    def has_spare_work(self) -> bool:
        """Whether `use_spare_time` would do anything."""

    def use_spare_time(self) -> bool:
        """Nothing runs: prepare for steps to come, for a moment. False: there is nothing left."""

    def rest(self) -> None:
        """The loop is about to sleep, or shows in its sleep that it is there."""

    def close(self) -> None: ...
