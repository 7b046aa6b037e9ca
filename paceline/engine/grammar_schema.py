"""Prepares a JSON schema for llguidance, without changing which values are valid.

Removes keywords that have no effect by draft 2020-12, and writes out dependent keywords, because
llguidance refuses schemas that have them. Other keywords are left in: llguidance serves them or
names them in its error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.request import StructuredOutputsParams

# What may stand between the parts of JSON: a blank, or a line break with indentation. Without a
# bound a small model may write line breaks until max_tokens.
WHITESPACE = r"[ \t]|\r?\n[ \t]{0,32}"
# Keywords whose value is a schema, a list of schemas, or an object of schemas.
_ONE = frozenset({"additionalItems", "additionalProperties", "contains", "else", "if", "items"})
_ONE |= {"not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_COUNTS = frozenset(
    f"{end}{what}"
    for end in ("min", "max")
    for what in ("Contains", "Items", "Length", "Properties")
)
# Beside these, unevaluatedProperties and unevaluatedItems depend on other schemas.
_IN_PLACE = frozenset(
    ("$dynamicRef", "$ref", "allOf", "anyOf", "contains", "dependentSchemas", "if", "oneOf")
)


def prepared_schema(schema: Any, params: StructuredOutputsParams) -> Any:
    """The schema with the options for llguidance at its top."""
    dynamic = _has_dynamic_refs(schema)

    def change(one: dict[str, Any]) -> dict[str, Any]:
        return _simplified(one, keeps_anchors=dynamic)

    schema = _mapped(schema, change)
    if params.disable_additional_properties:
        schema = _mapped(schema, _closed)
    if not isinstance(schema, dict):
        return schema
    options: dict[str, Any] = {
        "whitespace_flexible": not params.disable_any_whitespace,
        "whitespace_pattern": params.whitespace_pattern or WHITESPACE,
        # Only the request's own options count, not those in its schema.
        "lenient": False,
        "coerce_one_of": False,
    }
    if params.disable_any_whitespace:
        del options["whitespace_pattern"]
    return {**schema, "x-guidance": options}


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema with `change` applied to it and to every schema inside."""
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _ONE:
            made[name] = _mapped(value, change)
        elif name in _LISTS and isinstance(value, list):
            made[name] = [_mapped(entry, change) for entry in value]
        elif name in _NAMED and isinstance(value, Mapping):
            made[name] = {key: _mapped(entry, change) for key, entry in value.items()}
        else:
            made[name] = value
    return change(made)


def _simplified(schema: dict[str, Any], *, keeps_anchors: bool) -> dict[str, Any]:
    without_effect = {name for name in ("unevaluatedItems", "unevaluatedProperties")
                      if schema.get(name) is True}  # fmt: skip
    if "if" not in schema:
        without_effect |= {"then", "else"}
    elif "then" not in schema and "else" not in schema:
        without_effect.add("if")
    if schema.get("minContains") == 0 and "maxContains" not in schema:
        without_effect.add("contains")
    if "contains" not in schema or "contains" in without_effect:
        without_effect |= {"minContains", "maxContains"}
    if schema.get("uniqueItems") is False:
        without_effect.add("uniqueItems")
    if not keeps_anchors:
        without_effect.add("$dynamicAnchor")
    kept = {name: value for name, value in schema.items() if name not in without_effect}
    for name in _COUNTS & kept.keys():
        if isinstance(kept[name], float) and kept[name].is_integer():
            kept[name] = int(kept[name])  # 2.0 is an integer in JSON Schema
    _write_out_dependents(kept)
    if not _IN_PLACE & kept.keys():
        _settle_unevaluated(kept)
    return kept


def _write_out_dependents(schema: dict[str, Any]) -> None:
    """dependentRequired and dependentSchemas as what they mean: the property is absent, or it is
    there and the rest holds."""
    dependents: dict[str, list[Any]] = {}
    for keyword in ("dependentRequired", "dependentSchemas"):
        if isinstance(schema.get(keyword), Mapping):
            for name, rest in schema.pop(keyword).items():
                wanted = {"required": rest} if keyword == "dependentRequired" else rest
                dependents.setdefault(name, []).append(wanted)
    if dependents:
        choices = [
            {
                "anyOf": [
                    {"properties": {name: False}},
                    {"allOf": [{"required": [name]}, *rest]},
                ]
            }
            for name, rest in dependents.items()
        ]
        schema["allOf"] = [*schema.get("allOf", []), *choices]


def _settle_unevaluated(schema: dict[str, Any]) -> None:
    """Without schemas beside it, what is unevaluated is what is additional."""
    if "unevaluatedProperties" in schema:
        rest = schema.pop("unevaluatedProperties")
        schema.setdefault("additionalProperties", rest)
    if "unevaluatedItems" in schema:
        rest = schema.pop("unevaluatedItems")
        schema.setdefault("items", rest)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """No properties but the named ones, unless the schema itself says which."""
    is_object = schema.get("type") == "object" or "properties" in schema
    if is_object and not {"additionalProperties", "patternProperties"} & schema.keys():
        return {**schema, "additionalProperties": False}
    return schema


def _has_dynamic_refs(schema: Any) -> bool:
    found: list[bool] = []

    def look(one: dict[str, Any]) -> dict[str, Any]:
        found.append("$dynamicRef" in one)
        return one

    _mapped(schema, look)
    return any(found)
