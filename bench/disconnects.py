"""Time to first token of a request after many other clients have disconnected.

usage: python -m bench.disconnects [--clients 1000] [--storm 3000] [--json FILE] [-- FLAGS OF SERVE]

Starts `paceline serve` (the default model on CPU, unless flags are given) and measures the time to
the first token of one request
  - on the idle server (median of five);
  - right after `--clients` clients with open requests disconnected at once, with prompts of 1 and
    of 500 tokens;
  - right after `--storm` clients connected and disconnected within ten seconds.
Counts the replies to those clients by status, 429 included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.commands.report import machine

VOCAB = 49_000
STORM_S = 10.0
LENGTHS = (1, 500)  # prompt tokens of the clients that disconnect
ANSWER_S = 600.0


@contextlib.contextmanager
def served(arguments: list[str]) -> Iterator[int]:
    """`paceline serve` on a free port, until the end of the block."""
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", *arguments]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith("Paceline serves on http://"):
                yield int(line.split()[3].rpartition(":")[2])
                return
        raise SystemExit("the server did not start")
    finally:
        server.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def request_bytes(length: int, seed: int, max_tokens: int) -> bytes:
    rng = random.Random(seed)
    prompt = [rng.randrange(10, VOCAB) for _ in range(length)]
    asked = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    body = json.dumps(asked).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def first_token_s(port: int) -> float:
    """Of a short request on a new connection. A 429 is retried; that time counts too."""
    begin_s = time.monotonic()
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            writer.write(request_bytes(4, int(begin_s * 1e6), 1))
            async with asyncio.timeout(ANSWER_S):
                status = await reader.readline()
                if b" 429 " not in status:
                    await reader.readuntil(b"data: ")
                    return time.monotonic() - begin_s
        await asyncio.sleep(0.02)


class Crowd:
    """Clients that ask for a long answer and disconnect before its end."""

    def __init__(self, port: int, length: int) -> None:
        self._port = port
        self._length = length
        self._open: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.answers: Counter[str] = Counter()

    async def join(self, seed: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(request_bytes(self._length, seed, 400))
        await writer.drain()
        self._open.append((reader, writer))

    def leave(self, count: int | None = None) -> None:
        """Disconnect the oldest `count` clients, or all, and count the replies they had."""
        for reader, writer in self._open[:count]:
            said = bytes(reader._buffer[9:12])  # type: ignore[attr-defined]  # what has come so far
            self.answers[said.decode() or "none yet"] += 1
            writer.transport.abort()
        del self._open[:count]


async def after_disconnects(port: int, count: int, length: int) -> dict[str, Any]:
    """All clients connect, then all disconnect."""
    crowd = Crowd(port, length)
    begin_s = time.monotonic()
    for first in range(0, count, 50):
        await asyncio.gather(*(crowd.join(seed) for seed in range(first, min(count, first + 50))))
    opened_s = time.monotonic() - begin_s
    await asyncio.sleep(1.0)
    crowd.leave()
    waited_s = await first_token_s(port)
    return {"opened_s": opened_s, "answers": crowd.answers, "first_token_s": waited_s}


async def after_storm(port: int, count: int, length: int) -> dict[str, Any]:
    """Clients connect and disconnect at once, for ten seconds."""
    crowd = Crowd(port, length)
    begin_s = time.monotonic()
    step, num_steps = max(1, count // 100), 100
    for at in range(num_steps):
        await asyncio.gather(*(crowd.join(at * step + i) for i in range(step)))
        await asyncio.sleep(max(0.0, begin_s + STORM_S * (at + 1) / num_steps - time.monotonic()))
        crowd.leave()
    took_s = time.monotonic() - begin_s
    waited_s = await first_token_s(port)
    return {"took_s": took_s, "answers": crowd.answers, "first_token_s": waited_s}


async def measure(port: int, args: argparse.Namespace) -> dict[str, Any]:
    for _ in range(2):
        await first_token_s(port)
    idle_s = statistics.median([await first_token_s(port) for _ in range(5)])
    found: dict[str, Any] = {"idle_first_token_s": idle_s}
    for length in args.lengths:
        for name, run, count in (
            ("disconnects", after_disconnects, args.clients),
            ("storm", after_storm, args.storm),
        ):
            if not count:
                continue
            result = await run(port, count, length)
            result["more_than_idle_s"] = result["first_token_s"] - idle_s
            found[f"{name}_{count}_prompt_{length}"] = result
            print(f"{name} of {count}, prompts of {length}: {json.dumps(result)}", flush=True)
            await asyncio.sleep(2.0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--storm", type=int, default=3000)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("serve", nargs="*", help="arguments of paceline serve")
    args = parser.parse_args()
    with served(
        [*args.serve, "--device", "cpu"] if "--device" not in args.serve else args.serve
    ) as port:
        found = asyncio.run(measure(port, args))
    print(f"idle: first token after {found['idle_first_token_s']:.3f} s")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
