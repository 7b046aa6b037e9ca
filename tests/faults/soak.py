"""A server at twice its saturation for a while, with clients as they are: some leave, some read
slowly, some come all at once. MTP under two replicas that share their experts.
"""

from __future__ import annotations

import http.client
import json
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.serving import ServerProcess, started
from tests.faults.rounds import MTP, save_models
from tests.server.processes import resident_bytes
from tests.server.serving import JSON

NUM_SLOTS = 8  # of both replicas
NUM_CLIENTS = 2 * NUM_SLOTS
MAX_WAITING = 24
BURST = 20
_LOOK_S = 0.25
_CLIENT_TIMEOUT_S = 120.0
_IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass
class SoakReport:
    seconds: float
    outcomes: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    # Between two looks that found new steps: an upper bound, as looks are _LOOK_S apart.
    longest_still_s: float = 0.0
    memory_slope: float = 0.0  # bytes per minute of all processes, over the second half
    memory_bytes: int = 0
    after: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.seconds:.0f} s: {dict(self.outcomes)}; steps never still for more than "
            f"{self.longest_still_s:.2f} s; memory {self.memory_bytes / 2**20:.0f} MiB, "
            f"{self.memory_slope / 2**20:+.2f} MiB a minute; after the end {self.after}; "
            f"{len(self.complaints)} complaints {self.complaints[:5]}"
        )


def soak(folder: Path, log: Path, seconds: float, seed: int = 1) -> SoakReport:
    save_models(folder)
    flags = "--data-parallel-size 2 --enable-expert-parallel --dtype float32 --cpu-threads 1"
    flags += f" --device cpu --port 0 --max-num-seqs {NUM_SLOTS // 2} --max-waiting {MAX_WAITING}"
    flags += " --kv-cache-memory-bytes 8M"  # its pages are soon all touched: a leak shows
    flags += " --max-queue-wait 30 --stall-timeout 30 --no-enable-request-logging"
    arguments = ["serve", str(folder / "experts"), *flags.split()]
    with started([*arguments, "--speculative-config", json.dumps(MTP)], log) as process:
        process.await_ready()
        report = _Soak(process, seconds, seed).run()
        process.await_idle()
        report.after = {name: process.gauge(name) for name in _IDLE}
        process.send_signal(signal.SIGTERM)
        if (code := process.await_exit()) != 0:
            report.complaints.append(f"exit code {code}")
        if "Traceback" in process.said():
            report.complaints.append("a traceback in the log")
    return report


class _Soak:
    def __init__(self, process: ServerProcess, seconds: float, seed: int) -> None:
        self._process = process
        self._seed = seed
        self._report = SoakReport(seconds)
        self._ends_s = time.monotonic() + seconds
        self._lock = threading.Lock()

    def run(self) -> SoakReport:
        threads = [
            threading.Thread(target=self._client, args=(number,)) for number in range(NUM_CLIENTS)
        ]
        threads.append(threading.Thread(target=self._bursts))
        for thread in threads:
            thread.start()
        self._watch()
        for thread in threads:
            thread.join()
        return self._report

    # ---- clients

    def _client(self, number: int) -> None:
        draw = random.Random(f"{self._seed}-{number}")
        while time.monotonic() < self._ends_s:
            self._ask(draw)

    def _bursts(self) -> None:
        draw = random.Random(f"{self._seed}-burst")
        while time.monotonic() < self._ends_s:
            together = [
                threading.Thread(target=self._ask, args=(random.Random(draw.random()), 0.0))
                for _ in range(BURST)
            ]
            for thread in together:
                thread.start()
            for thread in together:
                thread.join()
            time.sleep(draw.uniform(0.5, 3.0))

    def _ask(self, draw: random.Random, rest_s: float = 0.5) -> None:
        kind = draw.choice(("whole", "stream", "stream", "leaves", "slow"))
        connection = http.client.HTTPConnection(
            "127.0.0.1", self._process.port, timeout=_CLIENT_TIMEOUT_S
        )
        try:
            body = json.dumps({**_fields(draw), "stream": kind != "whole"})
            connection.request("POST", "/v1/completions", body, JSON)
            outcome = self._read(connection.getresponse(), kind, draw)
        except (OSError, http.client.HTTPException) as error:
            outcome = f"{kind}: {type(error).__name__}: {error}"
            self._complain(outcome)
        finally:
            connection.close()
        with self._lock:
            self._report.outcomes[outcome] += 1
        if outcome == "429":
            time.sleep(draw.uniform(0.0, rest_s))

    def _read(self, response: http.client.HTTPResponse, kind: str, draw: random.Random) -> str:
        if response.status == 429:
            if response.getheader("Retry-After") is None:
                self._complain("429 without Retry-After")
            response.read()
            return "429"
        if response.status != 200:
            self._complain(f"status {response.status}: {response.read()[:200]!r}")
            return str(response.status)
        if kind == "leaves":
            response.read1(draw.choice((1, 200)))
            return "left"
        body = b""
        while chunk := response.read1(64 if kind == "slow" else 65536):
            body += chunk
            if kind == "slow" and draw.random() < 0.1:
                time.sleep(0.05)
        is_whole = b"[DONE]" in body[-20:] if kind != "whole" else b'"finish_reason":"' in body
        if not is_whole or b'"error"' in body:
            is_late = b"--max-queue-wait" in body  # a stream that had begun with a comment
            if not is_late:
                self._complain(f"{kind}: cut or failed: {body[-200:]!r}")
            return "late" if is_late else "cut"
        return kind

    def _complain(self, what: str) -> None:
        with self._lock:
            self._report.complaints.append(what)

    # ---- the watcher

    def _watch(self) -> None:
        pids, samples = self._process.pids, list[tuple[float, int]]()
        num_steps, moved_s = 0.0, time.monotonic()
        while (now_s := time.monotonic()) < self._ends_s:
            steps = self._process.gauge("step_bubble_seconds_count")
            now_s = time.monotonic()
            self._report.longest_still_s = max(self._report.longest_still_s, now_s - moved_s)
            if steps != num_steps:
                num_steps, moved_s = steps, now_s
            samples.append((now_s, sum(map(resident_bytes, pids))))
            time.sleep(_LOOK_S)
        half = samples[len(samples) // 2 :]
        self._report.memory_bytes = samples[-1][1]
        self._report.memory_slope = 60.0 * _slope(half)


def _slope(samples: list[tuple[float, int]]) -> float:
    """Bytes per second, by least squares."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0


def _fields(draw: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt": " ".join(
            draw.choices(("fox", "dog", "the", "12", "jumps"), k=draw.choice((1, 8, 60)))
        ),
        "max_tokens": draw.choice((1, 8, 40, 120)),
        "temperature": draw.choice((0.0, 0.7, 1.0)),
        "ignore_eos": draw.random() < 0.5,
    }
    for name, value in (
        ("n", 2),
        ("seed", draw.randrange(1000)),
        ("top_p", 0.9),
        ("top_k", 10),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.3),
        ("repetition_penalty", 1.1),
        ("logprobs", 2),
        ("stop", ["e"]),
        ("min_tokens", 1),
    ):
        if draw.random() < 0.15:
            fields[name] = value
    return fields
