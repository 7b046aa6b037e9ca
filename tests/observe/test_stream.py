"""Streams that drop instead of waiting, on real pipes and terminals; who owns the status line."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

import pytest

from paceline.observe.progress import ProgressLine, StatusLine
from paceline.observe.stream import LossyStream

DROPPED = re.compile(r"paceline: (\d+) log lines were dropped, because they could not be written\n")


@contextmanager
def open_pipe() -> Iterator[tuple[int, int]]:
    inward, outward = os.pipe()
    try:
        yield inward, outward
    finally:
        os.close(inward)
        os.close(outward)


def read_until(descriptor: int, end: str) -> str:
    text = ""
    while not text.endswith(end):
        text += os.read(descriptor, 1 << 16).decode()
    return text


def test_a_full_pipe_makes_no_writer_wait_and_losses_are_told_in_their_place() -> None:
    with open_pipe() as (inward, outward):
        stream = LossyStream(outward)
        for number in range(4000):
            stream.write(f"{number} {'x' * 1000}\n")
        stream.flush()  # returns, although the pipe is full
        assert stream.num_dropped > 0
        text = ""
        while next_number(text) < 4000:
            text += os.read(inward, 1 << 16).decode()


def next_number(text: str) -> int:
    """After whole lines that are numbered, with gaps where the text tells of them."""
    number = 0
    for line in text.splitlines(keepends=True):
        if told := DROPPED.fullmatch(line):
            number += int(told[1])
        elif line.endswith("\n"):
            assert int(line.split()[0]) == number
            number += 1
    return number


def test_what_a_full_disk_refused_is_told_before_the_next_line() -> None:
    with open_pipe() as (inward, outward):
        full = os.open("/dev/full", os.O_WRONLY)
        stream = LossyStream(full)
        for number in range(3):
            stream.write(f"{number}\n")
        stream.flush()
        os.dup2(outward, full)  # as if space had been made
        stream.write("on again\n")
        text = read_until(inward, "on again\n")
        os.close(full)
    told = DROPPED.match(text)
    assert told is not None
    assert int(told[1]) == stream.num_dropped == 3
    assert text == told[0] + "on again\n"


def test_a_reader_that_is_gone_raises_nothing() -> None:
    inward, outward = os.pipe()
    os.close(inward)
    stream = LossyStream(outward)
    stream.write("to nowhere\n")
    stream.flush()
    os.close(outward)
    assert stream.num_dropped == 1


def test_a_flush_waits_for_what_was_written() -> None:
    with open_pipe() as (inward, outward):
        stream = LossyStream(outward)
        for number in range(10):
            stream.write(f"{number} ")
            stream.flush()
            assert os.read(inward, 100).decode() == f"{number} "


def test_the_last_words_of_a_process_come_out() -> None:
    code = (
        "import sys; from paceline.observe.stream import make_lossy; make_lossy('stderr')\n"
        "sys.stderr.write('x' * 100_000 + '\\n'); raise ValueError('the end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("x" * 100_000 + "\nTraceback")
    assert done.stderr.endswith("ValueError: the end\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_descriptors_lead_nowhere(closed: str) -> None:
    """No socket gets number 1 or 2, where a library may print into it."""
    code = (
        "import os, socket, sys; from paceline.observe.stream import fill_closed_streams\n"
        "fill_closed_streams(); a, b = socket.socketpair()\n"
        "print('out'); print('error', file=sys.stderr); sys.stdin.fileno()\n"
        "os._exit(min(a.fileno(), b.fileno()))"
    )
    line = f'"$@" {closed}'
    command = ["bash", "-c", line, "bash", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == 3


# ---- terminals


@contextmanager
def open_terminal(columns: int = 40) -> Iterator[tuple[int, int]]:
    near, far = pty.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    try:
        yield near, far
    finally:
        os.close(near)
        os.close(far)


def screen(text: str) -> list[str]:
    """What a terminal shows after `text`, line by line."""
    lines, column = [""], 0
    for part in re.findall(r"\r|\n|\x1b\[K|[^\r\n\x1b]+", text):
        if part == "\n":
            lines.append("")
            column = 0
        elif part == "\r":
            column = 0
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column] + part + lines[-1][column + len(part) :]
            column += len(part)
    return lines


def as_text(stream: LossyStream) -> TextIO:
    return cast(TextIO, stream)


def test_log_lines_go_above_the_status_line() -> None:
    with open_terminal() as (near, far):
        stream = LossyStream(far)
        status = StatusLine(as_text(stream))
        for number in range(3):
            status.show(f"Loading: weights  {number}0%")
            stream.write(f"line {number}\n")
            stream.flush()
        # The status line is written twice, and a terminal may hand over a part of what it has.
        shown = read_until(near, "line 2\r\n\rLoading: weights  20%\x1b[K")
        assert screen(shown) == ["line 0", "line 1", "line 2", "Loading: weights  20%"]
        status.clear()
        stream.write("done\n")
        shown += read_until(near, "done\r\n")
        assert screen(shown) == ["line 0", "line 1", "line 2", "done", ""]


def test_a_progress_line_that_has_ended_stays_and_is_cut_to_the_width() -> None:
    with open_terminal(columns=20) as (near, far):
        stream = LossyStream(far)
        progress = ProgressLine(4, "Answered prompts", as_text(stream))
        progress.update(4, 100)
        progress.close()
        stream.write("after\n")
        assert screen(read_until(near, "after\r\n")) == ["Answered prompts  4", "after", ""]


def test_a_line_of_another_process_takes_the_place_of_the_status_line() -> None:
    with open_terminal() as (near, far):
        front, engine = LossyStream(far), LossyStream(far)
        status = StatusLine(as_text(front))
        status.show("Loading: weights  10%")
        engine.write("a warning\n")
        engine.flush()
        status.show("Loading: weights  20%")
        assert screen(read_until(near, "20%\x1b[K")) == ["a warning", "Loading: weights  20%"]


def test_text_that_goes_on_or_ends_a_line_erases_nothing() -> None:
    with open_terminal() as (near, far):
        stream = LossyStream(far)
        for part in ("two ", "parts", "\n"):
            stream.write(part)
            stream.flush()
        os.write(far, b"> typed")  # of standard output, on the same terminal
        stream.write("\nafter it\n")
        shown = read_until(near, "after it\r\n")
        assert screen(shown) == ["two parts", "> typed", "after it", ""]


def test_a_process_that_ends_leaves_no_status_line() -> None:
    code = (
        "import atexit, sys; from paceline.observe.progress import StatusLine\n"
        "from paceline.observe.stream import make_lossy\n"
        "atexit.register(lambda: line.show('of a thread that goes on')); make_lossy('stderr')\n"
        "line = StatusLine(); line.show('Loading'); print('stopped', file=sys.stderr)"
    )
    with open_terminal() as (near, far):
        subprocess.run([sys.executable, "-c", code], stderr=far, check=True, timeout=60)
        os.write(far, b"$ ")  # the shell goes on
        assert screen(read_until(near, "$ ")) == ["stopped", "$ "]
