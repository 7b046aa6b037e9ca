"""`paceline bench`: the engine benches on the echo engine, the load generator on a small server."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.commands import bench_serve
from paceline.commands.http_stream import Endpoint
from paceline.commands.report import short, spread, step_rows, step_times
from paceline.engine.messages import RESTED, StepTimes
from paceline.errors import ConfigError
from tests.echo_session import use_echo
from tests.patience import PATIENCE_S

LOAD = ["--input-len", "12", "--output-len", "6"]


def result(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_latency_gives_json_and_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_echo(monkeypatch)
    path = tmp_path / "latency.json"
    argv = ["bench", "latency", "slots=4", *LOAD, "--batch-size", "3", "--num-iters", "4"]
    assert main([*argv, "--num-iters-warmup", "1", "--output-json", str(path)]) == 0
    found = result(path)
    assert found["bench"] == "latency"
    assert found["model"] == "echo"
    assert found["config"]["max_num_seqs"] == 4
    assert found["machine"]["cores"] >= 1
    assert set(found["results"]["latency_ms"]) == {"mean", "p50", "p90", "p99"}
    assert found["results"]["output_tokens_per_s"] > 0
    steps = found["results"]["steps"]
    assert steps["num_steps"] > 10
    assert steps["step_ms"]["p50"] >= steps["device_ms"]["p50"]
    assert steps["idle_us"]["p50"] > 0
    assert 0 < steps["idle_share"]["p50"] < 1
    assert steps["host_ms"]["p50"] > 0
    table = capsys.readouterr().out
    assert re.match(r"Model +echo\nDevice +cpu, float32\nDrafter +none\n", table)
    assert "Time to first token (ms)" in table
    assert "4 of 3 requests" in table
    assert "Device idle between steps (µs)" in table
    assert "Host work per step (ms)" in table


def test_throughput_counts_every_token_and_the_accepted_drafts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_echo(monkeypatch)
    path = tmp_path / "throughput.json"
    spec = '{"method": "ngram", "num_speculative_tokens": 2}'
    argv = ["bench", "throughput", "k=2 slots=4", *LOAD, "--num-prompts", "11"]
    assert main([*argv, "--speculative-config", spec, "--output-json", str(path)]) == 0
    found = result(path)["results"]
    assert found["num_prompts"] == 11
    assert found["output_tokens_per_s"] == pytest.approx(6 * found["requests_per_s"], rel=1e-3)
    assert 0 < found["acceptance_rate"] <= 1
    assert 1 < found["tokens_per_step"] <= 3
    assert "Drafts accepted" in capsys.readouterr().out


def test_json_may_go_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_echo(monkeypatch)
    argv = ["bench", "throughput", "slots=4", *LOAD, "--num-prompts", "2", "--output-json", "-"]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["bench"] == "throughput"
    assert "tok/s" in captured.err


@pytest.mark.parametrize("flag", ["--num-prompts", "--input-len", "--output-len"])
def test_a_load_of_nothing_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", flag, "0"]) == 2
    assert f"{flag} is 0" in capsys.readouterr().err


class FakeServer:
    """Speaks just enough of the API: models, metrics, and streams of four tokens."""

    def __init__(self, fail_every: int = 0, *, has_tokenizer: bool = True) -> None:
        self.fail_every = fail_every
        self.has_tokenizer = has_tokenizer
        self.requests: list[dict[str, Any]] = []
        self.num_metrics = 0
        self.most_at_once = 0
        self._open = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        if path == "/v1/models":
            self._reply(writer, json.dumps({"data": [{"id": "fake"}]}))
        elif path == "/tokenize" and not self.has_tokenizer:
            self._reply(writer, "{}", "404 Not Found")
        elif path == "/tokenize":
            length = int(head.lower().split("content-length:")[1].split()[0])
            text = json.loads(await reader.readexactly(length))["prompt"]
            self._reply(writer, json.dumps({"tokens": [len(word) for word in text.split()]}))
        elif path == "/metrics":
            self._reply(writer, self._metrics())
        else:
            length = int(head.lower().split("content-length:")[1].split()[0])
            body = json.loads(await reader.readexactly(length))
            self.requests.append({"path": path, **body})
            await self._complete(writer)
        await writer.drain()
        writer.close()

    def _metrics(self) -> str:
        """Each look finds 10 more drafts rows, 30 more drafts and 12 more accepted."""
        self.num_metrics += 1
        stem = 'x:spec_decode_num_{}_total{{model="fake"}} {}\n'
        counts = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 12}
        lines = [stem.format(n, v * self.num_metrics) for n, v in counts.items()]
        stem = 'x:spec_decode_num_accepted_tokens_per_pos_total{{position="{}"}} {}\n'
        lines += [stem.format(i, n * self.num_metrics) for i, n in enumerate((8, 4, 0))]
        return "".join([*lines, 'x:engine_info{device="abacus",dtype="beads",drafter="guess"} 1\n'])

    async def _complete(self, writer: asyncio.StreamWriter) -> None:
        if self.fail_every and len(self.requests) % self.fail_every == 0:
            self._reply(writer, '{"error": {"message": "too much"}}', "429 Too Many Requests")
            return
        self._open += 1
        self.most_at_once = max(self.most_at_once, self._open)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for token in range(4):
            self._event(writer, {"choices": [{"index": 0, "text": f" t{token}"}]})
            await writer.drain()
            await asyncio.sleep(0.005)
        usage = {"prompt_tokens": 7, "completion_tokens": 4}
        self._event(writer, {"choices": [], "usage": usage})
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        self._open -= 1

    def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        self._chunk(writer, f"data: {json.dumps(event)}\n\n".encode())

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    @staticmethod
    def _reply(writer: asyncio.StreamWriter, body: str, status: str = "200 OK") -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write((head + body).encode())


@contextmanager
def running(server: FakeServer) -> Iterator[str]:
    """The server in a thread of its own; gives its URL."""
    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(server.handle, "127.0.0.1", 0))
    port = listening.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        listening.close()
        loop.close()


def test_the_load_generator_measures_a_running_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, path = FakeServer(), tmp_path / "serve.json"
    with running(server) as url:
        argv = ["bench", "serve", "--base-url", url, "--num-prompts", "8", *LOAD]
        assert main([*argv, "--request-rate", "400", "--output-json", str(path)]) == 0
    found = result(path)
    assert found["model"] == "fake"
    measured = found["results"]
    assert (measured["completed"], measured["failed"]) == (8, 0)
    assert (measured["input_tokens"], measured["output_tokens"]) == (56, 32)
    assert measured["itl_ms"]["p50"] >= 4
    assert measured["acceptance_rate"] == 0.4
    assert measured["tokens_per_step"] == 2.2
    assert measured["acceptance_by_position"] == [0.8, 0.4, 0.0]
    assert (found["device"], found["dtype"], found["drafter"]) == ("abacus", "beads", "guess")
    assert {r["path"] for r in server.requests} == {"/v1/completions"}
    assert {r["max_tokens"] for r in server.requests} == {6}
    assert {r["ignore_eos"] for r in server.requests} == {True}
    assert {len(r["prompt"]) for r in server.requests} == {12}  # token ids
    assert len({tuple(r["prompt"]) for r in server.requests}) == 8
    table = capsys.readouterr().out
    assert re.search(r"Model +fake\n", table)
    assert re.search(r"Device +abacus, beads\nDrafter +guess\n", table)
    assert re.search(r"Accepted by position +80.0%  40.0%  0%\n", table)
    assert "8 completed, 0 failed" in table
    assert "Drafts accepted" in table


def test_a_server_without_a_tokenizer_gets_words() -> None:
    server = FakeServer(has_tokenizer=False)
    with running(server) as url:
        assert main(["bench", "serve", "--base-url", url, "--num-prompts", "2", *LOAD]) == 0
    assert {len(r["prompt"].split()) for r in server.requests} == {12}


def test_requests_leave_on_schedule_without_waiting_for_answers() -> None:
    server = FakeServer()
    with running(server) as url:
        assert main(["bench", "serve", "--base-url", url, "--num-prompts", "12", *LOAD]) == 0
    assert server.most_at_once >= 6


def test_concurrency_can_be_limited() -> None:
    server = FakeServer()
    with running(server) as url:
        argv = ["bench", "serve", "--base-url", url, "--num-prompts", "6", *LOAD]
        assert main([*argv, "--max-concurrency", "2"]) == 0
    assert server.most_at_once <= 2


def test_failed_requests_are_counted_and_the_first_one_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running(FakeServer(fail_every=4)) as url:
        argv = ["bench", "serve", "--base-url", url, "--num-prompts", "8", *LOAD]
        assert main([*argv, "--max-concurrency", "1"]) == 1
    captured = capsys.readouterr()
    assert "6 completed, 2 failed" in captured.out
    assert "2 requests failed, the first: HTTP 429: too much" in captured.err


def test_a_data_set_of_messages_goes_to_the_chat_endpoint(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    message = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    data.write_text(json.dumps(message), encoding="utf-8")
    server = FakeServer()
    with running(server) as url:
        argv = ["bench", "serve", "--base-url", url, "--num-prompts", "3"]
        assert main([*argv, "--dataset-path", str(data)]) == 0
    assert [r["path"] for r in server.requests] == ["/v1/chat/completions"] * 3
    assert {r["max_tokens"] for r in server.requests} == {3}


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", *LOAD]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "Cannot reach http://127.0.0.1:9; is the server running?" in line


def test_engine_flags_do_not_fit_a_running_server(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "serve", "--base-url", "http://127.0.0.1:9", "--max-num-seqs", "4"]
    assert main(argv) == 2
    assert "--max-num-seqs" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        Endpoint.parse(url)


def test_urls_keep_their_prefix_and_scheme() -> None:
    assert Endpoint.parse("https://host/api/") == Endpoint("host", 443, True, "/api")
    assert Endpoint.parse("127.0.0.1:81") == Endpoint("127.0.0.1", 81)
    for url in ("https://host:443/api", "http://127.0.0.1:81", "http://[::1]:8000"):
        assert Endpoint.parse(url).url == url


def test_a_bubble_is_a_share_of_its_own_step() -> None:
    times = [StepTimes(RESTED, 9.0, 9.0)]  # after a rest: not a step among others
    times += [StepTimes(0.001, 0.003, 0.001)] * 3 + [StepTimes(0.0, 0.004, 0.001)]
    found = step_times(times)
    assert found["num_steps"] == 4
    assert found["step_ms"]["p50"] == 4.0
    assert found["idle_us"]["p50"] == 1000.0
    assert found["idle_share"]["p50"] == 0.25
    assert found["bubble_share"] == 0.1875
    assert found["host_share_of_device"] == 0.3333
    assert step_times(times[:1]) == {}
    table = dict(step_rows(found))
    assert table["Device idle, share of the step"] == "p50 25.0%  all 18.8%"
    assert table["Host work, share of device work"] == "p50 33.3% of 3.00 ms"


def test_percentiles_are_those_of_the_values() -> None:
    found = spread([float(i) for i in range(1, 102)], 1e3)
    assert found == {"mean": 51_000.0, "p50": 51_000.0, "p90": 91_000.0, "p99": 100_000.0}
    assert spread([]) == {}


def test_tables_show_three_significant_digits() -> None:
    values = (0, 0.012345, 4.5678, 78.94, 99.96, 1234.5, 1e6)
    shown = ["0", "0.0123", "4.57", "78.9", "100", "1,230", "1,000,000"]
    assert [short(value) for value in values] == shown


def test_a_server_that_cannot_start_says_why_and_is_quiet_otherwise(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "serve", "./no-such-model.gguf", "--num-prompts", "2"]) == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0].endswith("measuring a server that it starts")
    assert lines[1] == "paceline: The server ended with code 1 before it was ready:"
    assert "no-such-model.gguf is not a file or folder" in lines[-1]


@pytest.mark.parametrize("part", ["content", "reasoning", "reasoning_content", "tool_calls"])
def test_every_part_of_a_chat_answer_is_an_arrival(part: str) -> None:
    timing = bench_serve.RequestTiming()
    bench_serve.take_event(timing, {"choices": [{"delta": {"role": "assistant", part: ""}}]})
    assert not timing.arrivals_s
    bench_serve.take_event(timing, {"choices": [{"delta": {part: "a"}}]})
    assert len(timing.arrivals_s) == 1


@pytest.mark.parametrize(("flag", "least"), [("--prefix-len", 0), ("--input-len", 1)])
def test_lengths_have_a_least_value(
    flag: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "serve", "--base-url", "http://127.0.0.1:9", flag]
    assert main([*arguments, str(least - 1)]) != 0
    assert f"it must be at least {least}" in capsys.readouterr().err
    assert main([*arguments, str(least)]) != 0
    assert "Cannot reach" in capsys.readouterr().err
