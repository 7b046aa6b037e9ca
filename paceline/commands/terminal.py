"""The terminal of `paceline chat`: answers while they arrive, and input that is off meanwhile.

With the package rich an answer is shown as markdown, without it as text wrapped between words.
What is not a terminal gets the text as it came.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

from paceline.config import terminal_styles_from_env

# Escape sequences of a model must not reach the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_WORDS = re.compile(r"\n|[^\S\n]*\S+|[^\S\n]+")  # with the blanks before them
_LONGEST_WORD = 24  # more is shown before its end: some languages have no blanks
_FENCES = ("```", "~~~")
_STYLES = {"bold": "1", "dim": "2", "green": "32"}
_COLUMNS = 80


class AnswerView(Protocol):
    def write(self, text: str) -> None: ...

    def end(self) -> None:
        """The answer is complete: the cursor goes to a new line."""


def open_view() -> AnswerView:
    if not sys.stdout.isatty():
        return RawView()
    styles = terminal_styles_from_env()
    if styles.is_dumb:
        return WrappedView()
    try:
        return MarkdownView(has_colour=styles.has_colour)
    except ModuleNotFoundError:
        return WrappedView()


def styled(text: str, style: str, stream: Any, *, in_prompt: bool = False) -> str:
    """`text` with a style, if the stream is a terminal that wants one.

    In a prompt of readline the codes are marked, because they take no columns.
    """
    styles = terminal_styles_from_env()
    if not (stream.isatty() and styles.has_colour):
        return text
    begin, end = f"\x1b[{_STYLES[style]}m", "\x1b[0m"
    return f"\x01{begin}\x02{text}\x01{end}\x02" if in_prompt else f"{begin}{text}{end}"


@contextmanager
def input_off() -> Iterator[None]:
    """What is typed within the block is neither shown nor read later. Ctrl-C works."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):  # not a terminal
        yield
        return
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    try:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, quiet)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)  # drops unread input


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Within the block SIGTERM raises SystemExit, so that the terminal is left as it was.

    A signal that arrives just before readline waits for a key does not end that wait. So a thread
    sends it again until Python has seen it.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before, before_fd = signal.signal(signal.SIGTERM, _exit), signal.set_wakeup_fd(writer)
    watch = threading.Thread(target=_repeat_sigterm, args=(reader, threading.get_ident()))
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before_fd)
        signal.signal(signal.SIGTERM, before)
        os.close(writer)


def _exit(number: int, _: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    sys.exit(128 + number)


def _repeat_sigterm(reader: int, main_thread: int) -> None:
    while arrived := os.read(reader, 1):  # the numbers of signals, until the writer is closed
        time.sleep(0.1)
        while arrived[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is _exit:
            signal.pthread_kill(main_thread, signal.SIGTERM)
            time.sleep(0.1)
    os.close(reader)


class RawView:
    def write(self, text: str) -> None:
        print(text, end="", flush=True)

    def end(self) -> None:
        print(flush=True)


class WrappedView:
    """Begins a new line before a word that does not fit. Code blocks keep their lines."""

    def __init__(self) -> None:
        self._pending = ""  # a word that may go on
        self._line = ""
        self._is_code = False

    def write(self, text: str) -> None:
        words = _WORDS.findall(self._pending + printable(text))
        may_go_on = bool(words) and words[-1] != "\n" and len(words[-1]) <= _LONGEST_WORD
        self._pending = words.pop() if may_go_on else ""
        for word in words:
            self._put(word)
        sys.stdout.flush()

    def end(self) -> None:
        self._put(self._pending)
        print(flush=True)

    def _put(self, word: str) -> None:
        if word == "\n":
            self._is_code ^= self._line.lstrip().startswith(_FENCES)
            self._line = ""
        elif not self._is_code and self._line and len(self._line + word) > columns():
            word = word.lstrip()
            print()
            self._line = word
        else:
            self._line += word
        print(word, end="")


class MarkdownView:
    """Finished blocks are printed for good. The last block is drawn again with each piece of it."""

    def __init__(self, *, has_colour: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=sys.stdout, no_color=not has_colour, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._text = ""

    def write(self, text: str) -> None:
        if not self._live.is_started:
            self._live.start()  # hides the cursor until `end`
        self._text += printable(text)
        cut = end_of_blocks(self._text)
        if cut:
            self._console.print(_markdown(self._text[:cut]))
            self._console.print()
            self._text = self._text[cut:]
        self._live.update(LastLines(self._text), refresh=True)

    def end(self) -> None:
        self._live.stop()
        self._console.print(_markdown(self._text))


class LastLines:
    """As much of the end of a block as the screen has lines."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        lines = console.render_lines(_markdown(self._text), options, pad=False)
        for line in lines[-max(console.size.height - 1, 1) :]:
            yield from line
            yield Segment.line()


def _markdown(text: str) -> Any:
    """HTML is text, links show their address, and line breaks stay."""
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown

    made = Markdown("", hyperlinks=False)
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    made.parsed = parser.parse(text)
    for token in made.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return made


def end_of_blocks(text: str) -> int:
    """Where the last block begins: after a blank line outside of code, before a line that is not
    indented, because that may belong to a list above."""
    found = at = 0
    is_code = was_blank = False
    for line in text.splitlines(keepends=True):
        if was_blank and not is_code and not line[:1].isspace():
            found = at
        is_code ^= line.lstrip().startswith(_FENCES)
        was_blank = not line.strip()
        at += len(line)
    return found


def printable(text: str) -> str:
    """Without control characters but newlines and tabs."""
    return _CONTROL.sub("", text)


def columns() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or _COLUMNS
    except (OSError, ValueError):
        return _COLUMNS
