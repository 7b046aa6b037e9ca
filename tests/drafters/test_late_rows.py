"""Passes that a drafter puts off for rows without drafts leave no trace in later drafts."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from paceline import LLM, SamplingParams
from paceline.drafters.autoregressive import AutoregressiveDrafter, FeatureHead
from paceline.runner.compact_rows import CompactRows
from paceline.runner.platform_cpu import MOST_LATE
from paceline.scheduler.step_cost import Choice
from tests.drafters.recording import Recording, recorded
from tests.e2e.engines import head
from tests.e2e.ladder import PROMPTS, Workshop
from tests.e2e.loop import add_all, finish, request

LONG = PROMPTS[6]  # 230 tokens
# One request drafts, two do not.
ALONE_ONLY = {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 9, 0]]}


@pytest.fixture(params=["eagle", "mtp"])
def kind(request: pytest.FixtureRequest) -> str:
    """The layers of an mtp head are fused on the CPU, those of an eagle head are not."""
    return str(request.param)


def check(seen: Recording, workshop: Workshop, kind: str) -> None:
    seen.check(workshop.target("llama"), workshop.head("llama", kind))


def test_rows_without_drafts_are_computed_together(workshop: Workshop, kind: str) -> None:
    """Passes: of the prompt, whenever there is no room for one more entry, of the last step."""
    sizes: list[int] = []
    first = FeatureHead.first

    def counted(self: FeatureHead, batch: Any, target_TD: Any) -> Any:
        sizes.append(len(batch.inputs.token_T))
        return first(self, batch, target_TD)

    params = {"num_speculative_tokens": 0, "ignore_eos": True, "max_tokens": 2 * MOST_LATE + 8}
    # The last pass comes after the last result; to close the engine waits for it.
    with (
        patch.object(FeatureHead, "first", counted),
        recorded(workshop, head(workshop, kind, 3), max_num_seqs=1) as seen,
    ):
        sizes.clear()  # of the warm-up
        seen.run([request(0, LONG[:30], **params)])
    assert sizes == [30, MOST_LATE + 1, MOST_LATE + 1, 5]


@pytest.mark.parametrize("depth", [0, 2])
def test_drafts_begin_again_after_steps_without(workshop: Workshop, kind: str, depth: int) -> None:
    """Two requests run without drafts; when the first is over, the other gets some. Then a third
    one finds the pages of both."""
    spec = head(workshop, kind, 3, **ALONE_ONLY)
    with recorded(workshop, spec, max_num_seqs=2, block_size=4, run_ahead=depth) as seen:
        lengths = (MOST_LATE + 5, MOST_LATE + 25)
        two = [request(i, LONG[9 * i :][:30], ignore_eos=True, max_tokens=n)
               for i, n in enumerate(lengths)]  # fmt: skip
        seen.run(two)
        assert seen.seen
        for uid in (0, 1):
            said = [*LONG[9 * uid :][:30], *seen.published[uid]]
            seen.run([request(10 + uid, [*said, 9], ignore_eos=True, max_tokens=6)])
        assert seen.engine.scheduler.num_hit_tokens >= 2 * 30
        check(seen, workshop, kind)


def test_pages_of_an_aborted_request_end_before_what_was_put_off(
    workshop: Workshop, kind: str
) -> None:
    spec = head(workshop, kind, 3, **ALONE_ONLY)
    with recorded(workshop, spec, max_num_seqs=2, block_size=4) as seen:
        engine = seen.engine
        params = {"ignore_eos": True, "max_tokens": 60, "num_speculative_tokens": 0}
        add_all(engine, [request(0, LONG[:30], **params)])
        while len(seen.published.get(0, ())) < MOST_LATE - 2:
            engine.turn()
        engine.scheduler.abort(0)
        finish(engine)
        said = [*LONG[:30], *seen.published[0]]
        seen.run([request(1, [*said, 9], ignore_eos=True, max_tokens=6)])
        # The prompt's pages, and none of those whose entries the head had not computed.
        assert engine.scheduler.num_hit_tokens == 28
        check(seen, workshop, kind)


def test_preempted_requests_draft_as_if_nothing_had_happened(workshop: Workshop, kind: str) -> None:
    prompts = [LONG[start : start + 50] for start in (0, 50, 100)]
    requests = [request(i, p, ignore_eos=True, max_tokens=50) for i, p in enumerate(prompts)]
    options: dict[str, Any] = {"num_gpu_blocks_override": 33, "block_size": 4, "max_model_len": 128}
    spec = head(workshop, kind, 3, **ALONE_ONLY)
    with recorded(workshop, spec, max_num_seqs=2, **options) as seen:
        seen.run(requests)
        assert seen.engine.scheduler.num_preemptions > 0
        assert seen.seen
        seen.check(workshop.target("llama"), workshop.head("llama", kind), 128)


def test_nothing_is_put_off_where_pages_go_while_a_request_runs(workshop: Workshop) -> None:
    """Pages behind a window may belong to others when the pass comes."""
    folder = workshop.head_folder("mixtral-window", "mtp")
    with recorded(workshop, head(workshop, "mtp", 3), model=folder) as seen:
        assert seen.runner.info.kv_window is not None
        assert seen.runner.info.max_late_drafter_rows == 0
    with recorded(workshop, head(workshop, "mtp", 3)) as seen:
        assert seen.runner.info.max_late_drafter_rows == MOST_LATE


def test_each_row_makes_its_own_number_of_drafts(workshop: Workshop) -> None:
    """Rows leave the passes one after the other, and no pass runs without rows."""
    widths: list[list[int]] = []
    passes: list[int] = []
    propose, next_pass = AutoregressiveDrafter.propose, CompactRows.next

    def listening(self: AutoregressiveDrafter, step: Any) -> None:
        propose(self, step)
        widths.append([step.num_drafting(j) for j in range(step.k)])

    def counted(self: CompactRows, j: int, token_B: Any, *rest: Any, **options: Any) -> Any:
        passes.append(len(token_B))
        return next_pass(self, j, token_B, *rest, **options)

    with (
        patch.object(AutoregressiveDrafter, "propose", listening),
        patch.object(CompactRows, "next", counted),
        recorded(workshop, head(workshop, "eagle", 5), max_num_seqs=4) as seen,
    ):
        seen.run([request(9, LONG[2:22], ignore_eos=True)])
        stops = {2: seen.published[9][8:9]}  # the row that wants most ends before its last token
        seen.run([request(i, LONG[i : 20 + i], ignore_eos=True, num_speculative_tokens=k,
                          stop_token_ids=stops.get(i))
                  for i, k in enumerate((2, 0, 5, 1))])  # fmt: skip
        check(seen, workshop, "eagle")
    assert [3, 2, 1, 1, 1] in widths
    assert any(w and w[-1] == 0 < w[0] for w in widths), "the others go on"
    assert min(passes) > 0


def test_a_chain_leaves_no_hole(workshop: Workshop, kind: str) -> None:
    """Rows pass between the host's drafts, the head's and none, as `auto` decides."""
    chain = {"method": ["suffix", kind], "adaptive": True, "suffix_decoding_max_cached_requests": 4}
    options: dict[str, Any] = {"max_num_seqs": 3, "block_size": 4}
    if kind == "mtp":
        options["model"] = workshop.head_folder("llama", "mtp")
    with recorded(workshop, head(workshop, kind, 3) | chain, **options) as seen:
        lengths = seen.engine.scheduler._draft_lengths
        for turn in range(2):  # the answers to the second three are known
            seen.run([request(3 * turn + i, LONG[9 * i :][:30], ignore_eos=True, max_tokens=60)
                      for i in range(3)])  # fmt: skip
            lengths._rank.decode = Choice(3, 0.0, 1.0)  # the head drafts again
        check(seen, workshop, kind)


def draft_tokens_of_itself(folder: str, **options: Any) -> tuple[int, int]:
    """The target is its own draft model: (drafts, accepted drafts) of the second request, which
    begins as the first one does. The first one gets no drafts."""
    spec = {"method": "draft_model", "model": folder, "num_speculative_tokens": 3}
    prompts = [LONG[:32], LONG[:45]]
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, num_speculative_tokens=k)
        for k in (0, 3)
    ]
    with LLM(
        model=folder,
        speculative_config={**spec, "adaptive": False},
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=4,
        engine_in_process=True,
        **options,
    ) as llm:
        llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
        stats = llm.get_metrics()
        return stats.num_draft_tokens, stats.num_accepted_tokens


def test_the_last_token_of_a_prompt_is_not_put_off(workshop: Workshop) -> None:
    """It is a chunk of its own, in whose step the other request finds the page that it ends."""
    drafts, accepted = draft_tokens_of_itself(
        workshop.target_folder("llama"), max_num_batched_tokens=31, max_num_seqs=2
    )
    assert drafts > 20
    assert drafts - accepted <= 3, "all but those past the last token"
