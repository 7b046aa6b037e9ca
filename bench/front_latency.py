"""Latency of /health and /metrics while a client sends the most expensive request of each kind.

usage: python bench/front_latency.py [CASE ...] [--model MODEL] [--json FILE] [-- FLAG ...]

Starts `paceline serve`, sends each case once and meanwhile polls /health and /metrics, each on a
separate connection. Prints the largest latency of both, and the memory of the front process before,
at its peak and afterwards. Fails if a reply takes longer than LIMIT_S.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from paceline.commands.report import machine

LIMIT_S = 0.25
SIZE = 15_000_000
NUM_ORDINARY = 5000
_SAMPLE_EVERY_S = 0.02
_REST_S = 2.0
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}


def _text(**fields: Any) -> tuple[str, bytes]:
    return TEXT, json.dumps({"prompt": "Hi", "max_tokens": 4, **fields}).encode()


def _chat(content: Any, **fields: Any) -> tuple[str, bytes]:
    messages = [{"role": "user", "content": content}]
    return CHAT, json.dumps({"messages": messages, "max_tokens": 4, **fields}).encode()


CASES: dict[str, Callable[[], tuple[str, bytes]]] = {
    "one bad word of 15 MB": lambda: _text(bad_words=["x y " * (SIZE // 4)]),
    "500,000 bad words": lambda: _text(bad_words=[f"word {i}" for i in range(500_000)]),
    "7 million integers in extra_args": lambda: _text(extra_args={"a": [1] * (SIZE // 3)}),
    "a model name of 15 MB": lambda: _text(model="m" * SIZE),
    "350,000 content parts": lambda: _chat([{"type": "text", "text": "x"}] * (SIZE // 42)),
    "5 million empty content parts": lambda: _chat([{}] * (SIZE // 4)),
    "a million keys in metadata": lambda: _text(metadata={f"k{i}": 1 for i in range(1_000_000)}),
    "a million fields": lambda: _text(**{f"k{i}": 1 for i in range(1_000_000)}),
    "a million token ids": lambda: _text(prompt=[5] * 1_000_000),
    "a prompt of 15 MB": lambda: _text(prompt="The quick brown fox. " * (SIZE // 21)),
    "spaces, then a prompt of 15 MB": lambda: _text(prompt=" " * 200_000 + "Zq x9 " * (SIZE // 6)),
    "a message of 15 MB": lambda: _chat("Zq x9 " * (SIZE // 6)),
    "20,000 messages": lambda: (
        CHAT,
        json.dumps({"messages": [{"role": "user", "content": "Hi"}] * 20_000}).encode(),
    ),
    "1,000 prompts with 40,000 allowed tokens": lambda: _text(
        prompt=["Hi"] * 1000, max_tokens=1, allowed_token_ids=list(range(40_000))
    ),
    # Within the limits, and as expensive as they allow.
    "1,000 prompts": lambda: _text(prompt=["The quick brown fox jumps."] * 1000, max_tokens=1),
    "100 choices of a long prompt": lambda: _text(prompt=[5] * 8000, n=100, max_tokens=1),
    "10 prompts with 40,000 allowed tokens": lambda: _text(
        prompt=["Hi"] * 10, max_tokens=1, allowed_token_ids=list(range(40_000))
    ),
    "16,000 messages of 2 parts": lambda: (
        CHAT,
        json.dumps({"messages": [{"role": "user", "content": ["a", "b"]}] * 16_000}).encode(),
    ),
    "/tokenize of 1 MB": lambda: (
        "/tokenize",
        json.dumps({"prompt": "Zq x9 " * 170_000, "return_token_strs": True}).encode(),
    ),
    "/detokenize of a million ids": lambda: (
        "/detokenize",
        json.dumps({"tokens": [5000] * 1_000_000}).encode(),
    ),
    "a broken body of 15 MB": lambda: (TEXT, b'{"prompt": "' + b'\\"' * (SIZE // 2)),
    "/tokenize of 15 MB": lambda: (
        "/tokenize",
        json.dumps({"prompt": "Zq x9 " * (SIZE // 6), "return_token_strs": True}).encode(),
    ),
    "/detokenize of 5 million ids": lambda: (
        "/detokenize",
        json.dumps({"tokens": [5] * (SIZE // 3)}).encode(),
    ),
}
ORDINARY = f"{NUM_ORDINARY:,} ordinary requests"
AT_ONCE = "10 bodies of 15 MB at once"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="words of a case's name")
    parser.add_argument("--model", default="", help="as for `paceline serve`")
    parser.add_argument("--flags", default="", help="more flags for `paceline serve`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--send", nargs=2, help=argparse.SUPPRESS)  # PORT CASE, in a child
    args = parser.parse_args()
    if args.send:
        print(json.dumps(send(int(args.send[0]), args.send[1])))
        return 0
    names = [
        n for n in (*CASES, AT_ONCE, ORDINARY) if not args.cases or any(w in n for w in args.cases)
    ]
    with server(args.model, args.flags.split()) as (pid, port):
        runs = [measure(pid, port, name) for name in names]
    print(
        f"{'case':42} {'answers':>20} {'took':>7} {'/health':>8} {'/metrics':>8}  no CPU  front MB"
    )
    for run in runs:
        memory = " -> ".join(f"{run['front_mb'][x]:.0f}" for x in ("before", "most", "after"))
        answers = ", ".join(f"{count} x {status}" for status, count in run["answers"].items())
        worst = run["worst_s"]
        print(
            f"{run['case']:42} {answers:>20} {run['took_s']:6.2f}s {worst['/health']:7.3f}s "
            f"{worst['/metrics']:7.3f}s {run['without_cpu_s']['/health']:6.3f}s  {memory}"
        )
    if args.json is not None:
        record = {"bench": "front_latency", "machine": machine(), "limit_s": LIMIT_S, "runs": runs}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if all(max(run["worst_s"].values()) <= LIMIT_S for run in runs) else 1


@contextlib.contextmanager
def server(model: str, flags: list[str]) -> Iterator[tuple[int, int]]:
    """(process id, port) of a server that is ready."""
    command = [sys.executable, "-m", "paceline", "serve", *([model] if model else [])]
    command += ["--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("Paceline serves on "):
                    yield process.pid, int(line.split()[3].rpartition(":")[2])
                    return
            raise SystemExit("the server did not start")
        finally:
            process.terminate()


def measure(pid: int, port: int, name: str) -> dict[str, Any]:
    """One case: its replies, and the latency of the polls meanwhile."""
    before, over = resident_mb(pid), threading.Event()
    most = [before]
    samples: dict[str, list[tuple[float, float]]] = {"/health": [], "/metrics": []}

    def watch_memory() -> None:
        while not over.wait(_SAMPLE_EVERY_S):
            most[0] = max(most[0], resident_mb(pid))

    def ask(path: str) -> None:
        while not over.wait(_SAMPLE_EVERY_S):
            waited_s = queued_s(pid)
            took_s = timed_get(port, path)
            samples[path].append((took_s, queued_s(pid) - waited_s))

    watchers = [threading.Thread(target=watch_memory)]
    watchers += [threading.Thread(target=ask, args=[path]) for path in samples]
    for watcher in watchers:
        watcher.start()
    try:
        command = [sys.executable, "-m", "bench.front_latency", "--send", str(port), name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        time.sleep(_REST_S)
    finally:
        over.set()
        for watcher in watchers:
            watcher.join()
    return {
        "case": name,
        **json.loads(done.stdout),
        "worst_s": {path: round(max(found)[0], 4) for path, found in samples.items()},
        # Part of the largest latency in which the front was runnable but had no CPU.
        "without_cpu_s": {path: round(max(found)[1], 4) for path, found in samples.items()},
        "median_s": {
            path: round(median(s for s, _ in found), 4) for path, found in samples.items()
        },
        "front_mb": {"before": before, "most": most[0], "after": resident_mb(pid)},
    }


def timed_get(port: int, path: str) -> float:
    begin_s = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        reply.read()
        assert reply.status == 200, f"{path} answers {reply.status}"
    finally:
        connection.close()
    return time.perf_counter() - begin_s


def queued_s(pid: int) -> float:
    """Seconds that the event loop's thread has waited for a CPU since it started."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


# ---- in a separate process, so that sending does not delay the measurement


def send(port: int, name: str) -> dict[str, Any]:
    if name == ORDINARY:
        begin_s = time.perf_counter()
        answers = asyncio.run(_ordinary(port))
    elif name == AT_ONCE:
        asked = [CASES["a message of 15 MB"](), CASES["one bad word of 15 MB"]()] * 5
        begin_s = time.perf_counter()
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = Counter(pool.map(lambda one: _post(port, *one), asked))
    else:
        path, body = CASES[name]()
        begin_s = time.perf_counter()
        answers = Counter([_post(port, path, body)])
    return {"answers": dict(answers), "took_s": round(time.perf_counter() - begin_s, 2)}


def _post(port: int, path: str, body: bytes) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", path, body, JSON)
        return str(connection.getresponse().status)
    finally:
        connection.close()


async def _ordinary(port: int) -> Counter[str]:
    answers: Counter[str] = Counter()
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 4,
        }
    ).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    asked = head.encode() + body

    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            writer.write(asked)
            answers[(await reader.read())[9:12].decode()] += 1

    await asyncio.gather(*(ask() for _ in range(NUM_ORDINARY)))
    return answers


if __name__ == "__main__":
    sys.exit(main())
