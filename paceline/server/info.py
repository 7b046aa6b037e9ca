"""GET endpoints: models, health, readiness, metrics, version."""

from __future__ import annotations

import time

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.server.failures import NotReady, short_reason
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
        """Liveness: 503 only if the engine has ended and will not be restarted. A server that loads
        or restarts must not be killed, because its open requests continue after the restart."""
        service = self._service
        if service.engine_error is not None:
            raise service.engine_error
        stats = service.metrics.stats
        if not stats.num_restarting:
            return json_response({"status": "ok"})
        status = "restarting" if stats.is_restarting else "degraded"
        serving = f"{stats.num_replicas - stats.num_restarting} of {stats.num_replicas}"
        lost = {r: rank for r, rank in sorted(stats.ranks.items()) if rank.is_restarting}
        newest = max(lost.values(), key=lambda rank: rank.restarted_at_s)
        return json_response(
            {
                "status": status,
                "replicas_serving": serving,
                "reason": short_reason(newest.reason),
                "restarting": [
                    {"rank": r, "reason": short_reason(rank.reason)} for r, rank in lost.items()
                ],
            }
        )

    async def ready(self, request: Request) -> Response:
        """Readiness: whether the server takes requests now."""
        state = self._service.state
        is_restarting = state is State.READY and self._service.metrics.stats.is_restarting
        status = "restarting" if is_restarting else state.value
        response = json_response({"status": status}, 200 if status == State.READY.value else 503)
        if is_restarting or state is State.LOADING:
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
