"""Many requests at once, from processes of their own: what each of them was answered.

Usage: python -m tests.server.flood PORT COUNT MAX_TOKENS SECONDS; prints the answers as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import subprocess
import sys
from collections import Counter

from tests.server.processes import ROOT

_SPARE_FILES = 64


def flood(port: int, count: int, *, max_tokens: int = 8, within_s: float = 60.0) -> Counter[str]:
    """`count` requests, each on a connection of its own, all begun at once: answers by number.

    A request that is not answered in time, cut off or answered in part is an error here.
    """
    each = _limit_of_files() - _SPARE_FILES  # of one process
    shares = [min(each, count - at) for at in range(0, count, each)]
    clients = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(port), str(share), str(max_tokens), str(within_s)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for share in shares
    ]
    results: Counter[str] = Counter()
    for client in clients:
        said, _ = client.communicate(timeout=within_s + 30.0)
        assert client.returncode == 0
        results.update(json.loads(said))
    return results


def _limit_of_files() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard


async def _ask(port: int, body: bytes, results: Counter[str], *, may_retry: bool = True) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        results["refused"] += 1
        return
    with contextlib.closing(writer):
        writer.write(head + body)
        try:
            reply = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionResetError):
            # At the limit the server closes connections whose header has not come within 0.25 s,
            # which a busy machine may need. Clients then ask again; a second time is an error.
            if not may_retry:
                raise
            return await _ask(port, body, results, may_retry=False)
        length = next(h for h in reply.split(b"\r\n") if h.startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
        results[reply[9:12].decode()] += 1


async def _ask_all(port: int, count: int, max_tokens: int, within_s: float) -> Counter[str]:
    results: Counter[str] = Counter()
    body = json.dumps({"prompt": "abc", "max_tokens": max_tokens}).encode()
    async with asyncio.timeout(within_s):
        await asyncio.gather(*(_ask(port, body, results) for _ in range(count)))
    return results


def main(port: int, count: int, max_tokens: int, within_s: float) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    results = asyncio.run(_ask_all(port, count, max_tokens, within_s))
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
