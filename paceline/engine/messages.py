"""Messages between the front and the engine, and their encoding as bytes.

One message per step, rows as numpy arrays. No pickle; knows no queue and no socket.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from paceline.request import (
    TOKEN_ID_PARAMS,
    EngineRequest,
    SamplingParams,
    StructuredOutputsParams,
)
from paceline.scheduler.events import Ended as Ended
from paceline.scheduler.events import Events as Events
from paceline.scheduler.snapshots import SnapshotStats
from paceline.step import Ints, RunnerInfo, StepResult, TokenLogprobs

# The first byte of every message. `Control` has the others.
_SUBMIT, _ABORT, _WAKE, _JOINED = 1, 2, 8, 11
_STEP, _READY, _PROGRESS, _DIED, _TRACED = 16, 17, 18, 19, 21


class Control(IntEnum):
    """Messages that are only a kind: their one byte."""

    DRAIN = 3  # to the engine: finish what was submitted, then stop
    STOP = 4  # to the engine: stop now and drop what runs
    RESET_PREFIX_CACHE = 5  # to the engine: forget cached prefixes; running requests keep pages
    START_TRACE = 6  # to the engine: record the stages of every step
    TAKE_TRACE = 7  # to the engine: send what was recorded, and stop recording
    COMPILED = 9  # to the engine, from itself: a grammar is ready
    READ_TRACE = 10  # to the engine: send what was recorded since the last time, and go on
    STOPPED = 20  # to the front: the last message of an engine that was asked to stop or drain


# kind, prompt length, output length, uid, priority, arrival
_SUBMIT_HEAD = struct.Struct("<B3xIIqqd")
_STEP_HEAD = struct.Struct("<B3xIIIIIIIqd")  # a multiple of 8, and so are the times after it
_STEP_TIMES = struct.Struct("<dddd")
_SNAPSHOTS = struct.Struct("<dqqq")
_LENGTH = struct.Struct("<I")  # of a submit among others
_LOGPROBS_HEAD = struct.Struct("<iii")  # row, positions, width

RESTED = -1.0  # as idle_s: no work was waiting, so the idle time is no bubble


# ---- front -> engine


@dataclass(frozen=True, slots=True)
class Abort:
    uids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wake:
    """From another replica: agreement number `step` is next."""

    step: int


# ---- engine -> front


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine serves."""

    info: RunnerInfo


@dataclass(frozen=True, slots=True)
class StartupProgress:
    stage: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Died:
    """Why a rank ended, as it says itself."""

    reason: str
    after_another: bool = False  # another rank seems to have ended first
    kind: str = ""  # class name of the error, if the rank could not start


@dataclass(frozen=True, slots=True)
class Traced:
    """Recorded stages, packed by observe.trace."""

    spans: bytes


class StepTimes(NamedTuple):
    """Seconds of one device step."""

    idle_s: float  # the bubble: device idle time before the step, or RESTED
    busy_s: float  # device time
    host_s: float  # time of the loop: plan, launch, commit and publish, without waiting
    mask_wait_s: float = -1.0  # device time that waited for masks; -1: the step needed none


@dataclass(slots=True)
class Gauges:
    """The engine's load. Rows, steps and times count from the previous message on."""

    num_running: int = 0
    kv_usage: float = 0.0
    num_wasted_rows: int = 0  # rows computed for requests that had ended
    num_steps: int = 0  # device steps
    times: list[StepTimes] = field(default_factory=list)  # of steps that have ended
    # Of recurrent state; its counts are since the start.
    snapshots: SnapshotStats = field(default_factory=SnapshotStats)


@dataclass(slots=True)
class StepMessage:
    """One step's result and what happened around it.

    prompt_logprobs come in prompt order, each position once, also after a preemption.
    """

    result: StepResult
    events: Events = field(default_factory=Events)
    gauges: Gauges = field(default_factory=Gauges)


EngineMessage = (
    EngineRequest | Abort | Wake | Control | Ready | StartupProgress | StepMessage | Died | Traced
)


# ---- submit and control


def encode_submit(request: EngineRequest) -> bytes:
    prompt = np.asarray(request.prompt_token_ids, np.int32)
    output = np.asarray(request.output_token_ids, np.int32)
    head = _SUBMIT_HEAD.pack(
        _SUBMIT, len(prompt), len(output), request.uid, request.priority, request.arrival_s
    )
    rest = {
        "params": _params_to_json(request.params),
        "eos": request.eos_token_ids,
        "bad": request.bad_word_ids,
    }
    return b"".join((head, prompt.tobytes(), output.tobytes(), json.dumps(rest).encode()))


def decode_submit(data: bytes) -> EngineRequest:
    _, length, num_output, uid, priority, arrival_s = _SUBMIT_HEAD.unpack_from(data)
    end = _SUBMIT_HEAD.size + 4 * (length + num_output)
    tokens = array("i")
    tokens.frombytes(data[_SUBMIT_HEAD.size : end])
    rest = json.loads(data[end:].decode())
    return EngineRequest(
        uid=uid,
        prompt_token_ids=tokens[:length],
        output_token_ids=tokens[length:],
        params=_params_from_json(rest["params"]),
        eos_token_ids=tuple(rest["eos"]),
        bad_word_ids=tuple(map(tuple, rest["bad"])),
        priority=priority,
        arrival_s=arrival_s,
    )


def _params_to_json(params: SamplingParams) -> dict[str, Any]:
    """Only fields that differ from the defaults."""
    values = {f.name: getattr(params, f.name) for f in fields(params)}
    values = {name: value for name, value in values.items() if value != _DEFAULTS[name]}
    for name in TOKEN_ID_PARAMS:
        if isinstance(ids := values.get(name, ()), Mapping):  # JSON keys are strings
            values[name] = [[int(token), float(value)] for token, value in ids.items()]
        elif ids:
            values[name] = [int(token) for token in ids]
    if params.extra_args is not None:
        values["extra_args"] = dict(params.extra_args)
    if params.structured_outputs is not None:
        values["structured_outputs"] = params.structured_outputs.as_dict()
    return values


def _params_from_json(values: dict[str, Any]) -> SamplingParams:
    """Without checks; the engine checks the request as a whole."""
    for name, value in values.items():
        if type(value) is list:
            values[name] = dict(value) if name in _ID_MAPPINGS else tuple(value)
    if "structured_outputs" in values:
        values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
    params = object.__new__(SamplingParams)
    params.__dict__.update(_DEFAULTS)
    params.__dict__.update(values)
    return params


_ID_MAPPINGS = {f.name for f in fields(SamplingParams) if str(f.type).startswith("Mapping[int")}
_DEFAULTS = {f.name: getattr(SamplingParams(), f.name) for f in fields(SamplingParams)}


def submit_uid(data: bytes) -> int | None:
    """The uid of a submit, without decoding it. None for another message."""
    return int(_SUBMIT_HEAD.unpack_from(data)[3]) if data[0] == _SUBMIT else None


def join_submits(submits: Sequence[bytes]) -> bytes:
    """One message out of several submits, which the engine reads together."""
    if len(submits) == 1:
        return submits[0]
    return bytes((_JOINED,)) + b"".join(_LENGTH.pack(len(s)) + s for s in submits)


def split_submits(data: bytes) -> list[bytes]:
    """The submits of a joined message; any other message alone."""
    if data[0] != _JOINED:
        return [data]
    submits, start = [], 1
    while start < len(data):
        first = start + _LENGTH.size
        start = first + _LENGTH.unpack_from(data, start)[0]
        submits.append(data[first:start])
    return submits


def encode_abort(uids: Sequence[int]) -> bytes:
    return bytes((_ABORT,)) + np.asarray(uids, np.int64).tobytes()


def decode_abort(data: bytes) -> list[int] | None:
    """The uids of an abort. None for another message."""
    return np.frombuffer(data, np.int64, offset=1).tolist() if data[0] == _ABORT else None


def encode(message: Control | Wake | Ready | StartupProgress | Died | Traced) -> bytes:
    """Messages that are rare: one byte and, where they hold more, JSON."""
    match message:
        case Traced(spans=spans):
            return bytes((_TRACED,)) + spans
        case Ready(info=info):
            return _with_json(_READY, asdict(info))
        case StartupProgress(stage=stage, fraction=fraction):
            return _with_json(_PROGRESS, [stage, fraction])
        case Died():
            return _with_json(_DIED, [message.reason, message.after_another, message.kind])
        case Wake(step=step):
            return bytes((_WAKE,)) + step.to_bytes(8, "little")
        case _:
            return bytes((message,))


def _with_json(kind: int, value: Any) -> bytes:
    return bytes((kind,)) + json.dumps(value).encode()


def decode(data: bytes) -> EngineMessage:
    """Any message, told apart by its first byte."""
    kind = data[0]
    if kind == _STEP:
        return decode_step(data)
    if kind == _SUBMIT:
        return decode_submit(data)
    if (aborted := decode_abort(data)) is not None:
        return Abort(tuple(aborted))
    return _decode_rare(kind, data)


def _decode_rare(kind: int, data: bytes) -> EngineMessage:
    if kind == _TRACED:
        return Traced(data[1:])
    if len(data) == 1:
        return Control(kind)
    if kind == _WAKE:
        return Wake(int.from_bytes(data[1:], "little"))
    value = json.loads(data[1:])
    if kind == _READY:
        value["draft_methods"] = tuple(value["draft_methods"])
        return Ready(RunnerInfo(**value))
    if kind == _PROGRESS:
        return StartupProgress(*value)
    assert kind == _DIED, f"message of unknown kind {kind}"
    return Died(*value)


# ---- steps


def encode_step(result: StepResult, events: Events, gauges: Gauges) -> bytes:
    """Called on the loop thread. The number of copies does not depend on the number of rows."""
    g = gauges
    num_rows, width = result.token_BW.shape
    packed = _pack_events(events) if events else b""
    head = _STEP_HEAD.pack(
        _STEP, num_rows, width, len(packed), len(g.times), g.num_running,
        g.num_wasted_rows, g.num_steps, result.step, g.kv_usage,
    )  # fmt: skip
    parts = [
        head,
        *[_STEP_TIMES.pack(*times) for times in g.times],
        _SNAPSHOTS.pack(*g.snapshots),
        result.uid_B.tobytes(),
        result.count_B.tobytes(),
        result.done_B.tobytes(),
        result.num_drafts_B.tobytes(),
        result.num_accepted_B.tobytes(),
        _column(result.num_forced_B, num_rows),
        result.token_BW.tobytes(),
        packed,
    ]
    if result.logprobs or result.prompt_logprobs:
        _append_logprobs(parts, result.logprobs)
        _append_logprobs(parts, result.prompt_logprobs)
    return b"".join(parts)


def _column(values_B: Ints | None, num_rows: int) -> bytes:
    return bytes(4 * num_rows) if values_B is None else values_B.tobytes()


def decode_step(data: bytes) -> StepMessage:
    (_, rows, width, event_bytes, num_times, running, wasted, steps, step,
     kv_usage) = _STEP_HEAD.unpack_from(data)  # fmt: skip
    at = _STEP_HEAD.size + num_times * _STEP_TIMES.size
    times = [StepTimes(*t) for t in _STEP_TIMES.iter_unpack(data[_STEP_HEAD.size : at])]
    snapshots = SnapshotStats(*_SNAPSHOTS.unpack_from(data, at))
    at += _SNAPSHOTS.size
    uid_B = np.frombuffer(data, np.int64, rows, at)
    at += 8 * rows
    columns = np.frombuffer(data, np.int32, 5 * rows, at).reshape(5, rows)
    at += 20 * rows
    token_BW = np.frombuffer(data, np.int32, rows * width, at).reshape(rows, width)
    at += 4 * rows * width
    events = _unpack_events(data[at : at + event_bytes]) if event_bytes else Events()
    at += event_bytes
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    if at < len(data):
        logprobs, at = _read_logprobs(data, at)
        prompt_logprobs, at = _read_logprobs(data, at)
    assert at == len(data), f"step message of {len(data)} bytes ends at {at}"
    count_B, done_B, num_drafts_B, num_accepted_B, num_forced_B = columns
    result = StepResult(step, uid_B, count_B, token_BW, done_B, num_drafts_B, num_accepted_B)
    result.num_forced_B = num_forced_B
    result.logprobs, result.prompt_logprobs = logprobs, prompt_logprobs
    return StepMessage(result, events, Gauges(running, kv_usage, wasted, steps, times, snapshots))


def _pack_events(events: Events) -> bytes:
    """Counts, then numbers, then JSON of the requests that ended without a row."""
    numbers = array("q", (len(events.admitted), len(events.preempted)))
    for pair in events.admitted:
        numbers.extend(pair)
    numbers.extend(events.preempted)
    if not events.ended:
        return numbers.tobytes()
    ended = [(e.uid, e.done, e.reason, e.error, e.param) for e in events.ended]
    return numbers.tobytes() + json.dumps(ended).encode()


def _unpack_events(data: bytes) -> Events:
    num_admitted, num_preempted = struct.unpack_from("<qq", data)
    count = 2 * num_admitted + num_preempted
    numbers = np.frombuffer(data, np.int64, count, 16).tolist()
    pairs = numbers[: 2 * num_admitted]
    admitted = list(zip(pairs[::2], pairs[1::2], strict=True))
    text = data[16 + 8 * count :]
    ended = [Ended(*entry) for entry in json.loads(text)] if text else []
    return Events(admitted, numbers[2 * num_admitted :], ended)


def _append_logprobs(parts: list[bytes], entries: Sequence[TokenLogprobs]) -> None:
    parts.append(len(entries).to_bytes(4, "little"))
    for entry in entries:
        positions, width = entry.ids.shape
        parts.append(_LOGPROBS_HEAD.pack(entry.row, positions, width))
        parts.append(np.asarray(entry.ids, np.int32).tobytes())
        parts.append(np.asarray(entry.values, np.float32).tobytes())
        parts.append(np.asarray(entry.rank, np.int32).tobytes())


def _read_logprobs(data: bytes, at: int) -> tuple[list[TokenLogprobs], int]:
    (count,) = struct.unpack_from("<I", data, at)
    at += 4
    entries = []
    for _ in range(count):
        row, positions, width = _LOGPROBS_HEAD.unpack_from(data, at)
        at += _LOGPROBS_HEAD.size
        cells = positions * width
        ids = np.frombuffer(data, np.int32, cells, at).reshape(positions, width)
        values = np.frombuffer(data, np.float32, cells, at + 4 * cells).reshape(positions, width)
        rank = np.frombuffer(data, np.int32, positions, at + 8 * cells)
        at += 8 * cells + 4 * positions
        entries.append(TokenLogprobs(row, ids, values, rank))
    return entries, at
