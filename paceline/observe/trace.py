"""Spans of the engine loop and of the device, kept in a ring and written as a Chrome trace.

Callers pass all times, in seconds of one clock.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# Lanes of the host in the order of a loop iteration, then the lane of the device.
LANES = ("plan", "agree", "launch", "bind", "publish", "wait", "commit", "device")
CAPACITY = 6 * 16_384  # most steps have six spans

_WORDS = 4  # lane, step, start, end
# Process ids in the trace, two per replica, because the viewer groups lanes by process.
_HOST, _DEVICE = 1, 2


class Span(NamedTuple):
    """One stage of one step. Seconds."""

    lane: str
    step: int
    start_s: float
    end_s: float
    replica: int = 0


class TraceRing:
    """The newest spans, in memory that is allocated once."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._words = array("d", bytes(8 * _WORDS * capacity))
        self._capacity = capacity
        self._count = 0  # spans ever added
        self._num_taken = 0  # of those, how many `take` has returned or skipped

    def add(self, lane: str, step: int, start_s: float, end_s: float) -> None:
        at = self._count % self._capacity * _WORDS
        words = self._words
        words[at] = LANES.index(lane)
        words[at + 1] = step
        words[at + 2] = start_s
        words[at + 3] = end_s
        self._count += 1

    def take(self) -> bytes:
        """The spans since the last call that are still kept, oldest first."""
        first = max(self._num_taken, self._count - self._capacity)
        num_new, self._num_taken = self._count - first, self._count
        if not num_new:
            return b""
        begin, end = (n % self._capacity * _WORDS for n in (first, self._count))
        words = self._words
        return (words[begin:end] if begin < end else words[begin:] + words[:end]).tobytes()


def newest_spans(data: bytes, most: int) -> bytes:
    """The end of packed spans."""
    return data[-8 * _WORDS * most :]


def unpack_spans(data: bytes, replica: int = 0) -> list[Span]:
    words = array("d")
    words.frombytes(data)
    columns = (words[i::_WORDS] for i in range(_WORDS))
    return [
        Span(LANES[int(lane)], int(step), start_s, end_s, replica)
        for lane, step, start_s, end_s in zip(*columns, strict=True)
    ]


def chrome_trace(spans: Iterable[Span], about: Mapping[str, Any]) -> dict[str, Any]:
    """The format of ui.perfetto.dev and chrome://tracing. Times count from the first span."""
    ordered = sorted(spans, key=lambda span: span.start_s)
    origin_s = ordered[0].start_s if ordered else 0.0
    used = {(span.replica, span.lane) for span in ordered}
    events = []
    replicas = sorted({0, *(replica for replica, _ in used)})
    for replica in replicas:
        which = f" of replica {replica}" if len(replicas) > 1 else ""
        for lane, side in (("plan", "host"), ("device", "device")):
            process = _process(lane, replica)
            events.append(_metadata("process_name", process, 0, name=f"{side}{which}"))
    for replica, lane in sorted(used, key=lambda key: (key[0], LANES.index(key[1]))):
        number, process = LANES.index(lane), _process(lane, replica)
        events.append(_metadata("thread_name", process, number, name=lane))
        events.append(_metadata("thread_sort_index", process, number, sort_index=number))
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
    head = json.dumps(trace)[:-1]  # one event per line, so that files can be read and compared
    path.write_text(f'{head}, "traceEvents": [\n{events}\n]}}\n', encoding="utf-8")


def _process(lane: str, replica: int) -> int:
    return 2 * replica + (_DEVICE if lane == "device" else _HOST)


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}
