"""A small HTTP/1.1 client for `bench serve` and `verify`: one request per connection, SSE."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from paceline.errors import ConfigError

_LINE_LIMIT = 1 << 20
_GET_S = 30.0  # what is not generated comes at once


class RequestFailed(Exception):
    """The server answered with an error, or did not answer."""


class Unreachable(RequestFailed):
    """The connection was refused or the host was not found."""


class NotOffered(RequestFailed):
    """The server refuses the request (HTTP 4xx), or its reply lacks what was asked for."""


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Whoever reads a reply inside gets NotOffered if the reply has another form."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise NotOffered(
            f"the reply of {path} is not that of an OpenAI-compatible server "
            f"({type(error).__name__}: {error})"
        ) from None


@dataclass(frozen=True)
class Endpoint:
    """The address of a server, and its API key."""

    host: str
    port: int
    is_tls: bool = False
    prefix: str = ""
    api_key: str | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.is_tls else ''}://{host}:{self.port}{self.prefix}"

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Endpoint:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not a URL; write it like http://127.0.0.1:8000.")
        is_tls = parts.scheme == "https"
        try:
            port = parts.port or (443 if is_tls else 80)
        except ValueError:
            raise ConfigError(f"{url!r} has no usable port.") from None
        return cls(parts.hostname, port, is_tls, parts.path.rstrip("/"), api_key)


@asynccontextmanager
async def request(
    endpoint: Endpoint, method: str, path: str, body: bytes = b""
) -> AsyncIterator[asyncio.StreamReader]:
    """The body of a 200 reply, de-chunked, as a stream. Anything else raises RequestFailed."""
    try:
        reader, writer = await asyncio.open_connection(
            endpoint.host, endpoint.port, ssl=endpoint.is_tls or None, limit=_LINE_LIMIT
        )
    except OSError as error:
        # Numbers of getaddrinfo are negative, and those of OpenSSL are not the system's.
        is_of_system = (error.errno or 0) > 0 and not isinstance(error, ssl.SSLError)
        reason = os.strerror(error.errno or 0) if is_of_system else error.strerror or error
        raise Unreachable(
            f"Cannot reach {endpoint.url}; is the server running? ({reason})"
        ) from None
    try:
        writer.write(_head(endpoint, method, path, len(body)) + body)
        await writer.drain()
        status, headers = await _read_head(reader)
        content = asyncio.StreamReader(limit=_LINE_LIMIT)
        feeding = asyncio.create_task(_feed(reader, content, headers))
        try:
            if status != 200:
                text = (await content.read()).decode(errors="replace")
                kind = NotOffered if 400 <= status < 500 else RequestFailed
                raise kind(f"HTTP {status}: {_message(text)}")
            yield content
        finally:
            feeding.cancel()
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise RequestFailed(f"connection lost: {error}") from None
    finally:
        writer.close()


async def get(endpoint: Endpoint, path: str) -> str:
    try:
        async with asyncio.timeout(_GET_S), request(endpoint, "GET", path) as content:
            return (await content.read()).decode(errors="replace")
    except TimeoutError:
        raise RequestFailed(f"{path} did not answer within {_GET_S:g} s") from None


async def first_model(endpoint: Endpoint) -> dict[str, Any]:
    """The server's first model, as /v1/models describes it."""
    text = await get(endpoint, "/v1/models")
    with reading("/v1/models"):
        card: dict[str, Any] = json.loads(text)["data"][0]
        return {**card, "id": str(card["id"])}


async def post(endpoint: Endpoint, path: str, body: Any) -> Any:
    """The JSON of the reply."""
    async with request(endpoint, "POST", path, json.dumps(body).encode()) as content:
        text = await content.read()
    with reading(path):
        return json.loads(text)


async def post_events(endpoint: Endpoint, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event, until [DONE]. An error event raises."""
    async with request(endpoint, "POST", path, json.dumps(body).encode()) as content:
        while line := await content.readline():
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            with reading(path):
                event: dict[str, Any] = json.loads(data)
                failure = event.get("error")
            if failure is not None:
                raise RequestFailed(_message(data.decode(errors="replace")))
            yield event
        raise RequestFailed("the stream ended without [DONE]")


def _head(endpoint: Endpoint, method: str, path: str, length: int) -> bytes:
    lines = [
        f"{method} {endpoint.prefix}{path} HTTP/1.1",
        f"Host: {endpoint.host}:{endpoint.port}",
        "Accept: */*",
        "Connection: close",
    ]
    if endpoint.api_key:
        lines.append(f"Authorization: Bearer {endpoint.api_key}")
    if length:
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    headers = {}
    try:
        status = (await reader.readline()).split(None, 2)
        if not status:
            raise RequestFailed("the server closed the connection without an answer")
        while (line := await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        return int(status[1]), headers
    except (ValueError, IndexError):  # also a line over the limit
        raise RequestFailed("the server does not answer in HTTP") from None


async def _feed(
    reader: asyncio.StreamReader, content: asyncio.StreamReader, headers: dict[str, str]
) -> None:
    """Copy the body to `content`, without chunk framing."""
    try:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await reader.readline()).split(b";")[0].strip() or b"0", 16):
                content.feed_data(await reader.readexactly(size))
                await reader.readline()
        elif "content-length" in headers:
            content.feed_data(await reader.readexactly(int(headers["content-length"])))
        else:
            while data := await reader.read(1 << 16):
                content.feed_data(data)
        content.feed_eof()
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        content.set_exception(RequestFailed(f"connection lost: {error}"))


def _message(text: str) -> str:
    """The message of OpenAI's error body, or the beginning of the text in one line."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text[:1000].split())[:200]
