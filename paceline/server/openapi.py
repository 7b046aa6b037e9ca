"""/openapi.json, /docs and `GET /`, from the types that parse requests and write replies."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import HTMLResponse, Response

from paceline import __version__
from paceline.server.failures import MESSAGES_PATH
from paceline.server.generate import json_response
from paceline.server.listen import curl_line
from paceline.server.operations import OPERATIONS, Operation, served_operations
from paceline.server.page_files import page_file
from paceline.server.replies import AnthropicError, ErrorReply
from paceline.server.service import Service

if TYPE_CHECKING:
    from starlette.requests import Request

_PATH_PARAMETER = re.compile(r"\{(\w+)\}")
_STYLE = """<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
code, pre { font: 14px/1.5 ui-monospace, monospace; background: #8881; border-radius: 4px }
pre { padding: 1em; overflow: auto } td, th { text-align: left; padding: .2em 1em .2em 0 }
summary { cursor: pointer; padding: .3em 0 }
</style>"""


def openapi(operations: Sequence[Operation] = OPERATIONS) -> dict[str, Any]:
    """The description of this server, OpenAPI 3.1."""
    types = [t for op in operations for t in (*op.bodies, op.reply) if t is not None]
    types += [ErrorReply, AnthropicError]
    template = "#/components/schemas/{name}"
    schemas, components = msgspec.json.schema_components(types, ref_template=template)
    found = list(schemas)
    schema_of = {id(kind): schema for kind, schema in zip(types, found, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for op in operations:
        is_anthropic = op.path.startswith(MESSAGES_PATH)
        error = schema_of[id(AnthropicError if is_anthropic else ErrorReply)]
        bodies = [schema_of[id(kind)] for kind in op.bodies]
        described = _operation(op, bodies, schema_of.get(id(op.reply)), error)
        paths.setdefault(op.open_path, {})[op.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(op: Operation, bodies: list[Any], reply: Any, error: Any) -> dict[str, Any]:
    content: dict[str, Any] = {op.media_type: {"schema": {"type": "string"}}}
    if reply is not None:
        content = {"application/json": {"schema": reply}}
    if op.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {
        "operationId": op.name,
        "summary": op.summary,
        "responses": {
            "200": {"description": "the reply", "content": content},
            "default": {
                "description": "an error",
                "content": {"application/json": {"schema": error}},
            },
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PATH_PARAMETER.findall(op.open_path)
    ]
    parameters += [
        {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
        for name, text in op.query.items()
    ]
    if parameters:
        described["parameters"] = parameters
    if bodies:
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        content = {"application/json": {"schema": schema}}
        described["requestBody"] = {"required": True, "content": content}
    return described


class DescriptionEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._operations = served_operations(page=service.options.page)
        self._document = msgspec.json.encode(openapi(self._operations))

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(_docs_page(msgspec.json.decode(self._document)))

    async def root(self, request: Request) -> Response:
        """The model's name is not shown on a server with a key: this route asks for none."""
        service = self._service
        if service.options.page and "text/html" in request.headers.get("accept", ""):
            return page_file("index.html", "text/html")
        names = () if service.options.needs_key else service.model_names
        return json_response(
            {
                "name": "Paceline",
                "version": __version__,
                "status": service.state.value,
                "model": names[0] if names else None,
                "try": curl_line(str(request.base_url).rstrip("/"), service.options),
                "routes": {f"{op.method} {op.open_path}": op.summary for op in self._operations},
            }
        )


def _docs_page(document: dict[str, Any]) -> str:
    """Routes and types as static HTML, which needs nothing else."""
    routes = [
        f"<details><summary><code>{method.upper()} {_escape(path)}</code> "
        f"{_escape(op['summary'])}</summary>{_body_and_reply(op)}</details>"
        for path, methods in document["paths"].items()
        for method, op in methods.items()
    ]
    types = [_type_page(name, kind) for name, kind in document["components"]["schemas"].items()]
    return (
        f"<!doctype html><title>Paceline: routes</title>{_STYLE}<h1>Routes</h1>{''.join(routes)}"
        f'<h1>Types</h1>{"".join(types)}<p><a href="/openapi.json">openapi.json</a></p>'
    )


def _body_and_reply(op: dict[str, Any]) -> str:
    lines = [
        f"<p>Query: {_escape(p['name'])}: {_escape(p.get('description', ''))}</p>"
        for p in op.get("parameters", ())
        if p["in"] == "query"
    ]
    if "requestBody" in op:
        schema = op["requestBody"]["content"]["application/json"]["schema"]
        lines.append(f"<p>Body: {_shown(schema)}</p>")
    for kind, content in op["responses"]["200"]["content"].items():
        lines.append(f"<p>Reply, {_escape(kind)}: {_shown(content['schema'])}</p>")
    return "".join(lines)


def _type_page(name: str, kind: dict[str, Any]) -> str:
    required = kind.get("required", ())
    rows = "".join(
        f"<tr><td><code>{_escape(field)}</code>{' (required)' if field in required else ''}"
        f"<td>{_shown(schema)}"
        for field, schema in kind.get("properties", {}).items()
    )
    text = f"<p>{_escape(kind.get('description', ''))}</p>"
    head = f'<details id="{name}"><summary><code>{name}</code></summary>'
    return f"{head}{text}<table>{rows}</table></details>"


def _shown(schema: dict[str, Any]) -> str:
    """A type in a line, with links."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_shown, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f"<code>{_escape(value)}</code>" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"array of {_shown(schema.get('items', {}))}"
    return _escape(schema.get("type", "anything"))


def _escape(value: Any) -> str:
    return html.escape(str(value))
