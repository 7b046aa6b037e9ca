"""What a request asks of its output, as the text of a llguidance grammar.

Raises InvalidGrammar. Sizes and depth are checked here, before any work on the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.engine.grammar_schema import prepared_schema
from paceline.engine.structural_tags import structural_tag_grammar, with_ascii_classes
from paceline.errors import InvalidGrammar, cut
from paceline.request import StructuredOutputsParams

MAX_SOURCE_BYTES = 1 << 17
MAX_DEPTH = 64  # of a JSON schema or a structural tag
MAX_CHOICES = 4096


def grammar_text(params: StructuredOutputsParams, specials: Mapping[str, int]) -> str:
    """The grammar of `params`, without `after_token_ids`. Needs llguidance.

    `specials` maps the special tokens of the model to their ids.
    """
    from llguidance import LLMatcher, grammar_from

    _check_size(params)
    kind = params.kind
    if kind in ("json", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else _parsed(params.json, "json")
        return json.dumps({"grammars": [{"json_schema": prepared_schema(schema, params)}]})
    if kind == "regex":
        assert params.regex is not None
        return LLMatcher.grammar_from_regex(with_ascii_classes(params.regex))
    if kind == "choice":
        assert params.choice is not None
        if len(params.choice) > MAX_CHOICES:
            raise InvalidGrammar(
                f"choice has {len(params.choice)} entries; the limit is {MAX_CHOICES}."
            )
        # Lark writes strings as JSON does.
        return "start: " + " | ".join(json.dumps(choice) for choice in params.choice)
    if kind == "grammar":
        assert params.grammar is not None
        try:
            return grammar_from("grammar", params.grammar)
        except ValueError as error:
            raise InvalidGrammar(f"grammar is neither Lark nor GBNF: {cut(str(error))}") from None
    tag = _parsed(params.structural_tag, "structural_tag")
    return structural_tag_grammar(tag, params, specials)


def _parsed(value: str | Mapping[str, Any] | None, name: str) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidGrammar(f"{name} is not JSON: {cut(str(error))}.") from None
    _check_depth(value)
    return value


def _check_size(params: StructuredOutputsParams) -> None:
    size = len(json.dumps(params.as_dict()))
    if size > MAX_SOURCE_BYTES:
        raise InvalidGrammar(
            f"structured_outputs has {size} bytes of JSON; the limit is {MAX_SOURCE_BYTES}."
        )


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidGrammar(f"structured_outputs is nested more than {MAX_DEPTH} levels deep.")
        inner: list[Any] = []
        for entry in level:
            if isinstance(entry, Mapping):
                inner += entry.values()
            elif isinstance(entry, list | tuple):
                inner += entry
        level = inner
