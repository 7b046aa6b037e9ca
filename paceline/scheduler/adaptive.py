"""How many drafts each request verifies: k by slot, from what became of earlier drafts.

One table of survival by request and position, and two rules that read it. "adaptive" (a given K):
k follows the request's own acceptance. "auto": the drafts of the whole batch are ranked by survival
and admitted while they pay for the time that they add (step_cost.py).

Decides before a step is launched, from committed results only. No rule sees a draft, so none
changes the distribution of tokens. Rejected drafts lower k. Missing drafts (the drafter proposed
none) lower k only if steps have fixed shapes, because then the row was computed for them all the
same.

Shape letters: S slots, B rows of a step, K drafts.
"""

from __future__ import annotations

import numpy as np

from paceline.scheduler.inflight import Rows
from paceline.scheduler.step_cost import Choice, StepCost, choose
from paceline.speculation import SpeculativeConfig
from paceline.step import Floats, Ints, RunnerInfo, StepPlan, StepResult

DECIDE_EVERY = 4  # steps
START = 0.85  # chance of a draft of a new request, if those before it are accepted
WEIGHT = 6.0  # drafts that the expectation weighs as much as
MOST = 0.98  # no draft is sure, so survival falls along a row
# A draft of the host is free until it is verified. It must survive this often at least; with "auto"
# more often where tokens cost more, up to the second number.
WORTH, MOST_WORTH = 0.1, 0.5
# "adaptive"
FADE = 0.5, 1.0  # counts are multiplied by this each time k is decided: many counts, and few
STRETCH = 1.5  # verify more drafts than are accepted on average, so that k can grow
COLD = 0.1  # below this acceptance rate a request stops drafting
# The same for n-grams beside suffixes: where those find nothing good, n-grams are mostly wrong.
COLD_BESIDE_SUFFIXES = 0.4
# Requests that stopped try again in the first two steps of every PROBE_PERIOD: the first step
# proposes, the second verifies. All of them try in the same steps, so that the drafter can be left
# out of the others.
PROBE_PERIOD = 32
PROBE_K = 2
# "auto"
AUTO_FADE = 0.95, 0.98
HOST_WEIGHT, HOST_FADE = 2.0, 0.9  # steps that the expectation weighs as much as; of older steps
AUTO_PERIOD = 64
AUTO_PROBE_K = 1
AUTO_TURNS = 4  # in a batch of 8 or more, a request that stopped tries in each fourth period
# One step without drafts in each period: what drafts cost is the difference.
REST_AT = AUTO_PERIOD // 2


class Survival:
    """Chance that a draft and all before it are accepted, by slot and position.

    A request without many results is expected to be like the others (`is_pooled`), or like START;
    a position without many like the request's other positions.
    """

    def __init__(self, rows: int, max_k: int, *, is_pooled: bool) -> None:
        self._reached_SK = np.zeros((rows, max_k), np.float32)  # drafts behind accepted ones
        self._accepted_SK = np.zeros((rows, max_k), np.float32)
        self._step_K = np.arange(max_k)
        self._is_pooled = is_pooled
        self._pool = np.array([START, 1.0]) * WEIGHT  # accepted and reached

    def start(self, slot: int) -> None:
        self._reached_SK[slot] = self._accepted_SK[slot] = 0.0

    def learn(self, slots: Rows, drafted_B: Ints, accepted_B: Ints) -> None:
        accepted_BK = self._step_K < accepted_B[:, None]
        # The first draft that was rejected was reached, those behind it were not.
        reached_BK = self._step_K < np.minimum(drafted_B, accepted_B + 1)[:, None]
        self._accepted_SK[slots] += accepted_BK
        self._reached_SK[slots] += reached_BK
        if self._is_pooled:
            self._pool += accepted_BK.sum(), reached_BK.sum()

    def fade(self, many: float, few: float = 1.0) -> None:
        """Older counts matter less. Few counts fade less or not at all: a single draft after a
        long pause must not decide k alone."""
        is_many_S = self._reached_SK.sum(axis=1) > WEIGHT
        scale_S1 = np.where(is_many_S, np.float32(many), np.float32(few))[:, None]
        self._reached_SK *= scale_S1
        self._accepted_SK *= scale_S1
        if self._pool[1] > WEIGHT:
            self._pool *= many

    def of(self, slots: Rows | slice) -> Floats:
        reached_SK, accepted_SK = self._reached_SK[slots], self._accepted_SK[slots]
        own_S = accepted_SK.sum(axis=1) + WEIGHT * self.expected
        own_S /= reached_SK.sum(axis=1) + WEIGHT
        chance_SK = (accepted_SK + WEIGHT * own_S[:, None]) / (reached_SK + WEIGHT)
        survival_SK: Floats = np.minimum(chance_SK, MOST, dtype=np.float32).cumprod(axis=1)
        return survival_SK

    @property
    def expected(self) -> float:
        """Chance of a draft of a request of which nothing is known."""
        return float(self._pool[0] / self._pool[1])


class _HostShare:
    """Drafts of the host that a step of each slot verifies and accepts. A new request is expected
    to be like the others."""

    def __init__(self, rows: int) -> None:
        self._sum_S3 = np.zeros((rows, 3))  # steps, verified, accepted
        self._pool_3 = np.array([HOST_WEIGHT, 0.0, 0.0])

    def start(self, slot: int) -> None:
        self._sum_S3[slot] = self._pool_3 * (HOST_WEIGHT / self._pool_3[0])

    def learn(self, slots: Rows, host_rows: Rows, result: StepResult) -> None:
        self._sum_S3[slots, 0] += 1.0
        self._pool_3[0] += len(slots)
        if len(host_rows):
            new_R2 = np.stack([result.num_drafts_B, result.num_accepted_B], 1)[host_rows]
            self._sum_S3[slots[host_rows], 1:] += new_R2
            self._pool_3[1:] += new_R2.sum(axis=0)

    def fade(self) -> None:
        self._sum_S3 *= HOST_FADE
        if self._pool_3[0] > 16 * HOST_WEIGHT:
            self._pool_3 *= HOST_FADE

    def of(self, slots: Rows) -> tuple[float, float]:
        """Verified and accepted drafts of a step that has these rows."""
        sum_R3 = self._sum_S3[slots]
        verified, accepted = (sum_R3[:, 1:] / np.maximum(sum_R3[:, :1], 1.0)).sum(axis=0).tolist()
        return verified, accepted


class DraftLengths:
    """k by slot."""

    def __init__(self, info: RunnerInfo, speculative: SpeculativeConfig | None) -> None:
        self.max_k = info.max_k
        self._counts_missing = info.pays_for_missing_drafts
        is_on = info.max_k > 0 and speculative is not None
        self.is_auto = is_on and speculative is not None and speculative.is_auto
        self._is_adaptive = self.is_auto or (
            is_on
            and speculative is not None
            and speculative.adaptive
            # Synthetic acceptance does not depend on the drafts, and has its mean over all K.
            and speculative.rejection_sample_method != "synthetic"
        )
        methods = speculative and (speculative.host_method, speculative.method)
        self._cold = COLD_BESIDE_SUFFIXES if methods == ("suffix", "ngram") else COLD
        self._has_lookups = speculative is not None and speculative.host_method is not None
        # Whether drafts are counted: to decide k, or to choose between drafter and host.
        self.learns = self._is_adaptive or (is_on and self._has_lookups)
        self._cap_S = np.zeros(info.num_slots, np.int32)  # the request's own limit
        self._k_S = np.zeros(info.num_slots, np.int32)
        self._mixed_k_S = self._k_S  # in steps with prompt chunks; "auto" only
        # With the spare row: see SlotTable.
        self._survival = Survival(info.num_slots + 1, info.max_k, is_pooled=self.is_auto)
        # Chance that the next drafts of the drafter are verified, and not those of the host.
        self.use_S = np.ones(info.num_slots, np.float32)
        self._cap_by_rows = _cap_by_rows(speculative, info) if is_on else None
        if self.is_auto:
            self._rank = _Ranking(info, speculative)
            self._mixed_k_S = self._k_S.copy()
        self._host = _HostShare(info.num_slots + 1)

    def start(self, slot: int, wanted: int | None) -> None:
        """A request takes the slot."""
        cap = self.max_k if wanted is None else min(wanted, self.max_k)
        self._cap_S[slot] = self._k_S[slot] = self._mixed_k_S[slot] = cap
        self.use_S[slot] = 1.0
        self._host.start(slot)
        if self.learns:
            self._survival.start(slot)
        if self.is_auto:
            self._set_auto(np.array([slot]))

    def expected(self, slots: Rows) -> Floats:
        """The drafter's drafts that a step of each slot accepts on average."""
        is_drafted_RK = np.arange(self.max_k) < self._k_S[slots][:, None]
        expected_R: Floats = (self._survival.of(slots) * is_drafted_RK).sum(axis=1)
        return expected_R

    def proposed(self, wanted_B: Ints, slots: Rows) -> Ints:
        """Drafts that the drafter proposes for these slots, which could verify `wanted_B`: none
        that the host's will probably replace, with "auto" none that would not pay."""
        if not self._has_lookups:
            return wanted_B
        use_B = self.use_S.take(slots)
        if not self.is_auto:
            return wanted_B * (use_B >= 0.5)
        at = (use_B < 1.0).nonzero()[0]
        if len(at):
            survival_RK = self._survival.of(slots[at]) * use_B[at, None]
            wanted_B = wanted_B.copy()
            wanted_B[at] = np.minimum(wanted_B[at], self._rank.decode.of(survival_RK))
        return wanted_B

    @property
    def least_worth(self) -> float:
        """A draft of the host that survives less often costs more than it brings."""
        return max(WORTH, self._rank.worth) if self.is_auto else WORTH

    def wanted(self, step: int, num_rows: int = 1, *, is_mixed: bool = False) -> Ints:
        """k of each slot for this step of `num_rows` rows. `is_mixed`: it has prompt chunks."""
        k_S = self._mixed_k_S if is_mixed else self._k_S
        if self.is_auto:
            k_S = self._tried(k_S, step, num_rows)
        elif self._is_adaptive and step % PROBE_PERIOD < 2:
            k_S = np.maximum(k_S, np.minimum(self._cap_S, PROBE_K))
        if self._cap_by_rows is not None:
            k_S = np.minimum(k_S, self._cap_by_rows[num_rows])
        return k_S

    def _tried(self, k_S: Ints, step: int, num_rows: int) -> Ints:
        """k in steps that find out about other k: of requests that stopped, and of steps."""
        period, at = divmod(step, AUTO_PERIOD)
        if at == REST_AT:
            return np.zeros_like(k_S)
        if at < 2:
            turns = 1 if num_rows < 8 else AUTO_TURNS
            is_turn_S = (np.arange(len(k_S)) + period) % turns == 0
            k_S = np.maximum(k_S, np.where(is_turn_S, np.minimum(self._cap_S, AUTO_PROBE_K), 0))
        return k_S

    def learn(
        self, slots: Rows, k_B: Ints, result: StepResult, host_rows: Rows | None = None
    ) -> None:
        """Count the drafts that a step verified and accepted. `host_rows` verified drafts of the
        host, which say nothing about the drafter."""
        if not self.learns:
            return
        drafted_B, accepted_B = result.num_drafts_B, result.num_accepted_B
        if self._counts_missing:
            drafted_B = np.minimum(k_B, self.max_k)
        host_rows = slots[:0] if host_rows is None else host_rows
        self._host.learn(slots, host_rows, result)
        if len(host_rows):
            drafted_B, accepted_B = drafted_B.copy(), accepted_B.copy()
            drafted_B[host_rows] = accepted_B[host_rows] = 0
        if np.count_nonzero(drafted_B):
            self._survival.learn(slots, drafted_B, accepted_B)
        if result.step % DECIDE_EVERY:
            return
        if self._is_adaptive and not self.is_auto:
            self._follow_acceptance()
        self._survival.fade(*(AUTO_FADE if self.is_auto else FADE))
        self._host.fade()

    def _follow_acceptance(self) -> None:
        acceptance_S = self._survival.of(slice(-1)).mean(axis=1)
        k_S = np.ceil(acceptance_S * (STRETCH * self.max_k))
        k_S *= acceptance_S >= self._cold
        np.minimum(k_S, self._cap_S, out=self._k_S, casting="unsafe")

    # ---- "auto"

    def measure(self, plan: StepPlan, slots: Rows, result: StepResult, kv_tokens: int) -> None:
        """Learn the time of the step before this one. Now and then decide k of the rows that run
        (`slots`, which hold `kv_tokens`)."""
        if self.is_auto and self._rank.is_due(plan, result, kv_tokens):
            if len(slots):
                survival_RK = self._allowed(slots) * self.use_S[slots][:, None]
                self._rank.decide(survival_RK, kv_tokens, *self._host.of(slots))
            self._set_auto(np.arange(len(self._k_S)))

    def _allowed(self, slots: Rows) -> Floats:
        """Survival; 0 beyond a request's own limit."""
        is_allowed_RK = np.arange(self.max_k) < self._cap_S[slots][:, None]
        survival_RK: Floats = self._survival.of(slots) * is_allowed_RK
        return survival_RK

    def _set_auto(self, slots: Rows) -> None:
        survival_RK = self._allowed(slots)
        self._k_S[slots] = self._rank.decode.of(survival_RK)
        self._mixed_k_S[slots] = self._rank.mixed.of(survival_RK)


class _Ranking:
    """The last choice for steps that only decode, and for steps with prompt chunks."""

    def __init__(self, info: RunnerInfo, speculative: SpeculativeConfig | None) -> None:
        assert speculative is not None
        self._is_fixed = info.pays_for_missing_drafts
        self._ks = speculative.k_tiers if self._is_fixed else tuple(range(info.max_k + 1))
        self._full_step = info.max_num_batched_tokens
        self.cost = StepCost(is_fixed=self._is_fixed)
        self._before: tuple[StepPlan, StepResult, int] | None = None  # its end is not final
        self._num_rows = 1
        first = Survival(1, info.max_k, is_pooled=False).of(slice(None))
        self.decide(first, 0)

    def is_due(self, plan: StepPlan, result: StepResult, kv_tokens: int) -> bool:
        """Take the time of the step before. Whether to decide again."""
        if self._before is not None:
            self._take_time(*self._before)
        self._before = plan, result, kv_tokens
        rows = int(np.count_nonzero(plan.samples_B))
        has_other_size = not 0.75 <= (rows or 1) / self._num_rows <= 1.33
        return result.step % DECIDE_EVERY == 0 or has_other_size

    def _take_time(self, plan: StepPlan, result: StepResult, kv_tokens: int) -> None:
        if (result.count_B[plan.samples_B] == 0).any():
            return  # rows whose requests had ended computed nothing
        seconds = result.device_end_s - result.device_start_s
        if not self._is_fixed and plan.agreed is None:
            tokens = plan.num_tokens + int((result.num_drafts_B - plan.k_B).sum())
            k = plan.k if plan.draft_k is None else plan.draft_k
            drafts = plan.num_rows * k if plan.draft_k_B is None else int(plan.draft_k_B.sum())
            self.cost.measured(seconds, tokens, k, drafts, kv_tokens)
            return
        size = plan.agreed or plan.step_size()
        is_padded = self._is_fixed and size.is_uniform
        tokens = size.rows * (size.k + 1) if is_padded else size.tokens
        drafts = size.rows * size.draft_k
        self.cost.measured(seconds, tokens, size.draft_k, drafts, kv_tokens)

    def decide(
        self, survival_RK: Floats, kv_tokens: int, host: float = 0.0, host_accepted: float = 0.0
    ) -> None:
        """`host`: drafts of the host that a step verifies besides, and those that it accepts."""
        self._num_rows = len(survival_RK)
        base = (self._num_rows + host, self._num_rows + host_accepted)
        self.decode = choose(
            survival_RK, self.cost, self._ks, kv_tokens, base=base, is_padded=self._is_fixed
        )
        # A token is worth the time that it takes in steps that only decode. With prompts a step is
        # full, and each draft adds to it.
        self.worth = min(self.cost.of_one_more(self._num_rows) * self.decode.rate, MOST_WORTH)
        added = self.cost.of_one_more(self._full_step)
        least = max(self.decode.least, added * self.decode.rate)
        self.mixed = Choice(self.decode.k, least, self.decode.rate)


def _cap_by_rows(speculative: SpeculativeConfig | None, info: RunnerInfo) -> Ints | None:
    """The most drafts of a row by the number of rows, 0 ... num_slots."""
    ranges = speculative.num_speculative_tokens_per_batch_size if speculative else None
    if not ranges:
        return None
    caps: Ints = np.full(info.num_slots + 1, info.max_k, np.int32)
    for start, _, k in ranges:  # gaps and larger batches carry the last K
        caps[start:] = k
    return caps
