"""POST /v1/responses, and the routes of stored responses."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.responses import Response as HttpResponse

from paceline.errors import InvalidRequest, NotFound, shown
from paceline.server import responses_types as wire
from paceline.server.as_chat import Translated, TranslatedEndpoint
from paceline.server.generate import CheckedRequest, json_response, owner_of
from paceline.server.response_store import LiveResponse, ResponseStore, StoredResponse
from paceline.server.responses_format import RequestEcho, ResponsesFormat
from paceline.server.responses_input import own_items, translate
from paceline.server.service import Client, Service

if TYPE_CHECKING:
    from starlette.requests import Request

logger = logging.getLogger(__name__)

_MOST_LISTED = 100


class ResponsesEndpoint(TranslatedEndpoint[wire.ResponsesRequest]):
    body_type = wire.ResponsesRequest
    id_prefix = "resp_"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._has_warned = False

    async def check(
        self, client: Client, body: wire.ResponsesRequest, size: int, owner: bytes
    ) -> CheckedRequest:
        service = self._service
        if body.store and not service.responses.stores:
            raise InvalidRequest(
                "This server stores no responses (--max-stored-responses 0); send store: false.",
                param="store",
            )
        previous = None
        if (earlier := body.previous_response_id) is not None:
            previous = _found(service.responses, earlier, owner, "previous_response_id")
        size += 0 if previous is None else len(previous.items)
        items: list[wire.Item] = []

        def work() -> Translated:
            history = [] if previous is None else previous.all_items()
            own = own_items(body, service.responses.finder(owner))
            items.extend([*history, *own])
            return translate(body, history, own)

        checked, translated = await self.check_as_chat(client, size, owner, work)
        echo = RequestEcho(
            body=body,
            tools=self._offered(body),
            items=items if self._is_stored(body) else (),
            namespaced=translated.namespaced,
            is_stored=self._is_stored(body),
            owner=owner,
            params=checked.params,
        )
        body.input = None  # the prompt holds it, and a stream may last for hours
        reply_format = ResponsesFormat(service, echo, checked.make_parser)
        return replace(checked, reply_format=reply_format)

    def _offered(self, body: wire.ResponsesRequest) -> list[wire.OfferedTool]:
        """The tools that the model is told of. The first time that there are others is logged."""
        tools = body.tools or ()
        offered = [tool for tool in tools if not isinstance(tool, wire.HostedTool)]
        if len(offered) < len(tools) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a client offers a hosted tool (web_search, image_generation); Paceline cannot run "
                "it, so the model is not told of it (docs/howto/clients.md). This is logged once."
            )
        return offered

    async def input_tokens(self, request: Request) -> HttpResponse:
        """How many tokens the input of a request would have."""
        return json_response(
            wire.InputTokens(input_tokens=await self.count(request, wire.ResponsesRequest))
        )

    def _is_stored(self, body: wire.ResponsesRequest) -> bool:
        return body.store is not False and self._service.responses.stores


class StoredResponseEndpoints:
    """GET and DELETE /v1/responses/ID, POST .../cancel, GET .../input_items."""

    def __init__(self, service: Service) -> None:
        self._store = service.responses

    async def retrieve(self, request: Request) -> HttpResponse:
        if request.query_params.get("stream", "false").lower() != "false":
            raise InvalidRequest(
                "stream: a stored response cannot be streamed again; leave it out.", param="stream"
            )
        if (live := self._live(request)) is not None:
            return json_response(live.current())
        return HttpResponse(self._stored(request).reply, media_type="application/json")

    async def delete(self, request: Request) -> HttpResponse:
        """A response that is being streamed will not be stored; its stream goes on."""
        if (live := self._live(request)) is not None:
            live.discard()
        else:
            self._stored(request)
            self._store.remove(request.path_params["id"], owner_of(request))
        return json_response(wire.DeletedResponse(id=request.path_params["id"]))

    async def cancel(self, request: Request) -> HttpResponse:
        """Ends a response that is being streamed. One that has ended stays as it is."""
        if (live := self._live(request)) is not None:
            return json_response(live.cancel())
        return HttpResponse(self._stored(request).reply, media_type="application/json")

    async def input_items(self, request: Request) -> HttpResponse:
        """What the model was given, those items included that came from earlier responses."""
        query = request.query_params
        limit, order = query.get("limit", "20"), query.get("order", "desc")
        if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MOST_LISTED:
            raise InvalidRequest(f"limit must be 1 to {_MOST_LISTED}.", param="limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order must be 'asc' or 'desc'.", param="order")
        items = self._stored(request).input_items()
        if order == "desc":
            items.reverse()
        if (after := query.get("after")) is not None:
            at = next((i for i, item in enumerate(items) if item.id == after), None)
            if at is None:
                raise InvalidRequest(f"after: there is no item {shown(after)}.", param="after")
            items = items[at + 1 :]
        page = items[: int(limit)]
        ids: list[str | None] = [*(str(item.id) for item in page)] or [None]
        has_more = len(items) > len(page)
        return json_response(
            wire.ItemList(data=page, first_id=ids[0], last_id=ids[-1], has_more=has_more)
        )

    def _live(self, request: Request) -> LiveResponse | None:
        return self._store.live.get((owner_of(request), request.path_params["id"]))

    def _stored(self, request: Request) -> StoredResponse:
        return _found(self._store, request.path_params["id"], owner_of(request), "id")


def _found(store: ResponseStore, response_id: str, owner: bytes, param: str) -> StoredResponse:
    if (found := store.get(response_id, owner)) is not None:
        return found
    raise NotFound(
        f"There is no stored response {shown(response_id)}. It was never stored, was deleted, or "
        "was dropped for newer ones (--max-stored-responses, --max-stored-response-bytes).",
        param=param,
        code="response_not_found",
    )
