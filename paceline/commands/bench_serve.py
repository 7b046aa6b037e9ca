"""`paceline bench serve`: an open-loop load on a server.

Requests are sent at scheduled times, whether or not earlier ones have been answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import re
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
from paceline.commands.datasets import DEFAULT_OUTPUT_LEN, Dataset, Tokenize, open_dataset
from paceline.commands.http_stream import (
    Endpoint,
    RequestFailed,
    Unreachable,
    first_model,
    get,
    post,
    post_events,
    reading,
)
from paceline.commands.prompts import PromptRecord
from paceline.commands.report import (
    acceptance,
    acceptance_rows,
    engine_rows,
    machine,
    publish,
    short,
    spread,
    spread_rows,
    token_latency_rows,
)
from paceline.errors import ConfigError, EngineDead
from paceline.observe.progress import ProgressLine, StatusLine

_START_LIMIT_S = 600.0
_STOP_LIMIT_S = 40.0
_SHOWN_LOG_LINES = 5
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ENGINE = ("device", "dtype", "drafter")  # labels of paceline:engine_info


@dataclass
class RequestTiming:
    """Times and counts of one request. Times are time.perf_counter."""

    sent_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    done_s: float = 0.0
    num_in: int = 0
    num_out: int = 0
    error: str | None = None

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.arrivals_s)]


@dataclass
class Scraped:
    """Of /metrics: draft counters by name, accepted drafts by position, and what the engine is."""

    counters: dict[str, float] = field(default_factory=dict)
    per_position: dict[int, float] = field(default_factory=dict)
    engine: dict[str, str] = field(default_factory=dict)


def run(args: Namespace) -> int:
    if not args.request_rate > 0 or not args.burstiness > 0:
        raise ConfigError("--request-rate and --burstiness must be above 0.")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency is {args.max_concurrency}; it must be at least 1.")
    dataset, keywords = open_dataset(args), engine_keywords(args)
    if args.base_url is not None:
        if given := sorted(set(keywords) - {"speculative_config", "seed"}):
            flags = ", ".join(map(flag, given))
            raise ConfigError(
                f"--base-url measures a running server; give {flags} when you start that server."
            )
        return measure(args, Endpoint.parse(args.base_url, args.api_key), dataset)
    with own_server(keywords) as endpoint:
        return measure(args, endpoint, dataset)


def measure(args: Namespace, endpoint: Endpoint, dataset: Dataset) -> int:
    model, before = asyncio.run(first_look(endpoint))
    try:
        prompts = dataset(tokenizer_of(endpoint, model))
    except RequestFailed as error:
        raise EngineDead(f"{endpoint.url} does not count the prompts' tokens: {error}") from None
    timings = asyncio.run(send_requests(args, endpoint, model, prompts))
    after = asyncio.run(scrape(endpoint))
    result = summarise(timings, args) | drafts_between(before, after)
    engine = {name: after.engine.get(name, "not reported") for name in _ENGINE}
    record = {"bench": "serve", "model": model, **engine, "machine": machine(), "results": result}
    publish(record, engine_rows(model, **engine) + table(result), args.output_json)
    failed = [timing.error for timing in timings if timing.error]
    if failed:
        print(f"paceline: {len(failed)} requests failed, the first: {failed[0]}", file=sys.stderr)
    return 1 if failed else 0


async def first_look(endpoint: Endpoint) -> tuple[str, Scraped]:
    """The name of the model, and the counters before the load."""
    try:
        return (await first_model(endpoint))["id"], await scrape(endpoint)
    except RequestFailed as error:
        where = "" if isinstance(error, Unreachable) else f"{endpoint.url} does not serve: "
        raise EngineDead(f"{where}{error}") from None


def tokenizer_of(endpoint: Endpoint, model: str) -> Tokenize | None:
    """The server's tokenizer; None if the server has no /tokenize."""

    def tokenize(text: str) -> list[int]:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        found = asyncio.run(post(endpoint, "/tokenize", body))
        with reading("/tokenize"):
            return [int(token) for token in found["tokens"]]

    try:
        tokenize("a")
    except RequestFailed:
        return None
    return tokenize


async def send_requests(
    args: Namespace, endpoint: Endpoint, model: str, prompts: list[PromptRecord]
) -> list[RequestTiming]:
    """Send each request at its scheduled time."""
    gaps = random.Random(args.seed or 0)
    limiter = asyncio.Semaphore(args.max_concurrency or len(prompts))
    progress = ProgressLine(len(prompts), "Requests")
    tasks: list[asyncio.Task[RequestTiming]] = []
    due_s = time.perf_counter()
    for prompt in prompts:
        await asyncio.sleep(due_s - time.perf_counter())
        timing = one_request(endpoint, request_body(prompt, model, args), limiter)
        tasks.append(asyncio.create_task(timing))
        tasks[-1].add_done_callback(lambda t: progress.update(1, t.result().num_out))
        if math.isfinite(args.request_rate):
            scale = 1 / (args.request_rate * args.burstiness)
            due_s += gaps.gammavariate(args.burstiness, scale)
    timings = await asyncio.gather(*tasks)
    progress.close()
    return timings


def request_body(prompt: PromptRecord, model: str, args: Namespace) -> dict[str, Any]:
    body = {
        "model": model,
        "max_tokens": args.output_len or DEFAULT_OUTPUT_LEN,
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if args.ignore_eos:
        body["ignore_eos"] = True
    if prompt.messages is not None:
        return body | {"messages": prompt.messages} | dict(prompt.sampling)
    asked = prompt.text if prompt.token_ids is None else prompt.token_ids
    return body | {"prompt": asked} | dict(prompt.sampling)


async def one_request(
    endpoint: Endpoint, body: dict[str, Any], limiter: asyncio.Semaphore
) -> RequestTiming:
    timing = RequestTiming()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with limiter:
        timing.sent_s = time.perf_counter()
        try:
            async for event in post_events(endpoint, path, body):
                with reading(path):
                    take_event(timing, event)
        except RequestFailed as error:
            timing.error = str(error)
        timing.done_s = time.perf_counter()
    return timing


def take_event(timing: RequestTiming, event: dict[str, Any]) -> None:
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        parts = ("content", "reasoning", "reasoning_content", "tool_calls")
        if choice.get("text") or any(delta.get(part) for part in parts):
            timing.arrivals_s.append(time.perf_counter())
    if usage := event.get("usage"):
        timing.num_in = usage["prompt_tokens"]
        timing.num_out = usage["completion_tokens"]


def summarise(timings: list[RequestTiming], args: Namespace) -> dict[str, Any]:
    elapsed_s = max(t.done_s for t in timings) - min(t.sent_s for t in timings)
    good = [timing for timing in timings if timing.error is None]
    seen = [timing for timing in good if timing.arrivals_s]
    num_out = sum(timing.num_out for timing in good)
    rate = args.request_rate
    tpot = [
        (timing.arrivals_s[-1] - timing.arrivals_s[0]) / (timing.num_out - 1)
        for timing in seen
        if timing.num_out > 1
    ]
    return {
        "num_prompts": len(timings),
        "completed": len(good),
        "failed": len(timings) - len(good),
        "request_rate": rate if math.isfinite(rate) else "inf",
        "max_concurrency": args.max_concurrency,
        "elapsed_s": round(elapsed_s, 4),
        "requests_per_s": round(len(good) / elapsed_s, 4),
        "input_tokens": sum(timing.num_in for timing in good),
        "output_tokens": num_out,
        "output_tokens_per_s": round(num_out / elapsed_s, 2),
        "ttft_ms": spread([timing.arrivals_s[0] - timing.sent_s for timing in seen], 1e3),
        "tpot_ms": spread(tpot, 1e3),
        "itl_ms": spread([gap for timing in seen for gap in timing.gaps_s], 1e3),
        "e2e_ms": spread([timing.done_s - timing.sent_s for timing in good], 1e3),
    }


def table(result: dict[str, Any]) -> list[tuple[str, str]]:
    counts = f"{result['completed']} completed, {result['failed']} failed"
    asked = f"{result['request_rate']}/s asked, {short(result['requests_per_s'])}/s served"
    return [
        ("Requests", f"{counts} in {short(result['elapsed_s'])} s"),
        ("Request rate", asked),
        ("Tokens", f"{result['input_tokens']:,} in, {result['output_tokens']:,} out"),
        ("Output", f"{short(result['output_tokens_per_s'])} tok/s"),
        *token_latency_rows(result),
        *spread_rows("Inter-token latency", "ms", result["itl_ms"]),
        *spread_rows("End to end", "ms", result["e2e_ms"]),
        *acceptance_rows(result),
    ]


async def scrape(endpoint: Endpoint) -> Scraped:
    """What /metrics says, under any prefix (paceline:, vllm:). Empty if there is none."""
    found = Scraped()
    try:
        text = await get(endpoint, "/metrics")
    except RequestFailed:
        return found
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        stem, labels = name.partition("{")[0].partition(":")[2], dict(_LABEL.findall(name))
        with contextlib.suppress(ValueError, KeyError):
            if stem == "engine_info":
                found.engine = labels
            elif stem == "spec_decode_num_accepted_tokens_per_pos_total":
                position = int(labels["position"])
                found.per_position[position] = found.per_position.get(position, 0) + float(value)
            elif stem.startswith("spec_decode_num_"):
                found.counters[stem] = found.counters.get(stem, 0.0) + float(value)
    return found


def drafts_between(before: Scraped, after: Scraped) -> dict[str, Any]:
    def gained(what: str) -> float:
        name = f"spec_decode_num_{what}_total"
        return after.counters.get(name, 0.0) - before.counters.get(name, 0.0)

    positions = sorted(after.per_position)
    per_position = [after.per_position[i] - before.per_position.get(i, 0) for i in positions]
    totals = (gained("drafts"), gained("draft_tokens"), gained("accepted_tokens"))
    return acceptance(*totals, per_position)


@contextlib.contextmanager
def own_server(keywords: dict[str, Any]) -> Iterator[Endpoint]:
    """Within the block, `paceline serve` runs with these options on a free port.

    Its log is shown only if it fails.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = Endpoint("127.0.0.1", probe.getsockname()[1])
    settings = {"speculative_config": "none", **keywords, "port": endpoint.port}
    settings |= {"host": endpoint.host, "enable_request_logging": False}
    with (
        tempfile.NamedTemporaryFile("w", suffix=".json") as file,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
    ):
        json.dump(settings, file)
        file.flush()
        command = [sys.executable, "-m", "paceline", "serve", "--config", file.name]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        status = StatusLine()
        status.show("Starting the server")
        try:
            try:
                asyncio.run(_until_ready(process, endpoint))
            finally:
                status.clear()
            yield endpoint
            if process.poll() is not None:
                raise EngineDead(f"The server ended with code {process.returncode}.")
        except EngineDead as error:
            log.seek(0)
            last = [line.rstrip() for line in log if line.strip()][-_SHOWN_LOG_LINES:]
            raise EngineDead("\n  ".join([str(error), *last])) from None
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
            raise EngineDead(f"The server ended with code {code} before it was ready:")
        with contextlib.suppress(RequestFailed):
            await get(endpoint, "/readyz")
            return
        await asyncio.sleep(0.1)
    raise EngineDead(f"The server was not ready after {_START_LIMIT_S:.0f} s.")
