"""Which Host headers are accepted, and which web pages may call this server.

A web page may send requests to any address. The browser names the page (Origin) and the host name
that it resolved (Host). A page can make its own name resolve to 127.0.0.1 (DNS rebinding) and then
has the same origin as the server, so Host is checked too. Other clients send no Origin.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from paceline.server.failures import HttpFailure
from paceline.server.listen import is_loopback
from paceline.server.options import ServerOptions

if TYPE_CHECKING:
    from starlette.types import Scope

_MAX_SHOWN = 80


class OriginPolicy:
    """Checks Host and Origin on a loopback address, and always if --allowed-hosts is given."""

    def __init__(self, options: ServerOptions) -> None:
        self._hosts = {name_in(host) for host in options.allowed_hosts}
        self._origins = {origin.lower() for origin in options.allowed_origins}
        self._is_enforced = bool(self._hosts) or is_loopback(options)

    def check(self, scope: Scope) -> None:
        """Raise HttpFailure if the request is not allowed."""
        headers = Headers(scope=scope)
        hosts = [host.strip().lower() for host in headers.getlist("host")]
        if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):
            raise HttpFailure(
                400, f"The request has {len(hosts)} Host headers; HTTP/1.1 asks for exactly one."
            )
        if not self._is_enforced:
            return
        for host in hosts:
            self._check_host(host, scope)
        for origin in headers.getlist("origin"):
            self._check_origin(origin.strip().lower(), hosts)

    def _check_host(self, host: str, scope: Scope) -> None:
        name = name_in(host)
        here = scope["server"][0].removeprefix("::ffff:")  # the address that was connected to
        if _is_local(name) or name == here or self._hosts & {name, "*"}:
            return
        shown = name[:_MAX_SHOWN]
        raise _refusal(
            f"This server does not answer to the host name {shown!r}. To allow it, start it with "
            f"--allowed-hosts {shown}.",
            "host_not_allowed",
        )

    def _check_origin(self, origin: str, hosts: list[str]) -> None:
        scheme, _, authority = origin.partition("://")
        if scheme in ("http", "https") and (authority in hosts or _is_local(name_in(authority))):
            return
        if self._origins & {origin, "*"}:
            return
        shown = origin[:_MAX_SHOWN]
        raise _refusal(
            f"Web pages of {shown!r} may not call this server. To allow them, start it with "
            f"--allowed-origins {shown}.",
            "origin_not_allowed",
        )


def name_in(authority: str) -> str:
    """`host:port` without its port, and an IPv6 address without its brackets."""
    authority = authority.lower()
    host, _, port = authority.rpartition(":")
    is_bare = ":" in host and not host.startswith("[")  # an IPv6 address without brackets
    if is_bare or not port.isdecimal():
        host = authority
    return host.removeprefix("[").removesuffix("]").removesuffix(".")


def _is_local(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _refusal(message: str, code: str) -> HttpFailure:
    return HttpFailure(403, message, kind="permission_error", code=code)
