"""The only way from device to host: the results of a step as numpy arrays.

The end of a step writes its results into a ring of host memory, and then the step's number.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.errors import EngineDead
from paceline.kernels.logprobs.reference import LogprobResults
from paceline.kernels.step_rows import RESULT_TOKENS, Ring
from paceline.step import Ints, StepPlan, StepResult, TokenLogprobs

_NAP_S = 5e-6  # lets other threads have the interpreter
_CHECK_EVERY_S = 0.5


class RingReader:
    """Waits for stamps and reads the entries they stand for.

    `is_idle` says whether the device has finished everything. It gets the seconds waited so far;
    it raises if the device failed or if that is too long.
    """

    def __init__(
        self, ring: Ring, logprobs: LogprobResults, is_idle: Callable[[float], bool]
    ) -> None:
        self._stamp_E = ring.stamp_E.numpy()
        self._result_EBR = ring.result_EBR.numpy()
        self._draft_stamp_E = ring.draft_stamp_E.numpy()
        self._draft_EBK = ring.draft_EBK.numpy()
        self._time_E2 = ring.time_E2.numpy()
        self._late_time_E2 = ring.late_time_E2.numpy()
        self._logprobs = (
            logprobs.ids_EBWT.numpy(),
            logprobs.values_EBWT.numpy(),
            logprobs.rank_EBW.numpy(),
        )
        self._is_idle = is_idle
        self.clock_offset_s = 0.0  # host time minus device time

    def wait(self, entry: int, step: int) -> None:
        """Return when the results of `step` are there."""
        self._wait(self._stamp_E, entry, step)

    def drafts(self, entry: int, plan: StepPlan) -> Ints:
        """The drafts of a step that publishes them, by plan row; -1: none. Waits for the drafter.

        A step of fixed shapes may propose more than its plan asks for, and the next one may verify
        them.
        """
        self._wait(self._draft_stamp_E, entry, plan.step)
        drafts_BK: Ints = self._draft_EBK[entry, : plan.num_rows].copy()
        return drafts_BK

    def _wait(self, stamp_E: Ints, entry: int, step: int) -> None:
        began_s = time.perf_counter()
        check_s = began_s + _CHECK_EVERY_S
        while stamp_E[entry] != step:
            time.sleep(_NAP_S)
            if (now_s := time.perf_counter()) > check_s:
                if self._is_idle(now_s - began_s) and stamp_E[entry] != step:
                    raise EngineDead(f"the device finished without the results of step {step}")
                check_s = now_s + _CHECK_EVERY_S

    def result(self, entry: int, plan: StepPlan) -> StepResult:
        """Rows in the order of the plan. The entry may be reused after this."""
        rows_BR = self._result_EBR[entry, : plan.num_rows].copy()
        return StepResult(
            step=plan.step,
            uid_B=plan.uid_B,
            count_B=rows_BR[:, 0],
            token_BW=rows_BR[:, RESULT_TOKENS : RESULT_TOKENS + plan.k + 1],
            done_B=rows_BR[:, 1],
            num_drafts_B=rows_BR[:, 2],
            num_accepted_B=rows_BR[:, 3],
            device_start_s=self.start_s(entry),
            device_end_s=self.start_s(entry),
        )

    def logprobs(
        self, entry: int, result: StepResult, asked: list[tuple[int, int]]
    ) -> list[TokenLogprobs]:
        """Of (plan row, number of top tokens) pairs."""
        ids_EBWT, values_EBWT, rank_EBW = self._logprobs
        found = []
        for row, top in asked:
            count = int(result.count_B[row])
            place = (entry, row, slice(0, count))
            found.append(
                TokenLogprobs(
                    row=row,
                    ids=ids_EBWT[place][:, : 1 + top].copy(),
                    values=values_EBWT[place][:, : 1 + top].copy(),
                    rank=rank_EBW[place].copy(),
                )
            )
        return found

    def mask_wait_s(self, entry: int) -> float:
        """How long B waited for its masks after A."""
        ended, began = self._late_time_E2[entry].tolist()
        return max(int(began) - int(ended), 0) * 1e-9

    def start_s(self, entry: int) -> float:
        return float(self._time_E2[entry, 0]) * 1e-9 + self.clock_offset_s

    def end_s(self, entry: int) -> float:
        """When the step ended, drafting included: known once a later step has begun."""
        return float(self._time_E2[entry, 1]) * 1e-9 + self.clock_offset_s
