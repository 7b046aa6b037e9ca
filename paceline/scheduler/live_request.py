"""The scheduler's record of one request, from `Scheduler.add` until the request ends.

Plain data; the allocator and the scheduler change it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from paceline.request import EngineRequest
from paceline.scheduler.events import TokenConstraint
from paceline.step import Ints, TokenLogprobs

Key = tuple[int, int]  # (priority, uid): the smaller key runs first


@dataclass(slots=True, eq=False)
class LiveRequest:
    """`slot` is -1 while the request waits."""

    request: EngineRequest
    key: Key
    # The prompt; after a preemption also the output so far. While the request runs, new tokens go
    # to SlotTable.tokens_SL only.
    tokens: Ints
    max_len: int
    constraint: TokenConstraint | None = None
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    most_pages: int = 0  # pages of the longest sequence that this request can become
    num_freed: int = 0  # leading pages given back because the sliding window has passed them
    num_launched: int = 0  # prompt positions that launched steps compute, or that were cached
    num_hashed: int = 0  # leading pages registered in the prefix cache
    chain: int = 0  # the prefix cache's chain value after those pages
    # Recurrent models, set by the last lookup: the snapshot to continue from (-1: none), and the
    # length of the known pages, which may be more than the snapshot's.
    snapshot: int = -1
    num_matched: int = 0
    tail_chain: int = 0  # names the snapshot that the next one of the output replaces; 0: none
    # After a preemption: rows launched before it whose results have not arrived, and the tokens
    # that have. The request is not resumed before all of them are here.
    num_draining: int = 0
    drained: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)  # current drafts; kept only for constraints
    # prompt_logprobs: the first position of each chunk in flight, by step, and how many positions
    # have been delivered.
    chunk_starts: dict[int, int] = field(default_factory=dict)
    num_prompt_logprobs: int = 0

    @property
    def uid(self) -> int:
        return self.request.uid

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.params.prompt_logprobs is not None

    def new_prompt_logprobs(self, step: int, entry: TokenLogprobs) -> TokenLogprobs | None:
        """The entry without prompt positions that were delivered before: after a preemption a
        prompt is computed again. None if nothing is left.

        Entry j of a chunk that starts at position s is about prompt token s + 1 + j.
        """
        start, count = self.chunk_starts.pop(step), len(entry.rank)
        known = min(max(self.num_prompt_logprobs - start, 0), count)
        self.num_prompt_logprobs = max(self.num_prompt_logprobs, start + count)
        if known == count:
            return None
        return replace(
            entry, ids=entry.ids[known:], values=entry.values[known:], rank=entry.rank[known:]
        )

    def absorb_drained(self) -> None:
        """Append the tokens that arrived after the preemption, so that the request can resume."""
        assert self.num_draining == 0
        if self.drained:
            self.tokens = np.concatenate([self.tokens, np.asarray(self.drained, np.int32)])
            self.drained.clear()
