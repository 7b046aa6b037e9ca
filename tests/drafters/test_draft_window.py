"""`draft_window_size`: the draft sees its last positions only, and tokens stay the target's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.speculation import SpeculativeConfig
from tests.block_heads import random_block
from tests.drafters.recording import recorded
from tests.drafters.test_block import compare, saved
from tests.e2e.engines import draft_model, head
from tests.e2e.ladder import PROMPTS, Workshop
from tests.e2e.loop import request

WINDOW = 9


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_head_sees_the_window_and_no_more(workshop: Workshop, is_fixed: bool) -> None:
    spec = head(workshop, "eagle", 3, draft_window_size=WINDOW)
    options: dict[str, Any] = {"max_num_batched_tokens": 27, "block_size": 4, "is_fixed": is_fixed}
    plain = workshop.head("llama", "eagle")
    target: Any = workshop.target("llama")
    with recorded(workshop, spec, **options) as seen:
        seen.run([request(i, p, max_tokens=14) for i, p in enumerate(PROMPTS)])
        seen.check(target, replace(plain, config=plain.config | {"sliding_window": WINDOW}))  # type: ignore[type-var, attr-defined]
        with pytest.raises(AssertionError, match="tokens, K = 3"):
            seen.check(target, plain)  # the whole context gives other drafts
    expected = [t[:14] for t in workshop.expected("llama")]
    assert [seen.published[i] for i in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_block_drafter_sees_the_window_and_no_more(
    workshop: Workshop, tmp_path: Path, is_fixed: bool
) -> None:
    whole = random_block(workshop.target("llama"), kinds=[(0, False), (0, False)], draft_vocab=70)
    spec = saved(tmp_path, whole, 5) | {"draft_window_size": WINDOW}
    options: dict[str, Any] = {"max_num_batched_tokens": 27, "block_size": 4, "is_fixed": is_fixed}
    with recorded(workshop, spec, **options) as seen:
        seen.run([request(i, p, max_tokens=8) for i, p in enumerate(PROMPTS)])
        kinds = [(WINDOW, False), (WINDOW, False)]
        compare(seen, workshop, replace(whole, kinds=kinds), spec)


@pytest.mark.parametrize("drafter", ["eagle3", "mtp", "draft_model"])
def test_no_token_changes(workshop: Workshop, drafter: str) -> None:
    spec = draft_model(workshop, 3) if drafter == "draft_model" else head(workshop, drafter, 3)
    with recorded(workshop, {**spec, "draft_window_size": WINDOW}) as seen:
        seen.run([request(i, p, max_tokens=14) for i, p in enumerate(PROMPTS)])
    expected = [t[:14] for t in workshop.expected("llama")]
    assert [seen.published[i] for i in range(len(PROMPTS))] == expected


def test_pages_go_when_they_are_behind_both_windows(workshop: Workshop) -> None:
    folder = workshop.head_folder("mixtral-window", "eagle")
    spec = {**head(workshop, "eagle", 3), "model": folder}
    options: dict[str, Any] = {"model": workshop.target_folder("mixtral-window")}
    with recorded(workshop, spec, **options) as seen:
        assert seen.runner.info.kv_window is None  # the head reads all positions
    with recorded(workshop, {**spec, "draft_window_size": 40}, **options) as seen:
        assert seen.runner.info.kv_window == 41
        seen.run([request(i, p, max_tokens=14) for i, p in enumerate(PROMPTS)])
    expected = [t[:14] for t in workshop.expected("mixtral-window")]
    assert [seen.published[i] for i in range(len(PROMPTS))] == expected


def test_what_has_no_window_is_refused_by_name(workshop: Workshop) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match="draft_window_size is for drafters that are models"):
        SpeculativeConfig.from_mapping({**ngram, "draft_window_size": 64})
    with pytest.raises(ConfigError, match="draft_window_size"):
        SpeculativeConfig.from_mapping({**head(workshop, "eagle", 3), "draft_window_size": 0})
    with pytest.raises(ConfigError, match=r"'draft_sink_size' is 4: .*leave it out"):
        SpeculativeConfig.from_mapping({**head(workshop, "eagle", 3), "draft_sink_size": 4})
    spec = head(workshop, "mtp", 3, draft_window_size=64)
    folder = workshop.head_folder("deepseek-v3", "mtp")
    with (
        pytest.raises(ConfigError, match="latent attention"),
        recorded(workshop, spec, model=folder),
    ):
        pass
