"""Greedy tokens equal transformers' on every layout of ranks, with every drafter."""

from __future__ import annotations

import pytest

from tests.e2e.ladder import Workshop
from tests.parallel.layouts import LayoutRung, all_rungs, few_rungs, run_layout

pytestmark = pytest.mark.usefixtures("_forks")


def check(what: LayoutRung, workshop: Workshop) -> None:
    tokens, seen = run_layout(what, workshop)
    assert tokens == workshop.expected(what.rung.family)
    if what.rung.drafter != "none" and what.rung.request_k == "all":
        assert 0 < seen["accepted"] < seen["drafted"], "nothing was proven"


@pytest.mark.trap("C1", "C15", "L-4", "L-7", "I2", "I3", "I5", "I7", "I8")
@pytest.mark.parametrize("what", few_rungs(), ids=str)
def test_greedy_tokens_equal_the_reference(what: LayoutRung, workshop: Workshop) -> None:
    check(what, workshop)


@pytest.mark.slow
@pytest.mark.parametrize("what", all_rungs(), ids=str)
def test_greedy_tokens_equal_the_reference_everywhere(what: LayoutRung, workshop: Workshop) -> None:
    check(what, workshop)
