"""Requests of other APIs, translated to the chat requests that they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.server.body import read_request
from paceline.server.chat import ChatEndpoint
from paceline.server.fields import convert, parse
from paceline.server.generate import Body, CheckedRequest, GenerationEndpoint, owner_of
from paceline.server.params import client_names
from paceline.server.requests import ChatRequest, GenerationBody
from paceline.server.service import Client, Service

if TYPE_CHECKING:
    from starlette.requests import Request


# Fields of chat requests, without those that have another form in other APIs.
_SHARED = {*ChatRequest.__struct_fields__} - {"messages", "tools", "tool_choice", "stream_options"}


@dataclass
class Conversation:
    """Chat messages. `places` says where each one came from, for errors."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, place: str, **message: Any) -> dict[str, Any]:
        self.messages.append(message)
        self.places.append(place)
        return message

    def names(self) -> dict[str, str]:
        return {f"messages[{i}]": place for i, place in enumerate(self.places)}


@dataclass(frozen=True)
class Translated:
    """The body of a chat request, and what its errors and its reply need."""

    body: dict[str, Any]
    names: dict[str, str]  # beginning of a path in the chat request -> in the client's
    namespaced: dict[str, tuple[str, str]] = field(default_factory=dict)  # see RequestEcho


def shared_fields(body: GenerationBody) -> dict[str, Any]:
    """The fields of a body that mean the same in a chat request."""
    names = [n for n in body.__struct_fields__ if n in _SHARED]
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def chat_tool(name: str, **fields: Any) -> dict[str, Any]:
    """A tool of a chat request. Without fields: a tool choice that names it."""
    given = {key: value for key, value in fields.items() if value is not None}
    return {"type": "function", "function": {"name": name, **given}}


def json_format(name: str, schema: Any, strict: bool | None) -> dict[str, Any]:
    """The response_format of a chat request for a JSON schema."""
    given = {} if strict is None else {"strict": strict}
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, **given}}


def names_of_options(raw: dict[str, Any], *, form: str, effort: str) -> dict[str, str]:
    """Fields of a chat request -> the names that the client uses for them."""
    grammar = form if "response_format" in raw else "tools"
    return {
        "response_format.json_schema": form,
        "response_format": form,
        "structured_outputs": "structured_outputs" if "structured_outputs" in raw else grammar,
        "reasoning_effort": effort,
        "tool_choice.function": "tool_choice",
    }


class TranslatedEndpoint(GenerationEndpoint[Body]):
    """A route whose requests are translated to chat requests."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._chat = ChatEndpoint(service)

    async def check_as_chat(
        self, client: Client, size: int, owner: bytes, translate: Callable[[], Translated]
    ) -> tuple[CheckedRequest, Translated]:
        """`translate` may run in a thread; it reads about `size` bytes."""

        def work() -> tuple[ChatRequest, Translated]:
            translated = translate()
            with client_names(translated.names):
                return convert(translated.body, ChatRequest), translated

        request, translated = await self._service.off_loop(size, work)
        with client_names(translated.names):
            checked = await self._chat.check(client, request, size, owner)
        return replace(checked, field_names=translated.names), translated

    async def count(self, request: Request, kind: type[Body]) -> int:
        """How many tokens the prompt of a request has."""
        service = self._service
        client = service.client
        async with read_request(request, service, partial(parse, kind=kind)) as (body, size):
            service.resolve_model(body.model)
            checked = await self.check(client, body, size, owner_of(request))
            return len(checked.prompts[0].token_ids)
