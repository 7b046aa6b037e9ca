"""A draft model drafts what it would say alone after the committed tokens, by transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from paceline.scheduler.continuations import Continuations
from paceline.scheduler.inflight import Flight
from tests.drafters.recording import LLAMA_LIMIT, Recording, recorded
from tests.e2e.engines import draft_model
from tests.e2e.ladder import PROMPTS, Workshop
from tests.e2e.loop import request
from tests.e2e.test_forced import Stairs

Check = Callable[[Recording], None]


@pytest.fixture(scope="module")
def check(workshop: Workshop) -> Check:
    """Compares every recorded draft with greedy decoding of the draft model alone."""
    import transformers

    folder = workshop.draft_folder("llama")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()

    def drafts(tokens: list[int], k: int) -> list[int]:
        ids = list(tokens)
        with torch.no_grad():
            while len(ids) < len(tokens) + k:
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(tokens) :]

    return lambda recording: recording.compare(drafts, LLAMA_LIMIT)


@pytest.mark.parametrize("k", [1, 3])
def test_drafts_equal_greedy_decoding_of_the_draft_model(
    workshop: Workshop, check: Check, k: int
) -> None:
    with recorded(workshop, draft_model(workshop, k), max_num_batched_tokens=17) as seen:
        seen.run([request(i, p, max_tokens=10) for i, p in enumerate(PROMPTS)])
        check(seen)


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("host", ["forced", "suffix"])
def test_accepted_drafts_of_the_host_leave_no_hole(
    workshop: Workshop, check: Check, host: str, is_fixed: bool
) -> None:
    """The draft model has not seen them: its next pass computes all of them, not the last two."""
    spec = draft_model(workshop, 2)
    if host == "suffix":
        past = {"suffix_decoding_max_cached_requests": 4}
        spec |= {"method": ["suffix", "draft_model"], **past}
    widths: list[int] = []
    taken = Continuations.taken

    def counted(self: Continuations, flight: Flight) -> Any:
        widths.extend(map(len, self.taken_tokens(flight).values()))
        return taken(self, flight)

    grammars = {i: Stairs(6) for i in range(6)} if host == "forced" else {}
    prompts = PROMPTS[2:5] * 2  # the answers to the second three are known
    with (
        recorded(workshop, spec, is_fixed=is_fixed, max_num_seqs=3, block_size=4) as seen,
        patch.object(Continuations, "taken", counted),
    ):
        requests = [request(i, p, ignore_eos=True, max_tokens=24) for i, p in enumerate(prompts)]
        seen.run(requests, grammars)
        check(seen)
    assert max(widths) > 3


@pytest.mark.parametrize("ending", [{"max_tokens": 1}, {"stop_token_ids": list(range(3, 27))}])
def test_pages_of_a_request_that_just_ended_hold_its_last_drafter_rows(
    workshop: Workshop, check: Check, ending: dict[str, Any]
) -> None:
    """It ends in prefill, or inside a window: the step that ends it still runs the first pass."""
    with recorded(workshop, draft_model(workshop, 2), max_num_seqs=1, block_size=1) as seen:
        for uid, prompt in enumerate((PROMPTS[4], PROMPTS[11])):
            seen.run([request(uid, prompt, **ending)])
            said = [*prompt, *seen.published[uid]]
            seen.run([request(10 + uid, [*said, 7], ignore_eos=True, max_tokens=6)])
        hits = seen.engine.scheduler.num_hit_tokens
        check(seen)
    assert hits == sum(len(s) - 1 for s in seen.sequences()[::2])
