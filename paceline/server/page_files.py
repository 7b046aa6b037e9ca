"""The files of the page, which the wheel has in server/page, and the headers that protect it.

They are built from web/ in the repository. Nothing of the page is loaded from elsewhere.
"""

from __future__ import annotations

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from paceline.server.operations import PAGE_TYPES

FOLDER = Path(__file__).parent / "page"
# A page that shows the text of a model runs no script but its own and calls no other server.
_POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept",
}


def page_file(name: str, media_type: str) -> Response:
    return Response((FOLDER / name).read_bytes(), media_type=media_type, headers=_HEADERS)


async def serve_page_file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in PAGE_TYPES:
        raise HTTPException(404)
    return page_file(name, PAGE_TYPES[name])
