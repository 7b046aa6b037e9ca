"""`paceline bench serve`: an open-loop load on a server. Requests leave on their own schedule.

The next request does not wait for the last answer, also when the server falls behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from paceline.commands.arguments import engine_keywords, flag
from paceline.commands.http_stream import Endpoint, HttpFailure, Unreachable, get, post_events
from paceline.commands.prompts import Prompt, read_prompts
from paceline.commands.report import (
    acceptance,
    acceptance_rows,
    machine,
    publish,
    spread,
    spread_rows,
)
from paceline.errors import ConfigError, EngineDead
from paceline.observe.progress import ProgressLine

_START_LIMIT_S = 600.0
_STOP_LIMIT_S = 40.0
_WORDS = (
    "time year people way day man thing woman life child world school state family student "
    "group country problem hand part place case week company system program question work "
    "government number night point home water room mother area money story fact month lot right "
    "study book eye job word business issue side kind head house service friend father power "
    "hour game line"
)


@dataclass
class Shot:
    """One request and what was seen of it. Times are time.perf_counter."""

    sent_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    done_s: float = 0.0
    num_in: int = 0
    num_out: int = 0
    error: str | None = None

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.arrivals_s)]


def run(args: Namespace) -> int:
    if not args.request_rate > 0 or not args.burstiness > 0:
        raise ConfigError("--request-rate and --burstiness must be above 0.")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency is {args.max_concurrency}; it must be at least 1.")
    keywords = engine_keywords(args)
    if args.base_url is not None:
        if given := sorted(set(keywords) - {"speculative_config", "seed"}):
            flags = ", ".join(map(flag, given))
            raise ConfigError(
                f"--base-url measures a running server; give {flags} where that one is started."
            )
        return asyncio.run(measure(args, Endpoint.parse(args.base_url, args.api_key)))
    with own_server(keywords) as endpoint:
        return asyncio.run(measure(args, endpoint))


async def measure(args: Namespace, endpoint: Endpoint) -> int:
    try:
        model = json.loads(await get(endpoint, "/v1/models"))["data"][0]["id"]
        before = await scrape(endpoint)
    except (HttpFailure, ValueError, KeyError, IndexError) as error:
        says = (
            error if isinstance(error, Unreachable) else f"{endpoint.url} does not serve: {error}"
        )
        raise EngineDead(str(says)) from None
    prompts = load_prompts(args)
    started_s = time.perf_counter()
    shots = await fire(args, endpoint, model, prompts)
    elapsed_s = time.perf_counter() - started_s
    after = await scrape(endpoint)
    result = summarise(shots, elapsed_s, args) | drafts_between(before, after)
    record = {"bench": "serve", "model": model, "machine": machine(), "results": result}
    publish(record, table(result), args.output_json)
    failed = [shot.error for shot in shots if shot.error]
    if failed:
        print(f"paceline: {len(failed)} requests failed, the first: {failed[0]}", file=sys.stderr)
    return 1 if failed else 0


def load_prompts(args: Namespace) -> list[Prompt]:
    """The data set, over and over if it is short; or random words."""
    if args.dataset_path is not None:
        found = read_prompts(args.dataset_path)
        return [found[i % len(found)] for i in range(args.num_prompts)]
    words = random.Random(args.seed or 0)
    vocabulary = _WORDS.split()
    texts = (" ".join(words.choices(vocabulary, k=args.input_len)) for _ in range(args.num_prompts))
    return [Prompt(text=text) for text in texts]


async def fire(
    args: Namespace, endpoint: Endpoint, model: str, prompts: list[Prompt]
) -> list[Shot]:
    """Send each request at its time, whatever has become of the earlier ones."""
    gaps = random.Random(args.seed or 0)
    gate = asyncio.Semaphore(args.max_concurrency or len(prompts))
    progress = ProgressLine(len(prompts), "Requests")
    tasks: list[asyncio.Task[Shot]] = []
    due_s = time.perf_counter()
    for prompt in prompts:
        await asyncio.sleep(due_s - time.perf_counter())
        shot = one_request(endpoint, request_body(prompt, model, args), gate)
        tasks.append(asyncio.create_task(shot))
        tasks[-1].add_done_callback(lambda t: progress.update(1, t.result().num_out))
        if math.isfinite(args.request_rate):
            scale = 1 / (args.request_rate * args.burstiness)
            due_s += gaps.gammavariate(args.burstiness, scale)
    shots = await asyncio.gather(*tasks)
    progress.close()
    return shots


def request_body(prompt: Prompt, model: str, args: Namespace) -> dict[str, Any]:
    body = {
        "model": model,
        "max_tokens": args.output_len,
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if prompt.messages is not None:
        return body | {"messages": prompt.messages} | dict(prompt.sampling)
    asked = prompt.text if prompt.token_ids is None else prompt.token_ids
    # Random words have no natural end; a data set's prompts do.
    fixed = {} if args.dataset_path is not None else {"ignore_eos": True}
    return body | {"prompt": asked} | fixed | dict(prompt.sampling)


async def one_request(endpoint: Endpoint, body: dict[str, Any], gate: asyncio.Semaphore) -> Shot:
    shot = Shot()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with gate:
        shot.sent_s = time.perf_counter()
        try:
            async for event in post_events(endpoint, path, body):
                take_event(shot, event)
        except HttpFailure as error:
            shot.error = str(error)
        shot.done_s = time.perf_counter()
    return shot


def take_event(shot: Shot, event: dict[str, Any]) -> None:
    for choice in event.get("choices", ()):
        if choice.get("text") or choice.get("delta", {}).get("content"):
            shot.arrivals_s.append(time.perf_counter())
    if usage := event.get("usage"):
        shot.num_in = usage["prompt_tokens"]
        shot.num_out = usage["completion_tokens"]


def summarise(shots: list[Shot], elapsed_s: float, args: Namespace) -> dict[str, Any]:
    good = [shot for shot in shots if shot.error is None]
    seen = [shot for shot in good if shot.arrivals_s]
    num_out = sum(shot.num_out for shot in good)
    rate = args.request_rate
    tpot = [
        (shot.arrivals_s[-1] - shot.arrivals_s[0]) / (shot.num_out - 1)
        for shot in seen
        if shot.num_out > 1
    ]
    return {
        "num_prompts": len(shots),
        "completed": len(good),
        "failed": len(shots) - len(good),
        "request_rate": rate if math.isfinite(rate) else "inf",
        "max_concurrency": args.max_concurrency,
        "elapsed_s": round(elapsed_s, 4),
        "requests_per_s": round(len(good) / elapsed_s, 4),
        "input_tokens": sum(shot.num_in for shot in good),
        "output_tokens": num_out,
        "output_tokens_per_s": round(num_out / elapsed_s, 2),
        "ttft_ms": spread([shot.arrivals_s[0] - shot.sent_s for shot in seen], 1e3),
        "tpot_ms": spread(tpot, 1e3),
        "itl_ms": spread([gap for shot in seen for gap in shot.gaps_s], 1e3),
        "e2e_ms": spread([shot.done_s - shot.sent_s for shot in good], 1e3),
    }


def table(result: dict[str, Any]) -> list[tuple[str, str]]:
    counts = f"{result['completed']} completed, {result['failed']} failed"
    asked = f"{result['request_rate']}/s asked, {result['requests_per_s']:.2f}/s served"
    return [
        ("Requests", f"{counts} in {result['elapsed_s']:.2f} s"),
        ("Request rate", asked),
        ("Output", f"{result['output_tokens_per_s']:,.1f} tok/s"),
        *spread_rows("Time to first token", "ms", result["ttft_ms"]),
        *spread_rows("Time per output token", "ms", result["tpot_ms"]),
        *spread_rows("Inter-token latency", "ms", result["itl_ms"]),
        *spread_rows("End to end", "ms", result["e2e_ms"]),
        *acceptance_rows(result),
    ]


async def scrape(endpoint: Endpoint) -> dict[str, float]:
    """The server's counters of drafts by stem, whoever's prefix they carry; empty without any."""
    try:
        text = await get(endpoint, "/metrics")
    except HttpFailure:
        return {}
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        stem = name.partition("{")[0].partition(":")[2]
        if stem.startswith("spec_decode_num_") and "per_pos" not in stem:
            with contextlib.suppress(ValueError):
                found[stem] = found.get(stem, 0.0) + float(value)
    return found


def drafts_between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    def gained(what: str) -> float:
        name = f"spec_decode_num_{what}_total"
        return after.get(name, 0.0) - before.get(name, 0.0)

    return acceptance(gained("drafts"), gained("draft_tokens"), gained("accepted_tokens"))


@contextlib.contextmanager
def own_server(keywords: dict[str, Any]) -> Iterator[Endpoint]:
    """`paceline serve` with these options on a free port, for the length of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = Endpoint("127.0.0.1", probe.getsockname()[1])
    settings = {"speculative_config": "none", **keywords, "port": endpoint.port}
    settings |= {"host": endpoint.host, "enable_request_logging": False}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(settings, file)
        file.flush()
        command = [sys.executable, "-m", "paceline", "serve", "--config", file.name]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            asyncio.run(_until_ready(process, endpoint))
            yield endpoint
        finally:
            process.terminate()
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _until_ready(process: subprocess.Popen[bytes], endpoint: Endpoint) -> None:
    deadline_s = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline_s:
        if (code := process.poll()) is not None:
            raise EngineDead(f"The server ended with code {code} before it was ready.")
        with contextlib.suppress(HttpFailure):
            await get(endpoint, "/readyz")
            return
        await asyncio.sleep(0.1)
    raise EngineDead(f"The server was not ready after {_START_LIMIT_S:.0f} s.")
