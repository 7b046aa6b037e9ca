"""Structural tags (the format of vLLM and xgrammar) as Lark grammars for llguidance.

A tag is text between two fixed strings. Strings that are special tokens of the model are written
as tokens, because text never matches a special token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.engine.grammar_schema import prepared_schema
from paceline.errors import InvalidGrammar, shown
from paceline.request import StructuredOutputsParams

# Fields of each format: required, then optional.
_COUNTS = {"at_least_one", "stop_after_first"}
_FIELDS: Mapping[str, tuple[set[str], set[str]]] = {
    "const_string": ({"value"}, set()),
    "json_schema": ({"json_schema"}, set()),
    "regex": ({"pattern"}, set()),
    "any_text": (set(), set()),
    "sequence": ({"elements"}, set()),
    "or": ({"elements"}, set()),
    "tag": ({"begin", "content", "end"}, set()),
    "triggered_tags": ({"triggers", "tags"}, _COUNTS),
    "tags_with_separator": ({"tags", "separator"}, _COUNTS),
}
_TEXT = "/(?s:.*)/"
ENDS_OUTPUT = -1  # as the id of a special token that ends the output
_ASCII_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}

Format = Mapping[str, Any]
Ends = tuple[str, ...]  # the strings of which one follows; empty: nothing follows


def structural_tag_grammar(
    tag: Any, params: StructuredOutputsParams, specials: Mapping[str, int]
) -> str:
    """`specials` maps the special tokens of the model to their ids or to ENDS_OUTPUT."""
    if not isinstance(tag, Mapping) or tag.get("type", "structural_tag") != "structural_tag":
        raise InvalidGrammar('structural_tag must be {"type": "structural_tag", "format": {...}}.')
    known = {"type", "format"} if "format" in tag else {"type", "structures", "triggers"}
    if extra := tag.keys() - known:
        raise InvalidGrammar(f"structural_tag has no field {shown(min(extra))}.")
    writer = _Writer(params, specials)
    start = writer.write(tag["format"] if "format" in tag else _of_structures(tag), ())
    return "\n".join((f"start: {start}", *writer.rules))


def with_ascii_classes(regex: str) -> str:
    """A regex in which \\d and \\w match ASCII only, as in JSON schemas and in xgrammar. llguidance
    would allow the digits and letters of every script."""
    return re.sub(r"\\(.)", lambda m: _ASCII_CLASSES.get(m[1], m[0]), regex, flags=re.DOTALL)


def _of_structures(tag: Format) -> Format:
    """The older form: structures with begin, schema and end, and their triggers."""
    tags = []
    for entry in _list_of(tag, "structures", "structural_tag"):
        if not isinstance(entry, Mapping) or entry.keys() != {"begin", "schema", "end"}:
            raise InvalidGrammar("structural_tag.structures must have begin, schema and end each.")
        content = {"type": "json_schema", "json_schema": entry["schema"]}
        tags.append({"begin": entry["begin"], "content": content, "end": entry["end"]})
    triggers = _list_of(tag, "triggers", "structural_tag")
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Writer:
    """Lark expressions of formats. Each method returns one; `rules` has those they refer to."""

    def __init__(self, params: StructuredOutputsParams, specials: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._params = params
        self._specials = specials
        names = sorted(specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None

    def write(self, format: Any, ends: Ends) -> str:
        """The format, followed by one of `ends`."""
        kind = _kind(format)
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise InvalidGrammar(
                f"structural_tag format {shown(kind)} is not supported; supported are "
                f"{', '.join(_FIELDS)}."
            )
        _check_fields(format, kind)
        written: str = getattr(self, f"_{kind}")(format, ends)
        return written

    def _const_string(self, format: Format, ends: Ends) -> str:
        return f"{self._literal(format['value'])} {self._one_of(ends)}"

    def _json_schema(self, format: Format, ends: Ends) -> str:
        schema = json.dumps(prepared_schema(format["json_schema"], self._params))
        return f"{self._rule(f'%json {schema}')} {self._one_of(ends)}"

    def _regex(self, format: Format, ends: Ends) -> str:
        from llguidance import regex_to_lark

        if not isinstance(format["pattern"], str):
            raise InvalidGrammar("structural_tag: the pattern of a regex must be a string.")
        pattern = f"/{regex_to_lark(with_ascii_classes(format['pattern']), '')}/"
        if any(self._pieces(end)[0][1] is not None for end in ends):
            return f"{self._rule(pattern, terminal=True)} {self._one_of(ends)}"
        # One terminal, so that the pattern may match text that looks like its end.
        return self._rule(f"{pattern} {self._one_of(ends)}", terminal=True)

    def _any_text(self, format: Format, ends: Ends) -> str:
        if not ends:
            return self._rule(_TEXT, terminal=True)
        return _alternatives([self._text_until(end) for end in ends])

    def _sequence(self, format: Format, ends: Ends) -> str:
        elements = list(_list_of(format, "elements", "sequence"))
        parts = []
        while elements:
            element = elements.pop(0)
            follows: Any = elements[0] if elements else None
            if follows is None:
                parts.append(self.write(element, ends))
            elif not _is_open(element):
                parts.append(self.write(element, ()))
            elif _kind(follows) == "const_string" and "value" in follows:
                parts.append(self.write(element, (str(elements.pop(0)["value"]),)))
                parts.append(self._one_of(ends) if not elements else "")
            elif _kind(follows) == "tag":
                parts.append(self.write(element, (str(follows.get("begin")),)))
                after = () if len(elements) > 1 else ends
                parts.append(self._inside(elements.pop(0), after))
            else:
                raise InvalidGrammar(
                    f"structural_tag: {element['type']} in a sequence must be last, or be followed "
                    "by const_string or tag."
                )
        return " ".join(parts)

    def _or(self, format: Format, ends: Ends) -> str:
        elements = _list_of(format, "elements", "or")
        return _alternatives([self.write(element, ends) for element in elements])

    def _tag(self, format: Format, ends: Ends) -> str:
        return f"{self._literal(format['begin'])} {self._inside(format, ends)}"

    def _inside(self, tag: Format, ends: Ends) -> str:
        """A tag without its beginning."""
        _check_fields(tag, "tag")
        end = tag["end"]
        closings = tuple(end) if isinstance(end, list) else (end,)
        if closings == ("",):
            return self.write(tag["content"], ends)
        return f"{self.write(tag['content'], closings)} {self._one_of(ends)}"

    def _triggered_tags(self, format: Format, ends: Ends) -> str:
        """With at_least_one the output begins with a tag; text follows it."""
        if ends:
            raise InvalidGrammar("structural_tag: nothing may follow triggered_tags.")
        tags = self._tags(format, "triggered_tags")
        triggered = []
        for trigger in _list_of(format, "triggers", "triggered_tags"):
            mine = [tag for tag in tags if str(tag["begin"]).startswith(trigger)]
            rests = []
            for tag in mine:
                rest = self._literal(tag["begin"][len(trigger) :])
                rests.append(f"{rest} {self._inside(tag, ())}")
            if rests:
                triggered.append(f"{self._text_until(trigger)} {_alternatives(rests)}")
        if not all(str(t["begin"]).startswith(tuple(format["triggers"])) for t in tags):
            raise InvalidGrammar("structural_tag: each tag must begin with one of the triggers.")
        later, text = self._rule(_alternatives(triggered)), self._rule(_TEXT, terminal=True)
        first = self._rule(_alternatives([self._tag(tag, ()) for tag in tags]))
        if format.get("stop_after_first"):
            return first if format.get("at_least_one") else f"({later} | {text})"
        return f"{first if format.get('at_least_one') else ''} {later}* {text}"

    def _tags_with_separator(self, format: Format, ends: Ends) -> str:
        tags = self._tags(format, "tags_with_separator")
        one = self._rule(_alternatives([self._tag(tag, ()) for tag in tags]))
        several = f"{one} ({self._literal(format['separator'])} {one})*"
        chosen = one if format.get("stop_after_first") else several
        optional = "" if format.get("at_least_one") else "?"
        return f"({chosen}){optional} {self._one_of(ends)}"

    # ---- parts

    def _tags(self, format: Format, where: str) -> Sequence[Format]:
        tags = _list_of(format, "tags", where)
        for tag in tags:
            _check_fields(tag, "tag")
        return tags

    def _rule(self, body: str, *, terminal: bool = False, lazy: bool = False) -> str:
        name = f"{'T' if terminal else 'r'}{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _text_until(self, end: str) -> str:
        """Text up to the first `end`, with it."""
        (text, token), *rest = self._pieces(end)
        if token is not None:  # text cannot have it
            text_rule = self._rule(_TEXT, terminal=True)
            return f"{text_rule} <[{token}]> {self._literal(end[len(text) :])}"
        if rest:
            raise InvalidGrammar(
                f"structural_tag: {shown(end)} has a special token that is not at its beginning."
            )
        return self._rule(f"{self._rule(_TEXT, terminal=True)} {json.dumps(end)}", lazy=True)

    def _one_of(self, ends: Ends) -> str:
        return _alternatives([self._literal(end) for end in ends]) if ends else ""

    def _literal(self, value: Any) -> str:
        if not isinstance(value, str):
            raise InvalidGrammar(f"structural_tag: {shown(value)} must be a string.")
        pieces = self._pieces(value) if value else []
        return " ".join(json.dumps(t) if token is None else f"<[{token}]>" for t, token in pieces)

    def _pieces(self, text: Any) -> list[tuple[str, int | None]]:
        """The string cut at special tokens, as (text, token id or None)."""
        if not isinstance(text, str) or not text:
            raise InvalidGrammar(
                f"structural_tag: {shown(text)} must be a string that is not empty."
            )
        found = self._special.split(text) if self._special else [text]
        tokens = self._special.findall(text) if self._special else []
        pieces: list[tuple[str, int | None]] = [(found[0], None)] if found[0] else []
        for token, after in zip(tokens, found[1:], strict=True):
            if self._specials[token] == ENDS_OUTPUT:
                raise InvalidGrammar(
                    f"structural_tag: {shown(token)} ends the output, so it cannot be in a tag."
                )
            pieces.append((token, self._specials[token]))
            if after:
                pieces.append((after, None))
        return pieces


def _kind(format: Any) -> Any:
    return format.get("type") if isinstance(format, Mapping) else None


def _is_open(format: Any) -> bool:
    """Whether only what follows shows where the format ends."""
    kind = _kind(format)
    if kind == "tag":
        return format.get("end") in ("", [""]) and _is_open(format.get("content"))
    if kind in ("or", "sequence"):
        elements = _list_of(format, "elements", kind)
        return any(map(_is_open, elements if kind == "or" else elements[-1:]))
    return kind in ("any_text", "regex", "triggered_tags")


def _alternatives(options: Sequence[str]) -> str:
    if not options:
        raise InvalidGrammar("structural_tag: a list of formats or triggers is empty.")
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _list_of(format: Format, name: str, where: str) -> list[Any]:
    value = format.get(name)
    if not isinstance(value, list) or not value:
        raise InvalidGrammar(f"structural_tag: {name} of {where} must be a list with entries.")
    if name == "triggers" and not all(isinstance(v, str) and v for v in value):
        raise InvalidGrammar("structural_tag: triggers must be strings that are not empty.")
    return value


def _check_fields(format: Any, kind: str) -> None:
    if not isinstance(format, Mapping):
        raise InvalidGrammar(f"structural_tag: a {kind} must be an object, not {shown(format)}.")
    required, optional = _FIELDS[kind]
    if missing := required - format.keys():
        raise InvalidGrammar(f"structural_tag: {kind} needs {shown(min(missing))}.")
    if unknown := format.keys() - required - optional - {"type"}:
        raise InvalidGrammar(f"structural_tag: {kind} does not support {shown(min(unknown))}.")
