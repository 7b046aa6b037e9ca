"""Spans of the loop and of the device, kept in a ring, and written as a Chrome trace.

Owns the format. Never reads a clock: who records brings its times, all of one clock, in seconds.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# The host's lanes in the order of a turn, then the device's.
LANES = ("plan", "agree", "launch", "bind", "publish", "wait", "commit", "device")
CAPACITY = 6 * 16_384  # a step has six spans as a rule

_WORDS = 4  # lane, step, start, end
# "Processes" of the trace, two for each replica: the viewer groups lanes by them.
_HOST, _DEVICE = 1, 2


class Span(NamedTuple):
    """One stage of one step. Seconds."""

    lane: str
    step: int
    start_s: float
    end_s: float
    replica: int = 0


class TraceRing:
    """The newest spans, in memory that is taken once."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._words = array("d", bytes(8 * _WORDS * capacity))
        self._capacity = capacity
        self._count = 0  # spans ever added

    def add(self, lane: str, step: int, start_s: float, end_s: float) -> None:
        at = self._count % self._capacity * _WORDS
        words = self._words
        words[at] = LANES.index(lane)
        words[at + 1] = step
        words[at + 2] = start_s
        words[at + 3] = end_s
        self._count += 1

    def packed(self) -> bytes:
        """Oldest first."""
        if self._count <= self._capacity:
            return self._words[: self._count * _WORDS].tobytes()
        oldest = self._count % self._capacity * _WORDS
        return (self._words[oldest:] + self._words[:oldest]).tobytes()


def unpack_spans(data: bytes, replica: int = 0) -> list[Span]:
    words = array("d")
    words.frombytes(data)
    columns = (words[i::_WORDS] for i in range(_WORDS))
    return [
        Span(LANES[int(lane)], int(step), start_s, end_s, replica)
        for lane, step, start_s, end_s in zip(*columns, strict=True)
    ]


def chrome_trace(spans: Iterable[Span], about: Mapping[str, Any]) -> dict[str, Any]:
    """What ui.perfetto.dev and chrome://tracing open. Times count from the first span."""
    ordered = sorted(spans, key=lambda span: span.start_s)
    origin_s = ordered[0].start_s if ordered else 0.0
    used = {(span.replica, span.lane) for span in ordered}
    events = []
    replicas = sorted({0, *(replica for replica, _ in used)})
    for replica in replicas:
        which = f" of replica {replica}" if len(replicas) > 1 else ""
        events.append(_name("process_name", _process("plan", replica), 0, f"host{which}"))
        events.append(_name("process_name", _process("device", replica), 0, f"device{which}"))
    for replica, lane in sorted(used, key=lambda key: (key[0], LANES.index(key[1]))):
        number, process = LANES.index(lane), _process(lane, replica)
        events.append(_name("thread_name", process, number, lane))
        events.append(
            {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": process,
                "tid": number,
                "args": {"sort_index": number},
            }
        )
    for span in ordered:
        events.append(
            {
                "ph": "X",
                "name": f"{'step' if span.lane == 'device' else span.lane} {span.step}",
                "cat": span.lane,
                "pid": _process(span.lane, span.replica),
                "tid": LANES.index(span.lane),
                "ts": round((span.start_s - origin_s) * 1e6, 3),
                "dur": round((span.end_s - span.start_s) * 1e6, 3),
                "args": {"step": span.step},
            }
        )
    return {"displayTimeUnit": "ms", "otherData": dict(about), "traceEvents": events}


def write_chrome_trace(path: Path, spans: Iterable[Span], about: Mapping[str, Any]) -> None:
    trace = chrome_trace(spans, about)
    events = ",\n".join(json.dumps(event) for event in trace.pop("traceEvents"))
    head = json.dumps(trace)[:-1]  # one event per line: such a file can be looked at and compared
    path.write_text(f'{head}, "traceEvents": [\n{events}\n]}}\n', encoding="utf-8")


def read_chrome_trace(path: Path) -> list[Span]:
    """The spans of a file that `write_chrome_trace` wrote, in its order."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [
        Span(
            e["cat"],
            e["args"]["step"],
            e["ts"] / 1e6,
            (e["ts"] + e["dur"]) / 1e6,
            (e["pid"] - _HOST) // 2,
        )
        for e in events
        if e["ph"] == "X"
    ]


def _process(lane: str, replica: int) -> int:
    return 2 * replica + (_DEVICE if lane == "device" else _HOST)


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
