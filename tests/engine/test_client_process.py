"""The engine as a real process: how it starts, how it dies, and that nothing of it is left."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from paceline.config import EngineConfig
from paceline.engine.client import EngineClient
from paceline.errors import CheckpointError, ConfigError, EngineDead, Overloaded
from tests.engine.echo_client import (
    FACTORY,
    Stream,
    echo_client,
    echo_front,
    pump_for_ever,
    pump_until_finished,
    run,
    submit,
)
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys, time
from paceline.config import EngineConfig
from paceline.engine.client import EngineClient
from tests.engine.echo_client import FACTORY, echo_front, run

def say(stage, fraction):
    print("progress", flush=True)

config = EngineConfig.from_keywords(model=sys.argv[1])
client = EngineClient.start(config, factory=FACTORY, front=echo_front(), progress=say)
print("pid", client.engine_pids[0], flush=True)
print(run(client, "abc", max_tokens=6).text(), flush=True)
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A front of its own, in a process group of its own, as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def birth(pid: int) -> str | None:
    """When a process started, as the kernel counts; None if it has ended. Another process may get
    its number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it may end between open and read
        return None
    return None if fields[0] == "Z" else fields[19]


def is_running(pid: int) -> bool:
    return birth(pid) is not None


def wait_gone(pid: int, within_s: float = PATIENCE_S) -> bool:
    give_up_s = time.monotonic() + within_s
    while is_running(pid):
        if time.monotonic() > give_up_s:
            return False
        time.sleep(0.02)
    return True


def members(group: int, parents: tuple[int, ...] = ()) -> list[int]:
    """Living processes of a process group, or those among them that have one of these parents."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        is_child = not parents or int(fields[1]) in parents
        if int(fields[2]) == group and fields[0] != "Z" and is_child:
            found.append(int(entry.name))
    return found


def pid_of(client: EngineClient) -> int:
    return client.engine_pids[0]


def test_requests_run_in_a_process_that_is_gone_after_close() -> None:
    with echo_client(in_process=False) as client:
        assert pid_of(client) != os.getpid()
        streams = [submit(client, str(i), f"prompt {i} ", max_tokens=18, n=2) for i in range(12)]
        pump_until_finished(client, *streams)
        assert [s.text(1) for s in streams] == [(f"prompt {i} " * 3)[:18] for i in range(12)]
        pid = pid_of(client)
    assert not is_running(pid)


def test_a_killed_engine_is_noticed_by_every_open_request() -> None:
    with echo_client("delay_s=0.005", in_process=False) as client:
        streams = [submit(client, str(i), "abc", max_tokens=400) for i in range(3)]
        while not all(s.deltas for s in streams):
            client.pump(1.0)
        os.kill(pid_of(client), signal.SIGKILL)
        with pytest.raises(EngineDead, match="SIGKILL"):
            pump_for_ever(client)
        for stream in streams:
            assert stream.last().finish_reason == "error"
            assert stream.generation is not None
            assert isinstance(stream.generation.error, EngineDead)
        with pytest.raises(EngineDead):
            submit(client, "later", "abc")


def test_an_idle_front_learns_of_a_dead_engine_when_it_submits() -> None:
    with echo_client(in_process=False) as client:
        os.kill(pid_of(client), signal.SIGKILL)
        assert wait_gone(pid_of(client))
        # Its other threads may live a moment longer, and its socket with them.
        assert select.select([client], [], [], PATIENCE_S)[0]
        with pytest.raises(EngineDead, match="SIGKILL"):
            submit(client, "one", "abc")
        assert client.num_open == 0


@contextmanager
def frozen(client: EngineClient) -> Iterator[None]:
    """Its process does not run within the block."""
    os.kill(pid_of(client), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid_of(client), signal.SIGCONT)


LARGE = "x" * 20_000  # four bytes a token: a few of these fill a socket


def test_no_submit_waits_for_an_engine_that_does_not_read() -> None:
    with echo_client("max_len=30000", in_process=False) as client:
        with frozen(client):
            streams = [submit(client, str(i), LARGE, max_tokens=3) for i in range(20)]
            unsent = client._supervisor.num_unsent_bytes(0)
            assert unsent > 10 * 4 * len(LARGE)
            # One that was not sent is taken back.
            client.abort("19")
            assert client._supervisor.num_unsent_bytes(0) < unsent - 4 * len(LARGE)
            assert client.num_leaving == 1  # until the engine says so
        pump_until_finished(client, *streams[:19])
        assert [s.text() for s in streams] == ["xxx"] * 19 + [""]
        while client.num_leaving:
            client.pump(1.0)


def test_what_the_engine_does_not_take_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.client.MOST_UNSENT_BYTES", 1_000_000)
    with echo_client("max_len=30000", in_process=False) as client:
        streams: list[Stream] = []
        with frozen(client), pytest.raises(Overloaded, match="wait for the engine to read them"):
            streams.extend(submit(client, str(i), LARGE, max_tokens=3) for i in range(100))
        assert 5 < len(streams) < 50
        assert client.num_open == len(streams)
        pump_until_finished(client, *streams)
        assert run(client, "ab", max_tokens=2).text() == "ab"


def test_an_engine_that_takes_nothing_for_the_stall_timeout_is_given_up() -> None:
    served = echo_client("max_len=30000", in_process=False, stall_timeout=1.0)
    with served as client, frozen(client):
        streams = [submit(client, str(i), LARGE, max_tokens=3) for i in range(20)]
        with pytest.raises(EngineDead, match="has read no message for 1 s"):
            pump_for_ever(client)
        assert {s.last().finish_reason for s in streams} == {"error"}


def test_a_batch_is_larger_than_what_may_wait_for_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its prompts are submitted as the engine takes them."""
    monkeypatch.setattr("paceline.engine.client.MOST_UNSENT_BYTES", 0)
    with echo_client("max_len=30000", in_process=False) as client:
        outputs = LLM.from_client(client).generate([LARGE] * 12, SamplingParams(max_tokens=2))
    assert [o.outputs[0].text for o in outputs] == ["xx"] * 12


def test_a_device_failure_reaches_the_front_with_its_place() -> None:
    with echo_client("fail_at=2", in_process=False) as client:
        submit(client, "one", "abc", max_tokens=9)
        with pytest.raises(EngineDead, match="caught fire"):
            pump_for_ever(client)


def test_the_engine_dies_with_its_front() -> None:
    with start(SCRIPT + "\ntime.sleep(600)", "") as front:
        lines = [first_line(front) for _ in range(4)]
        pid = int(lines[2].split()[1])
        assert lines[3] == "abcabc"
        assert is_running(pid)
        front.kill()
        assert wait_gone(pid)


@pytest.mark.parametrize("thread", ["main", "another"])
def test_a_stopped_engine_dies_with_its_front_whichever_thread_started_it(thread: str) -> None:
    """That thread may have ended long ago, and the engine reads no socket."""
    code = """
import sys, threading, time
from paceline.config import EngineConfig
from paceline.engine.client import EngineClient
from tests.engine.echo_client import FACTORY, echo_front, run

def begin():
    global client
    client = EngineClient.start(EngineConfig.from_keywords(), factory=FACTORY, front=echo_front())

thread = threading.Thread(target=begin)
thread.start() if sys.argv[1] == "another" else begin()
if sys.argv[1] == "another":
    thread.join()
print(client.engine_pids[0], run(client, "abc", max_tokens=6).text(), flush=True)
time.sleep(600)
"""
    with start(code, thread) as front:
        pid, text = first_line(front).split()
        assert text == "abcabc"
        try:
            os.kill(int(pid), signal.SIGSTOP)
            front.kill()
            assert wait_gone(int(pid))
        finally:
            if is_running(int(pid)):
                os.kill(int(pid), signal.SIGKILL)


def test_a_front_that_ends_without_closing_leaves_no_engine() -> None:
    with start(SCRIPT, "") as front:
        pid = int([first_line(front) for _ in range(3)][2].split()[1])
        assert front.wait(PATIENCE_S) == 0
        assert wait_gone(pid)


def test_a_script_without_a_main_guard_works(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), ""],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout.splitlines()[-1] == "abcabc", done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("moment", ["at once", "while loading"])
def test_ctrl_c_while_loading_ends_everything(moment: str) -> None:
    with start(SCRIPT, "load_s=600") as front:
        if moment == "while loading":
            assert first_line(front) == "progress"
        else:
            time.sleep(0.3)
        os.killpg(front.pid, signal.SIGINT)  # as a terminal does
        front.wait(PATIENCE_S)
        give_up_s = time.monotonic() + PATIENCE_S
        while members(front.pid) and time.monotonic() < give_up_s:
            time.sleep(0.02)
        assert members(front.pid) == []
        assert front.stderr is not None
        noise = front.stderr.read()
        assert noise.count("Traceback") <= 1, noise  # the front's own, of the script


def test_ctrl_c_while_generating_leaves_the_engine_to_the_front() -> None:
    code = f"""{SCRIPT}
from paceline import LLM, SamplingParams
llm = LLM.from_client(client)
try:
    print("generating", flush=True)
    llm.generate(["abc"] * 50, SamplingParams(max_tokens=500))
except KeyboardInterrupt:
    print(llm.generate("xy", SamplingParams(max_tokens=4))[0].outputs[0].text, flush=True)
"""
    with start(code, "delay_s=0.05") as front:
        while first_line(front) != "generating":
            assert front.poll() is None
        time.sleep(0.3)
        os.killpg(front.pid, signal.SIGINT)
        out, errors = front.communicate(timeout=PATIENCE_S)
        assert (out, errors) == ("xyxy\n", "")


def test_a_terminate_signal_to_the_group_leaves_the_decision_to_the_front() -> None:
    code = f"""{SCRIPT}
import signal, threading
told = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: told.set())
print("listening", flush=True)
told.wait()
print(run(client, "xy", max_tokens=4).text(), flush=True)
"""
    with start(code, "") as front:
        assert [first_line(front) for _ in range(5)][4] == "listening"
        os.killpg(front.pid, signal.SIGTERM)
        assert first_line(front) == "xyxy"


def test_the_collector_leaves_alone_what_an_engine_process_has_loaded() -> None:
    with echo_client("needs_rest=1000", in_process=False) as client:
        assert run(client, "abc", max_tokens=4).text() == "abca"
    # A thread of another program cannot decide that.
    gc.unfreeze()  # tests/conftest.py froze what this one has loaded
    try:
        with echo_client("needs_rest=1000", in_process=True) as client:
            submit(client, "a", "abc", max_tokens=4)
            with pytest.raises(EngineDead, match="collector"):
                pump_for_ever(client)
    finally:
        gc.freeze()


def test_an_error_while_loading_keeps_its_type_and_message() -> None:
    config = EngineConfig.from_keywords(model="refuse=/nowhere")
    for in_process in (False, True):
        with pytest.raises(CheckpointError) as caught:
            EngineClient.start(config, factory=FACTORY, front=echo_front(), in_process=in_process)
        assert str(caught.value) == "/nowhere is no checkpoint."


def test_a_configuration_that_the_engine_refuses_is_a_configuration_error() -> None:
    small = EngineConfig.from_keywords(model="slots=64", max_num_seqs=8, max_num_batched_tokens=32)
    with pytest.raises(ConfigError, match="max_num_batched_tokens 32"):
        EngineClient.start(small, factory=FACTORY, front=echo_front())


def test_an_unexpected_error_while_loading_says_where_it_came_from() -> None:
    config = EngineConfig.from_keywords(model="no-such-option=1")
    with pytest.raises(EngineDead, match="could not start") as caught:
        EngineClient.start(config, factory=FACTORY, front=echo_front())
    assert "echo_runner.py" in str(caught.value)


def test_an_engine_thread_that_cannot_begin_is_an_error_and_no_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.engine.launch._WORKER", "no_such_worker")
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with pytest.raises(EngineDead, match="could not start"):
        EngineClient.start(
            EngineConfig.from_keywords(), factory=FACTORY, front=echo_front(), in_process=True
        )


def test_a_factory_that_does_not_exist_is_an_error_and_no_hang() -> None:
    config = EngineConfig.from_keywords()
    with pytest.raises(EngineDead, match="no_such_module"):
        EngineClient.start(config, factory="no_such_module:build", front=echo_front())


def test_an_engine_started_by_a_thread_outlives_the_thread() -> None:
    clients: list[EngineClient] = []
    config = EngineConfig.from_keywords()

    def begin() -> None:
        clients.append(EngineClient.start(config, factory=FACTORY, front=echo_front()))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert run(clients[0], "abc", max_tokens=6).text() == "abcabc"
    clients[0].close()


def test_a_fork_of_the_front_does_not_take_the_engine_with_it() -> None:
    code = "\nimport os\nif os.fork() == 0:\n    sys.exit(0)\nos.wait()\n"
    more = "print(run(client, 'xy', max_tokens=4).text(), flush=True)"
    with start(SCRIPT + code + more, "") as front:
        out, errors = front.communicate(timeout=PATIENCE_S)
        assert out.splitlines()[-1] == "xyxy", errors


def test_a_stopped_front_does_not_lose_what_the_engine_said() -> None:
    """The front sleeps while the engine runs; its messages wait and are all there."""
    with echo_client(in_process=False) as client:
        streams = [submit(client, str(i), "abcdefgh", max_tokens=200) for i in range(8)]
        time.sleep(0.5)
        pump_until_finished(client, *streams)
        assert {s.text() for s in streams} == {"abcdefgh" * 25}
