"""The trace: what the loop records, and that the file says when each stage of a step was."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from docs.draw_trace import read_chrome_trace
from paceline.cli import main
from paceline.observe.trace import (
    LANES,
    Span,
    TraceRing,
    chrome_trace,
    unpack_spans,
    write_chrome_trace,
)
from tests.echo_session import use_echo
from tests.engine.harness import Harness, request
from tests.fakes import runner_info


def test_the_ring_keeps_the_newest_spans_in_order() -> None:
    ring = TraceRing(capacity=4)
    assert unpack_spans(ring.take()) == []
    for step in range(1, 4):
        ring.add("plan", step, step, step + 0.5)
    assert [span.step for span in unpack_spans(ring.take())] == [1, 2, 3]
    for step in range(4, 11):
        ring.add("device", step, step, step + 0.5)
    spans = unpack_spans(ring.take())
    assert spans == [Span("device", step, step, step + 0.5) for step in (7, 8, 9, 10)]


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    spans = [Span("plan", 1, 10.0, 10.25), Span("device", 1, 10.5, 11.0)]
    path = tmp_path / "trace.json"
    write_chrome_trace(path, spans, {"model": "tiny"})
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace == chrome_trace(spans, {"model": "tiny"})
    assert trace["otherData"] == {"model": "tiny"}
    assert read_chrome_trace(path) == [Span("plan", 1, 0.0, 0.25), Span("device", 1, 0.5, 1.0)]


def test_replicas_have_lanes_of_their_own(tmp_path: Path) -> None:
    spans = [
        Span("plan", 1, 0.0, 1.0),
        Span("device", 1, 1.0, 2.0, 1),
        Span("plan", 7, 2.0, 3.0, 1),
    ]
    path = tmp_path / "trace.json"
    write_chrome_trace(path, spans, {})
    assert read_chrome_trace(path) == spans
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [names[e["pid"]] for e in events if e["ph"] == "X"] == [
        "host of replica 0",
        "device of replica 1",
        "host of replica 1",
    ]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_stage_of_every_step_is_recorded_in_its_order(depth: int) -> None:
    harness = Harness(runner_info(max_k=2), depth=depth)
    harness.add(request(1, [1, 2, 3, 4, 5], max_tokens=30))
    ring = TraceRing()
    harness.engine.watch.trace = ring
    harness.run()
    spans = unpack_spans(ring.take())
    lanes: dict[int, dict[str, Span]] = defaultdict(dict)
    for span in spans:
        assert span.end_s >= span.start_s
        assert span.lane not in lanes[span.step], f"{span} twice"
        lanes[span.step][span.lane] = span
    assert list(lanes) == list(range(1, len(harness.runner.plans) + 1))
    for found in lanes.values():
        stages = [found[lane] for lane in ("plan", "launch", "wait", "commit")]
        # What is sent together is one span, named after its newest step.
        stages += [found["publish"]] if "publish" in found else []
        assert all(b.start_s >= a.end_s for a, b in pairwise(stages))
    host = sorted((s for s in spans if s.lane != "device"), key=lambda s: s.start_s)
    assert all(b.start_s >= a.end_s for a, b in pairwise(host)), "the loop has one thread"
    assert sum("publish" in found for found in lanes.values()) >= len(lanes) - depth


def test_nothing_is_recorded_unless_it_is_asked_for() -> None:
    harness = Harness(runner_info(), depth=1)
    harness.add(request(1, [1, 2, 3], max_tokens=5))
    harness.run()
    assert harness.engine.watch.trace is None


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_bench_writes_a_trace_with_host_and_device_lanes(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_echo(monkeypatch)
    path = tmp_path / "trace.json"
    load = ["--input-len", "12", "--output-len", "16"]
    load += ["--batch-size", "3", "--num-iters", "2"] if kind == "latency" else []
    argv = ["bench", kind, "slots=4 delay_s=0.001", *load, "--trace", str(path)]
    assert main(argv) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert trace["otherData"]["model"] == "echo"
    named = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert named == set(LANES) - {"bind", "agree"}
    spans = read_chrome_trace(path)
    assert min(span.start_s for span in spans) == 0.0
    device = [span for span in spans if span.lane == "device"]
    assert len(device) > 20
    assert all(span.end_s - span.start_s >= 0.001 for span in device)
    assert all(b.start_s >= a.end_s - 1e-9 for a, b in pairwise(device)), "one device, one step"
    assert [span.step for span in device] == sorted({span.step for span in device})
    launched = {span.step: span for span in spans if span.lane == "launch"}
    committed = {span.step: span for span in spans if span.lane == "commit"}
    both = [s for s in device if s.step in launched and s.step in committed]
    assert len(both) > 20
    for span in both:
        assert launched[span.step].start_s <= span.start_s <= committed[span.step].start_s


def test_a_trace_that_cannot_be_written_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "latency", "--trace", str(tmp_path / "no" / "trace.json")]) == 2
    assert "--trace" in capsys.readouterr().err
