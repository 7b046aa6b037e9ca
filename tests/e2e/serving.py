"""`paceline serve` as a process over a tiny checkpoint with a tokenizer, and HTTP to talk to it.

Watches the whole process group: whatever ends must leave no engine behind.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.checkpoint.vocabularies import CORPUS
from tests.patience import PATIENCE_S, wait_for
from tests.server.processes import ROOT, processes_of, resident_bytes
from tests.server.serving import JSON, Reply
from tests.tiny import save_tiny

VOCAB = 300
MAX_MODEL_LEN = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1 (begin) and 2 (end)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PACELINE = [sys.executable, "-m", "paceline"]
# One thread, exact arithmetic, and drafts: the smallest server that has everything.
FLAGS = ["--dtype", "float32", "--cpu-threads", "1", "--run-ahead", "1", "--port", "0"]
FLAGS += ["--speculative-config", json.dumps({"method": "ngram", "num_speculative_tokens": 3})]


def save_served(folder: Path, family: str = "llama", **changes: Any) -> Any:
    """A random model with a byte-level tokenizer and a chat template; returns the model."""
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": MAX_MODEL_LEN}
    model = save_tiny(folder, family, **sizes | changes)
    train_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return model


def train_tokenizer() -> Tokenizer:
    """Byte-level, with VOCAB tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


@dataclass
class Streamed:
    """What one choice of a stream said, put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        for choice in event["choices"]:
            self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            self.token_ids += choice.get("token_ids") or []
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream as they come; it must end with [DONE]."""
    assert response.status == 200, response.read()
    last = b""
    for line in response:
        if line.startswith(b"data: {"):
            event: dict[str, Any] = json.loads(line[6:])
            assert "error" not in event, event
            yield event
        last = line if line.strip() else last
    assert last == b"data: [DONE]\n"


def events_in(reply: bytes) -> list[dict[str, Any]]:
    """The events of a whole reply as it came over the wire, with or without its chunk sizes."""
    lines = [line for line in reply.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line[6:]) for line in lines]


class ServerProcess:
    """A command of ours that serves, with its engine, in a process group of its own."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        limit: str | None = None,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = PACELINE,
    ) -> None:
        """`limit` is what bash's ulimit is given: "-n 1024", "-f 100"."""
        self.log = log
        command = [*program, *arguments]
        if limit is not None:
            command = ["bash", "-c", f'ulimit {limit}; exec "$@"', "bash", *command]
        with log.open("wb") as file:
            self.popen = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                text=True,
            )
        self.port = 0

    def await_ready(self) -> None:
        """Until it says where it serves."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.startswith("Paceline serves on http://"):
                self.port = int(line.split()[3].rpartition(":")[2])
                return
        raise AssertionError(f"it ended with {self.popen.wait()}: {self.said()}")

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def pids(self) -> list[int]:
        """The living processes: the front, and its engine once it was started."""
        return processes_of(self.popen.pid)

    def resident_bytes(self) -> int:
        """Memory of the front process."""
        return resident_bytes(self.popen.pid)

    def send_signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def await_exit(self, within_s: float = PATIENCE_S) -> int:
        """The exit code; asserts that nothing of it is left."""
        code = self.popen.wait(within_s)
        wait_for(lambda: not self.pids, 10.0)
        return code

    # ---- HTTP

    def connect(self, timeout_s: float = PATIENCE_S) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        connection = self.connect()
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read())
        finally:
            connection.close()

    def post(self, path: str, fields: Mapping[str, Any]) -> Reply:
        return self.request("POST", path, json.dumps(fields), JSON)

    def stream(self, path: str, fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of one streamed request."""
        connection = self.connect()
        try:
            connection.request("POST", path, json.dumps({**fields, "stream": True}), JSON)
            yield from events(connection.getresponse())
        finally:
            connection.close()

    def open_stream(
        self, path: str, fields: Mapping[str, Any], *, read_buffer: int | None = None
    ) -> socket.socket:
        """A stream that was asked for and of which nothing was read; `read_buffer` is SO_RCVBUF."""
        body = json.dumps({**fields, "stream": True}).encode()
        return self.send_raw(path, body, read_buffer=read_buffer)

    def send_raw(
        self, path: str, body: bytes, *, missing: int = 0, read_buffer: int | None = None
    ) -> socket.socket:
        """A POST on a plain socket. `missing` bytes are announced and never come."""
        sock = socket.socket()
        if read_buffer is not None:  # before the connection: it decides the window
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read_buffer)
        sock.settimeout(PATIENCE_S)
        sock.connect(("127.0.0.1", self.port))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body) + missing}\r\n\r\n"
        sock.sendall(head.encode() + body)
        return sock

    def gauge(self, name: str) -> float:
        """The value of a metric without labels other than the model's name."""
        text = self.request("GET", "/metrics").body.decode()
        lines = [x for x in text.splitlines() if x.startswith(f"paceline:{name}{{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def await_idle(self) -> None:
        """Until no request runs or waits."""
        names = ("num_requests_running", "num_requests_waiting")
        wait_for(lambda: not any(self.gauge(name) for name in names), PATIENCE_S)


@contextlib.contextmanager
def started(
    arguments: Sequence[str],
    log: Path,
    *,
    limit: str | None = None,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = PACELINE,
) -> Iterator[ServerProcess]:
    """A command that runs; whatever is left of it afterwards is killed."""
    process = ServerProcess(arguments, log, limit=limit, environment=environment, program=program)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.popen.pid, signal.SIGKILL)
        process.popen.wait()
        assert process.popen.stdout is not None
        process.popen.stdout.close()


@contextlib.contextmanager
def served(
    model: Path | str, log: Path, *flags: str, limit: str | None = None
) -> Iterator[ServerProcess]:
    """`paceline serve` that is ready."""
    with started(["serve", str(model), *FLAGS, *flags], log, limit=limit) as process:
        process.await_ready()
        yield process


def complaint(
    arguments: Sequence[str],
    log: Path,
    *,
    code: int = 1,
    limit: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """The one line with which a command refuses; it has ended with `code` and left no process."""
    with started(arguments, log, limit=limit, environment=environment) as process:
        assert process.await_exit() == code, process.said()
        said = process.said()
    assert "Traceback" not in said
    lines = said.splitlines()
    assert [line for line in lines if line.startswith("paceline: ")] == lines[-1:], said
    return lines[-1]
