"""POST /admin/drain: restarts one rank after another while the server goes on.

Needs the API key; a server without one serves it to this machine only.
"""

from __future__ import annotations

import time
from ipaddress import ip_address

from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import InvalidRequest, shown
from paceline.server.failures import HttpFailure
from paceline.server.generate import json_response
from paceline.server.service import Service


class AdminEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def drain(self, request: Request) -> Response:
        """Restart a rank after its requests have finished or the drain timeout has passed. Answers
        when the rank serves again."""
        self._check_allowed(request)
        text = request.query_params.get("rank", "")
        if not text.isascii() or not text.isdigit():
            raise InvalidRequest(
                f"rank is {shown(text)}; give the number of a rank: /admin/drain?rank=0.",
                param="rank",
            )
        rank, started_s = int(text[:9]), time.monotonic()
        await self._service.restart_rank(rank)
        seconds = round(time.monotonic() - started_s, 3)
        return json_response({"status": "restarted", "rank": rank, "seconds": seconds})

    def _check_allowed(self, request: Request) -> None:
        """Without a key, only clients on this machine may call. The middleware checks keys."""
        if self._service.options.needs_key:
            return
        host = request.client.host if request.client is not None else ""
        try:
            is_local = ip_address(host).is_loopback
        except ValueError:
            is_local = False
        if not is_local:
            raise HttpFailure(
                403,
                "Without --api-key, /admin is served to this machine only.",
                kind="permission_error",
                code="forbidden",
            )
