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
from statistics import median
from typing import Any

from tests.e2e.serving import ServerProcess, started
from tests.faults.rounds import MTP, save_models
from tests.server.processes import memory_bytes
from tests.server.serving import JSON

NUM_SLOTS = 8  # of both replicas
NUM_CLIENTS = 2 * NUM_SLOTS
MAX_WAITING = 24
BURST = 20
# The soak fails if no step completes for longer than this.
MOST_STILL_S = 1.0
# A soak of this length is judged by its memory. The limit is 50 bytes of each of about 2,000
# requests a minute.
JUDGED_FROM_S = 600.0
FLAT_MIB_A_MINUTE = 0.1
_MOST_POINTS = 300
_LOOK_S = 0.25
_CLIENT_TIMEOUT_S = 120.0
_IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass
class MemoryTrend:
    """The anonymous memory of one process."""

    name: str
    mib: float  # at the end
    slope: float  # MiB a minute over the second half: the median slope of all pairs of samples

    @classmethod
    def of(cls, name: str, samples: list[tuple[float, int]]) -> MemoryTrend:
        """By Theil and Sen: one jump, or a few samples that are off, do not move the median."""
        half = samples[len(samples) // 2 :]
        some = half[:: max(1, len(half) // _MOST_POINTS)]
        slopes = [
            (y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(some) for x2, y2 in some[i + 1 :]
        ]
        slope = 60.0 * median(slopes) if slopes else 0.0
        return cls(name, round(samples[-1][1] / 2**20, 2), round(slope / 2**20, 3))


@dataclass
class SoakReport:
    seconds: float
    outcomes: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    # Without a new step: at least this long for certain, and at most this long. The counter is
    # read over HTTP every _LOOK_S.
    still_at_least_s: float = 0.0
    still_at_most_s: float = 0.0
    memory: list[MemoryTrend] = field(default_factory=list)
    after: dict[str, float] = field(default_factory=dict)

    def misses(self) -> list[str]:
        """What a soak must show and this one does not. Memory grows in the first minutes while
        bounded records fill (the times of the newest 16,384 steps, pages, malloc's arenas), so
        only a long soak is judged by it."""
        found = [*self.complaints]
        found += [
            f"{name} is {value:g} after the end" for name, value in self.after.items() if value
        ]
        if self.still_at_least_s > MOST_STILL_S:
            found.append(f"no step for at least {self.still_at_least_s:.2f} s")
        for process in self.memory if self.seconds >= JUDGED_FROM_S else ():
            if process.slope > FLAT_MIB_A_MINUTE:
                found.append(f"memory of {process.name} grows {process.slope:.3f} MiB a minute")
        return found

    def __str__(self) -> str:
        memory = ", ".join(f"{p.name} {p.mib:.0f} MiB {p.slope:+.3f}" for p in self.memory)
        return (
            f"{self.seconds:.0f} s: {dict(self.outcomes)}; longest time without a step between "
            f"{self.still_at_least_s:.2f} and {self.still_at_most_s:.2f} s; memory, and MiB a "
            f"minute over the second half: {memory}; after the end {self.after}; "
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
            path, fields = _fields(draw)
            body = json.dumps({**fields, "stream": kind != "whole"})
            connection.request("POST", path, body, JSON)
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
        names = self._process_names()
        samples: dict[int, list[tuple[float, int]]] = {pid: [] for pid in names}
        report, num_steps = self._report, -1.0
        seen_s = since_s = looked_s = time.monotonic()  # it was first seen; it may be so since
        while time.monotonic() < self._ends_s:
            began_s = time.monotonic()
            steps = self._process.gauge("step_bubble_seconds_count")
            ended_s = time.monotonic()
            if steps == num_steps:
                report.still_at_least_s = max(report.still_at_least_s, began_s - seen_s)
            else:
                report.still_at_most_s = max(report.still_at_most_s, ended_s - since_s)
                num_steps, seen_s, since_s = steps, ended_s, looked_s
            looked_s = began_s
            for pid, found in samples.items():
                found.append((ended_s, memory_bytes(pid, "RssAnon")))
            time.sleep(_LOOK_S)
        report.memory = [MemoryTrend.of(names[pid], found) for pid, found in samples.items()]

    def _process_names(self) -> dict[int, str]:
        """By process: the front, and the ranks as the kernel names them."""
        front = self._process.popen.pid
        names = {
            pid: Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
            for pid in self._process.pids
        }
        return {front: "front", **{pid: name for pid, name in names.items() if pid != front}}


def _fields(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """The path and the body of a random request."""
    text = " ".join(draw.choices(("fox", "dog", "the", "12", "jumps"), k=draw.choice((1, 8, 60))))
    is_chat = draw.random() < 0.3
    fields: dict[str, Any] = {
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
        ("logprobs", True if is_chat else 2),
        ("stop", ["e"]),
        ("min_tokens", 1),
        ("structured_outputs", {"regex": f"[a-z]{{1,{draw.randrange(2, 30)}}}"}),
    ):
        if draw.random() < 0.15:
            fields[name] = value
    if "structured_outputs" in fields:
        del fields["ignore_eos"]  # nothing may follow the end of the grammar
    if is_chat:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields}
    return "/v1/completions", {"prompt": text, **fields}
