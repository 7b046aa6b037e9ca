"""response_format and structured_outputs of a request, as one StructuredOutputsParams.

The engine compiles it and refuses what it cannot serve; here only the shape is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidRequest, nearest, shown
from paceline.request import StructuredOutputsParams
from paceline.server.requests import GenerateFields

_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_SCHEMA_FIELDS = ("name", "schema", "strict", "description")


def structured_outputs(request: GenerateFields) -> StructuredOutputsParams | None:
    """What the reply must look like; None: any text."""
    wanted = None
    if request.response_format is not None:
        wanted = _of_response_format(request.response_format)
    if request.structured_outputs is None:
        return wanted
    if wanted is not None:
        raise InvalidRequest(
            "structured_outputs is given beside another format of the answer; send one of them.",
            param="structured_outputs",
        )
    if not any(value not in (None, False) for value in request.structured_outputs.values()):
        return None  # clients send every field as null
    for name in ("after_token_ids", "opening_token_ids"):  # the server sets them
        if name in request.structured_outputs:
            raise InvalidRequest(
                f"structured_outputs has no field {name!r}.", param="structured_outputs"
            )
    return StructuredOutputsParams(
        **{name: value for name, value in request.structured_outputs.items() if value is not None}
    )


def _of_response_format(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    kind = given.get("type")
    if kind not in _FORMATS:
        hint = nearest(kind, _FORMATS) if isinstance(kind, str) else ""
        raise _wrong(f"response_format.type must be one of {', '.join(_FORMATS)}.{hint}", "type")
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=given)
    known = ("type", "json_schema") if kind == "json_schema" else ("type",)
    for name in given:
        if name not in known and given[name] is not None:
            hint = " Put it into response_format.json_schema." if name == "schema" else ""
            raise _wrong(f"response_format has no field {shown(name)}.{hint}", str(name))
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(json=_schema_of(given.get("json_schema")))


def _schema_of(wrapper: Any) -> Mapping[str, Any]:
    """The schema in {"name": ..., "schema": ...}. It always holds, with `strict` or without."""
    if not isinstance(wrapper, Mapping):
        raise _wrong(
            'response_format.json_schema must be {"name": ..., "schema": {...}}.', "json_schema"
        )
    for name in wrapper:
        if name not in _SCHEMA_FIELDS:
            hint = nearest(name, _SCHEMA_FIELDS)
            raise _wrong(
                f"response_format.json_schema has no field {shown(name)}.{hint}",
                f"json_schema.{name}",
            )
    schema = wrapper.get("schema")
    if not isinstance(schema, Mapping):
        raise _wrong(
            "response_format.json_schema.schema must be a JSON schema (an object).",
            "json_schema.schema",
        )
    return schema


def _wrong(message: str, field: str) -> InvalidRequest:
    return InvalidRequest(message, param=f"response_format.{field}")
