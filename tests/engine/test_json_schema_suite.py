"""Schemas of the JSON-Schema-Test-Suite, draft 2020-12: served with valid outputs, or refused."""

from __future__ import annotations

import re

from bench.json_schema import tally
from tests.engine.grammar_driving import grammars_of, tiny_tokenizer

# Each reason names a keyword, or says that no value is valid.
NAMED = re.compile(r"keyword '|Unsatisfiable schema|patternProperty|'multipleOf'|Anchor '")


def test_schemas_of_draft_2020_12_are_served_or_refused_by_name() -> None:
    """Random tokens instead of a model, with a preference for the end."""
    tokenizer = tiny_tokenizer()
    found = tally(grammars_of(tokenizer), tokenizer, samples=3)
    assert found.num_schemas == 383
    assert found.served_share >= 0.6
    assert found.finished_share >= 0.8
    assert found.invalid == []
    assert [entry for entry in found.refused if not NAMED.search(entry[1])] == []
