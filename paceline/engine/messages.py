"""The bytes between the front process and the engine process: packing and unpacking, both ways.

Never pickles, never looks at a queue or a socket; one message per step, rows as numpy arrays.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from paceline.request import EngineRequest, SamplingParams
from paceline.scheduler.events import Emitted
from paceline.scheduler.events import Ended as Ended
from paceline.scheduler.events import Events as Events
from paceline.step import Ints, Longs, RunnerInfo, TokenLogprobs

# The first byte of every message.
_SUBMIT, _ABORT, _DRAIN, _STOP, _RESET, _START_TRACE, _TAKE_TRACE, _WAKE = range(1, 9)
_STEP, _READY, _PROGRESS, _DIED, _STOPPED, _TRACED = 16, 17, 18, 19, 20, 21

_SUBMIT_HEAD = struct.Struct("<B3xIqqd")  # kind, prompt length, uid, priority, arrival
_STEP_HEAD = struct.Struct("<B3xIIIIIIIqd")  # a multiple of 8, and so are the times after it
_STEP_TIMES = struct.Struct("<ddd")
_LOGPROBS_HEAD = struct.Struct("<iii")  # row, positions, width

RESTED = -1.0  # idle time before a step for which the device was free to rest


# ---- front -> engine


@dataclass(frozen=True, slots=True)
class Submit:
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort:
    uids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what was submitted, then stop."""


@dataclass(frozen=True, slots=True)
class Wake:
    """From another replica: agreement `step` is about to be made."""

    step: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop now; what runs is dropped."""


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget every cached prefix. Running requests keep their pages."""


@dataclass(frozen=True, slots=True)
class StartTrace:
    """Record the stages of every step."""


@dataclass(frozen=True, slots=True)
class TakeTrace:
    """Send what was recorded, and stop recording."""


# ---- engine -> front


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine serves. `extras` is whatever else the front must know, as JSON values."""

    info: RunnerInfo
    extras: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    stage: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Died:
    reason: str
    after_another: bool = False  # another rank seems to have gone first


@dataclass(frozen=True, slots=True)
class Stopped:
    """The last message of an engine that was asked to stop or drain."""


@dataclass(frozen=True, slots=True)
class Traced:
    """What was recorded: observe.trace packs and unpacks it."""

    spans: bytes


class StepTimes(NamedTuple):
    """Seconds of one device step."""

    idle_s: float  # the bubble: device idle time before it; RESTED when no work was waiting
    busy_s: float  # of the device
    host_s: float  # of the loop: plan, launch, commit and publish, without waiting


@dataclass(slots=True)
class Gauges:
    """Where the engine stands. The last three count from the previous message on."""

    step: int = 0
    num_running: int = 0
    kv_usage: float = 0.0
    num_wasted_rows: int = 0  # rows computed for requests that had ended
    num_steps: int = 0  # device steps
    times: list[StepTimes] = field(default_factory=list)  # of the steps that are over for good


@dataclass(slots=True)
class StepMessage:
    """What one step emitted, and what happened around it. Row i belongs to request uid_B[i],
    or to nobody when that is -1.

    token_BW[i, :count_B[i]] are the row's new tokens; done_B[i] != 0 ends the request. The `row`
    of an entry in `logprobs` counts rows of this message; prompt_logprobs come in prompt order,
    each position once, also after a preemption.
    """

    uid_B: Longs
    count_B: Ints
    token_BW: Ints
    done_B: Ints
    num_drafts_B: Ints
    num_accepted_B: Ints
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    events: Events = field(default_factory=Events)
    gauges: Gauges = field(default_factory=Gauges)


Inbound = Submit | Abort | Drain | Wake | Stop | ResetPrefixCache | StartTrace | TakeTrace
Outbound = Ready | Progress | StepMessage | Died | Stopped | Traced
Message = Inbound | Outbound


def without_rows(events: Events, gauges: Gauges) -> StepMessage:
    """A message for events alone."""
    none_B = np.empty(0, np.int32)
    uid_B, token_BW = np.empty(0, np.int64), np.empty((0, 1), np.int32)
    return StepMessage(uid_B, none_B, token_BW, none_B, none_B, none_B, (), (), events, gauges)


# ---- submit and control


def encode_submit(request: EngineRequest) -> bytes:
    prompt = np.asarray(request.prompt_token_ids, np.int32)
    head = _SUBMIT_HEAD.pack(_SUBMIT, len(prompt), request.uid, request.priority, request.arrival_s)
    rest = {
        "params": _params_to_json(request.params),
        "eos": request.eos_token_ids,
        "bad": request.bad_word_ids,
    }
    return b"".join((head, prompt.tobytes(), json.dumps(rest).encode()))


def decode_submit(data: bytes) -> EngineRequest:
    _, length, uid, priority, arrival_s = _SUBMIT_HEAD.unpack_from(data)
    end = _SUBMIT_HEAD.size + 4 * length
    prompt = array("i")
    prompt.frombytes(data[_SUBMIT_HEAD.size : end])
    rest = json.loads(data[end:])
    return EngineRequest(
        uid=uid,
        prompt_token_ids=prompt,
        params=_params_from_json(rest["params"]),
        eos_token_ids=tuple(rest["eos"]),
        bad_word_ids=tuple(tuple(word) for word in rest["bad"]),
        priority=priority,
        arrival_s=arrival_s,
    )


def _params_to_json(params: SamplingParams) -> dict[str, Any]:
    """Only what differs from the defaults: most requests set three or four fields."""
    values = {f.name: getattr(params, f.name) for f in fields(params)}
    values = {name: value for name, value in values.items() if value != _DEFAULTS[name]}
    if params.logit_bias is not None:  # JSON keys are strings
        values["logit_bias"] = [[int(t), float(v)] for t, v in params.logit_bias.items()]
    if params.allowed_token_ids is not None:
        values["allowed_token_ids"] = [int(t) for t in params.allowed_token_ids]
    if params.extra_args is not None:
        values["extra_args"] = dict(params.extra_args)
    return values


def _params_from_json(values: dict[str, Any]) -> SamplingParams:
    """The front has checked them: the loop thread does not check again."""
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    for name, value in values.items():
        if type(value) is list:
            values[name] = tuple(value)
    params = object.__new__(SamplingParams)
    params.__dict__.update(_DEFAULTS)
    params.__dict__.update(values)
    return params


_DEFAULTS = {f.name: getattr(SamplingParams(), f.name) for f in fields(SamplingParams)}


def submit_uid(data: bytes) -> int | None:
    """Whose submit this is, without decoding it. None: it is another message."""
    return int(_SUBMIT_HEAD.unpack_from(data)[2]) if data[0] == _SUBMIT else None


def encode_abort(uids: Sequence[int]) -> bytes:
    return bytes((_ABORT,)) + np.asarray(uids, np.int64).tobytes()


def decode_abort(data: bytes) -> list[int] | None:
    """The uids. None: it is another message."""
    return np.frombuffer(data, np.int64, offset=1).tolist() if data[0] == _ABORT else None


Plain = Drain | Stop | ResetPrefixCache | StartTrace | TakeTrace | Stopped
_PLAIN: dict[type[Plain], int] = {
    Drain: _DRAIN,
    Stop: _STOP,
    ResetPrefixCache: _RESET,
    StartTrace: _START_TRACE,
    TakeTrace: _TAKE_TRACE,
    Stopped: _STOPPED,
}
_PLAIN_OF = {kind: type_() for type_, kind in _PLAIN.items()}


def encode(message: Plain | Wake | Ready | Progress | Died | Traced) -> bytes:
    """Messages that are rare: one byte and, where there is something to say, JSON."""
    match message:
        case Traced(spans=spans):
            return bytes((_TRACED,)) + spans
        case Ready(info=info, extras=extras):
            return _with_json(_READY, {"info": asdict(info), "extras": extras})
        case Progress(stage=stage, fraction=fraction):
            return _with_json(_PROGRESS, [stage, fraction])
        case Died(reason=reason, after_another=after_another):
            return _with_json(_DIED, [reason, after_another])
        case Wake(step=step):
            return bytes((_WAKE,)) + step.to_bytes(8, "little")
        case _:
            return bytes((_PLAIN[type(message)],))


def _with_json(kind: int, value: Any) -> bytes:
    return bytes((kind,)) + json.dumps(value).encode()


def decode(data: bytes) -> Message:
    """Any message, told apart by its first byte."""
    kind = data[0]
    if kind == _STEP:
        return decode_step(data)
    if kind == _SUBMIT:
        return Submit(decode_submit(data))
    if (aborted := decode_abort(data)) is not None:
        return Abort(tuple(aborted))
    return _decode_rare(kind, data)


def _decode_rare(kind: int, data: bytes) -> Message:
    if kind in _PLAIN_OF:
        return _PLAIN_OF[kind]
    if kind == _TRACED:
        return Traced(data[1:])
    if kind == _WAKE:
        return Wake(int.from_bytes(data[1:], "little"))
    value = json.loads(data[1:])
    if kind == _READY:
        return Ready(RunnerInfo(**value["info"]), value["extras"])
    if kind == _PROGRESS:
        return Progress(value[0], value[1])
    assert kind == _DIED, f"message of unknown kind {kind}"
    return Died(*value)


# ---- steps


def encode_step(message: StepMessage) -> bytes:
    return pack_step(message, message.events, message.gauges)


def pack_step(rows: Emitted | StepMessage, events: Events, gauges: Gauges) -> bytes:
    """On the loop thread: a handful of copies, whatever the number of rows."""
    g = gauges
    num_rows, width = rows.token_BW.shape
    packed = _pack_events(events) if events else b""
    head = _STEP_HEAD.pack(
        _STEP, num_rows, width, len(packed), len(g.times), g.num_running,
        g.num_wasted_rows, g.num_steps, g.step, g.kv_usage,
    )  # fmt: skip
    parts = [
        head,
        *[_STEP_TIMES.pack(*times) for times in g.times],
        rows.uid_B.tobytes(),
        rows.count_B.tobytes(),
        rows.done_B.tobytes(),
        rows.num_drafts_B.tobytes(),
        rows.num_accepted_B.tobytes(),
        rows.token_BW.tobytes(),
        packed,
    ]
    if rows.logprobs or rows.prompt_logprobs:
        _append_logprobs(parts, rows.logprobs)
        _append_logprobs(parts, rows.prompt_logprobs)
    return b"".join(parts)


def decode_step(data: bytes) -> StepMessage:
    (_, rows, width, event_bytes, num_times, running, wasted, steps, step,
     kv_usage) = _STEP_HEAD.unpack_from(data)  # fmt: skip
    at = _STEP_HEAD.size + num_times * _STEP_TIMES.size
    times = [StepTimes(*t) for t in _STEP_TIMES.iter_unpack(data[_STEP_HEAD.size : at])]
    uid_B = np.frombuffer(data, np.int64, rows, at)
    at += 8 * rows
    columns = np.frombuffer(data, np.int32, 4 * rows, at).reshape(4, rows)
    at += 16 * rows
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
    return StepMessage(
        uid_B, columns[0], token_BW, columns[1], columns[2], columns[3],
        logprobs, prompt_logprobs, events,
        Gauges(step, running, kv_usage, wasted, steps, times),
    )  # fmt: skip


def _pack_events(events: Events) -> bytes:
    """Counts, then numbers; only requests that ended without a row bring text."""
    numbers = array("q", (len(events.admitted), len(events.preempted)))
    for pair in events.admitted:
        numbers.extend(pair)
    numbers.extend(events.preempted)
    if not events.ended:
        return numbers.tobytes()
    ended = [(e.uid, e.done, e.reason, e.error) for e in events.ended]
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
