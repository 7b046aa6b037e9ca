"""Where the grammar of a chat request begins, by its template and its switches of thinking."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.fake_client import ids_of
from tests.server.test_tools import THINKING, asked_for
from tests.text.model_answers import TOOLS

OPENS = THINKING + "{% if enable_thinking is not defined %}<think>\n{% endif %}"
OFF: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.trap("F1")
@pytest.mark.parametrize(
    ("template", "fields", "opening", "after"),
    [
        (OPENS, {}, "", "</think>"),
        (THINKING, {}, "<think>", "</think>"),
        (OPENS, OFF, "", ""),
        (THINKING, OFF, "", ""),
        (THINKING, {"reasoning_effort": "none"}, "", ""),
        (THINKING.partition("{% if enable_")[0], OFF, "", ""),  # a template without the switch
    ],
    ids=["opened", "may open", "off", "off", "no effort", "off without a trace"],
)
def test_a_grammar_holds_except_while_the_model_reasons(
    template: str, fields: dict[str, Any], opening: str, after: str
) -> None:
    asked = asked_for({"chat_template": template}, tools=TOOLS, tool_choice="required", **fields)
    wanted = asked.last.params.structured_outputs
    assert wanted is not None
    assert wanted.opening_token_ids == tuple(ids_of(opening))
    assert wanted.after_token_ids == tuple(ids_of(after))
