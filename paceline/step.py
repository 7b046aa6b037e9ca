"""What scheduler and runner exchange: plans and results. No torch, no policy.

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

NO_REQUEST = -1  # as a uid: the slot is free, or the row has no live request


@dataclass(frozen=True, slots=True)
class SlotInit:
    """A request takes a slot: what the device must know of it.

    A resumed request has its output so far in `tokens`; prefill starts at `num_cached`.
    `prompt_len` is the length of the prompt alone.
    """

    slot: int
    request: EngineRequest
    tokens: Ints  # prompt, or prompt + output when resumed
    prompt_len: int
    num_cached: int  # leading positions whose KV is in `pages` (a prefix hit)
    max_len: int  # committed length at which the device ends the request (LENGTH)
    pages: Ints  # the slot's page table so far, in order
    # Recurrent models: the snapshot of exactly `num_cached` positions that the slot continues from;
    # -1: its state is zero.
    snapshot: int = -1


@dataclass(frozen=True, slots=True)
class PageAppends:
    """New entries of page tables: table[slot, index] = page, in launch order."""

    slot: Ints
    index: Ints
    page: Ints


MARKS = 4  # the most snapshots of one row in one step


@dataclass(frozen=True, slots=True)
class SnapshotMarks:
    """Where recurrent state is copied out: when the state of row b has passed exactly
    length_BM[b, m] positions, to snapshot entry_BM[b, m]. A mark that is not passed in this step
    does nothing.

    [B, MARKS]; -1: no mark. No entry occurs twice.
    """

    length_BM: Ints
    entry_BM: Ints


@dataclass(frozen=True, slots=True)
class HostDrafts:
    """Continuations that the host proposes for rows of a step: forced tokens, or looked up ones.

    The tokens of row r continue its sequence from length_R[r] on. The host may not know how many of
    them earlier steps have emitted meanwhile. So the device compares the tokens from length_R[r] on
    with the continuation. If they are its beginning, and at least least_R[r] tokens are left, these
    become the row's drafts. Otherwise the slot keeps the drafts that it has.
    """

    row_R: Ints  # rows of the plan
    length_R: Ints  # tokens of the sequence before the continuation
    token_RC: Ints  # [R, C]; -1 after the end of a continuation
    # Fewer tokens than this are expected to be worth less than the drafter's drafts.
    least_R: Ints

    def num_left(self, slot_R: Longs, tokens_SL: Ints, num_tokens_S: Ints) -> Ints:
        """Of each continuation, the number of last tokens that become drafts; 0: it is not taken.

        Scheduler and device use the same rule, so both know a row's drafts.
        """
        index_C = np.arange(self.token_RC.shape[1])
        num_emitted_R = num_tokens_S[slot_R] - self.length_R
        at_RC = np.minimum(self.length_R[:, None] + index_C, tokens_SL.shape[1] - 1)
        is_other_RC = tokens_SL[slot_R[:, None], at_RC] != self.token_RC
        is_other_RC &= index_C < num_emitted_R[:, None]
        left_R: Ints = (self.token_RC >= 0).sum(axis=1, dtype=np.int32) - num_emitted_R
        is_taken_R = (num_emitted_R >= 0) & (left_R >= self.least_R) & ~is_other_RC.any(axis=1)
        taken_R: Ints = left_R * is_taken_R
        return taken_R


@dataclass(frozen=True, slots=True)
class StepSize:
    """How much a step computes: it decides shapes, padding, draft passes and the CUDA graph.

    It is the size of one plan, or the common size of the plans of all replicas.
    """

    tokens: int = 0  # entries of the target's pass
    draft_tokens: int = 0  # entries of the first pass of a separate draft model
    rows: int = 0
    k: int = 0
    sampling_mode: int = 0  # a sampling.verify.SamplingMode; 0: all rows are greedy
    is_uniform: bool = True  # every row decodes or verifies
    has_graph: bool = True  # no row needs an eager step
    is_late: bool = False  # some row's masks arrive through bind(): A and B run apart
    draft_k: int = 0  # drafts that the drafter proposes
    has_host_drafts: bool = False  # some row may verify drafts that the drafter has not made

    @classmethod
    def joined(cls, sizes: Sequence[StepSize]) -> StepSize:
        """The smallest size with room for all of them."""
        return cls(
            tokens=max(x.tokens for x in sizes),
            draft_tokens=max(x.draft_tokens for x in sizes),
            rows=max(x.rows for x in sizes),
            k=max(x.k for x in sizes),
            draft_k=max(x.draft_k for x in sizes),
            sampling_mode=max(x.sampling_mode for x in sizes),
            is_uniform=all(x.is_uniform for x in sizes),
            has_graph=all(x.has_graph for x in sizes),
            is_late=any(x.is_late for x in sizes),
            has_host_drafts=any(x.has_host_drafts for x in sizes),
        )

    def packed(self) -> list[int]:
        return [int(getattr(self, name)) for name in self.__slots__]

    @classmethod
    def unpacked(cls, numbers: Sequence[int]) -> StepSize:
        tokens, draft_tokens, rows, k, mode = numbers[:5]
        is_uniform, has_graph, is_late = map(bool, numbers[5:8])
        sizes = (tokens, draft_tokens, rows, k, mode)
        return cls(*sizes, is_uniform, has_graph, is_late, numbers[8], bool(numbers[9]))


@dataclass(slots=True)
class StepPlan:
    """One device step. It has no token of a running request: those are on the device.

    Row i computes `query_len_B[i]` positions of slot `slot_B[i]`, from the slot's num_computed
    on. Prefill rows: the chunk length. Verify and decode rows: 1 + k_B[i] (last
    committed token and k_i drafts). Rows are ordered: sampling rows of width 1 + k first, then
    prefill chunks.
    """

    step: int  # counts from 1, no gaps
    k: int  # the largest k_B or more
    uid_B: Longs  # the request each row belongs to
    slot_B: Ints
    query_len_B: Ints
    k_B: Ints  # drafts verified by the row; 0 for prefill chunks
    samples_B: Bools  # False for a non-final prefill chunk
    length_bound_B: Ints  # >= the row's true KV length after this step
    admissions: Sequence[SlotInit] = ()
    page_appends: PageAppends | None = None
    late_B: Bools | None = None  # rows whose token masks arrive through bind()
    host_drafts: HostDrafts | None = None
    # Drafts that the drafter proposes for each sampling row, if it can make that many; None: k.
    draft_k: int | None = None
    # The same by row, for devices without fixed shapes; None: draft_k for each.
    draft_k_B: Ints | None = None
    marks: SnapshotMarks | None = None  # None: the step takes no snapshot
    agreed: StepSize | None = None  # the common size of all replicas in lock step
    # A device may read this number while it computes. If it is not 0, all requests of the step were
    # aborted, and the step may end early.
    unwanted: Longs = field(default_factory=lambda: np.zeros(1, np.int64))

    @property
    def num_rows(self) -> int:
        return len(self.slot_B)

    @property
    def num_tokens(self) -> int:
        return int(self.query_len_B.sum())

    @property
    def draft_len_B(self) -> Ints:
        """The most entries of each row in the first pass of a draft model: what the step computes
        and the token that it samples. Of drafts that the model made, only the last is new to it."""
        was_fed_B = self.query_len_B == self.k_B + 1
        if self.host_drafts is not None:
            was_fed_B[self.host_drafts.row_R] = False
        length_B: Ints = np.where(was_fed_B, 2, self.query_len_B + self.samples_B)
        return length_B

    def step_size(self) -> StepSize:
        """The size of this plan alone; a runner adds the sampling mode and `has_graph`.

        Host drafts may make a few windows wider than all others. Such rows are packed, as rows of
        a step with prompt chunks are, if a common width would more than double the tokens.
        """
        is_decode_B = self.query_len_B == self.k_B + 1
        is_ragged = self.host_drafts is not None and (
            self.num_rows * (self.k + 1) > 2 * self.num_tokens
        )
        return StepSize(
            tokens=self.num_tokens,
            draft_tokens=int(self.draft_len_B.sum()),
            rows=self.num_rows,
            k=self.k,
            draft_k=self.k if self.draft_k is None else self.draft_k,
            is_uniform=bool(is_decode_B.all()) and not is_ragged,
            is_late=self.late_B is not None,
            has_host_drafts=self.host_drafts is not None,
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
    """What a step did, row by row in the order of its plan, from the device to the front.

    `uid_B` selects the rows: the scheduler drops rows whose requests have ended.
    """

    step: int
    uid_B: Longs  # the row's request, or NO_REQUEST
    count_B: Ints  # tokens emitted; 0 for a non-final chunk or a row that was already done
    token_BW: Ints  # emitted tokens, -1 after count
    done_B: Ints  # request.Done codes
    num_drafts_B: Ints  # real drafts (not -1) that were verified
    num_accepted_B: Ints  # drafts among the emitted tokens; never the bonus
    num_forced_B: Ints | None = None  # forced tokens among those; None: not counted yet
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # for prompt positions computed by this step
    draft_BK: Ints | None = None  # the drafts proposed for the next step; only for late plans
    mask_wait_s: float = -1.0  # device time between A and B of a late plan; -1: another plan
    # On the clock time.perf_counter of the engine process. The end includes drafting. It is final
    # when the next result has come, or when nothing runs.
    device_start_s: float = 0.0
    device_end_s: float = 0.0

    @classmethod
    def without_rows(cls, step: int) -> StepResult:
        none_B = np.empty(0, np.int32)
        no_tokens_BW = np.empty((0, 1), np.int32)
        return cls(step, np.empty(0, np.int64), none_B, no_tokens_BW, none_B, none_B, none_B)

    def drop(self, rows: list[int]) -> None:
        """Clear rows. They keep their places, so that row numbers stay those of the plan."""
        self.uid_B = self.uid_B.copy()  # the plan's
        self.uid_B[rows] = NO_REQUEST
        for column_B in (self.count_B, self.done_B, self.num_drafts_B, self.num_accepted_B):
            column_B[rows] = 0
        if self.logprobs:
            self.logprobs = [entry for entry in self.logprobs if entry.row not in rows]


class InFlightStep(Protocol):
    """A launched step."""

    def bind(self, late: LateMasks) -> None:
        """Deliver the masks of a plan with late rows, exactly once."""

    def is_over(self, within_s: float) -> bool:
        """Wait up to `within_s` for the result. A device with short steps may return True at once;
        then `wait` waits."""

    def wait(self) -> StepResult:
        """Block until the result has come; drafting may go on. Raises what the device raised."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What the host needs to know of a runner. It is also sent to the front."""

    num_pages: int  # pages for requests, without the padding page
    page_size: int
    num_slots: int
    max_model_len: int
    vocab_size: int
    max_k: int  # 0 without a drafter
    draft_lookahead: int  # extra positions past the window whose KV the drafter writes
    max_host_drafts: int = 0  # drafts that the host may propose for a row; 0: none
    draft_methods: tuple[str, ...] = ()  # the loaded drafters
    draft_max_len: int | None = None  # tokens of a request from which on it gets no drafts
    # The drafter reads the target's features: a position's KV also depends on the next token.
    draft_reads_features: bool = False
    # Positions before the newest token that the drafter may compute in a later step. In rows that
    # the device ends it has computed all.
    max_late_drafter_rows: int = 0
    # Last positions, the present one included, that any layer may read; None: all.
    kv_window: int | None = None
    # Some layers have a recurrent state: a prefix hit needs a snapshot of exactly its length.
    is_recurrent: bool = False
    num_snapshots: int = 0  # entries 0 ... num_snapshots - 1
    # Steps have fixed shapes: a row costs the same whether the drafter found drafts or not.
    pays_for_missing_drafts: bool = False
    # Most pages that a step can append to a running row; None: any number.
    max_row_appends: int | None = None
    max_num_batched_tokens: int = 2048  # default if the configuration has none
    model_name: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    weights_bytes: int = 0
    kv_cache_dtype: str = "float32"
    kv_cache_bytes: int = 0
    startup_s: dict[str, float] = field(default_factory=dict)  # by stage, measured by the front

    @property
    def window_k(self) -> int:
        """The most drafts that a row verifies, whoever proposes them."""
        return max(self.max_k, self.max_host_drafts)

    @property
    def drafter(self) -> str:
        """`ngram, K = 5`, `none`, or a lookup of the host by its name alone."""
        k = f", K = {self.max_k}" if self.max_k else ""
        return f"{' + '.join(self.draft_methods) or 'none'}{k}"


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
        """None if its steps need no other replica."""

    def step_size(self, plan: StepPlan) -> StepSize:
        """The plan's size, with the sampling mode of its rows and whether a graph can hold it."""

    def launch(self, plan: StepPlan) -> InFlightStep:
        """Queue a step and return at once."""

    @property
    def has_spare_work(self) -> bool:
        """Whether `use_spare_time` would do anything."""

    def use_spare_time(self) -> bool:
        """Nothing runs: prepare something for later steps. False: nothing is left to prepare."""

    def heartbeat(self) -> None:
        """The loop is idle: called when it goes to sleep, and now and then while it sleeps."""

    def close(self) -> None: ...
