"""What the server says of itself: models, health, readiness, metrics, version. Read-only."""

from __future__ import annotations

import time

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.server.failures import NotReady
from paceline.server.generate import json_response
from paceline.server.replies import ModelCard, ModelList
from paceline.server.service import LOADING_RETRY_S, Service, State


class InfoEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        return json_response(ModelList(data=[self._card(name) for name in self._names()]))

    async def model(self, request: Request) -> Response:
        self._names()
        name = request.path_params["id"]
        self._service.resolve_model(name)
        return json_response(self._card(name))

    async def health(self, request: Request) -> Response:
        """Live: the process answers and its engine, if there is one yet, has not died."""
        if self._service.death is not None:
            raise self._service.death
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether to send requests here."""
        state = self._service.state
        response = json_response({"status": state.value}, 200 if state is State.READY else 503)
        if state is State.LOADING:
            response.headers["Retry-After"] = str(LOADING_RETRY_S)
        return response

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    def _names(self) -> tuple[str, ...]:
        if self._service.info is None:
            raise NotReady("The model is still loading.", retry_after_s=LOADING_RETRY_S)
        return self._service.model_names

    def _card(self, name: str) -> ModelCard:
        info = self._service.info
        assert info is not None
        return ModelCard(
            id=name,
            created=self._created,
            root=info.model_name or name,
            max_model_len=info.max_model_len,
        )
