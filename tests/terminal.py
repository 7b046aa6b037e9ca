"""A program on a pseudo-terminal: what it shows, what is typed, and waiting for text."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping

from tests.architecture.source_tree import ROOT
from tests.patience import PATIENCE_S

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


class Terminal:
    """The master's side. `shown` is everything that the program has written."""

    def __init__(self, master: int) -> None:
        self._master = master
        self.shown = ""

    @property
    def text(self) -> str:
        """Without escape sequences and carriage returns."""
        return _ESCAPES.sub("", self.shown)

    @property
    def echoes(self) -> bool:
        """Whether the terminal shows what is typed."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, times: int = 1) -> None:
        """Until `text` was shown this many times. "\\n> " is a prompt, which reads the keys: what
        is typed before it may be lost, and Ctrl-D would be no end of input."""
        give_up_s = time.monotonic() + PATIENCE_S
        while self.text.count(text) < times:
            assert time.monotonic() < give_up_s, f"no {text!r} in {self.shown!r}"
            assert self._read(give_up_s - time.monotonic()), f"ended without {text!r}: {self.shown}"

    def wait_for_end(self) -> None:
        while self._read(PATIENCE_S):
            pass

    def _read(self, within_s: float) -> bool:
        """False at the end of the output."""
        ready, _, _ = select.select([self._master], [], [], max(within_s, 0.0))
        assert ready, f"nothing more after {self.shown!r}"
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # Linux's end of file of a pseudo-terminal
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)


@contextlib.contextmanager
def on_terminal(
    command: list[str], environment: Mapping[str, str], columns: int = 60
) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """Runs `command` with a terminal as its standard streams, and ends it after the block."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    try:
        yield Terminal(master), process
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        os.close(master)
