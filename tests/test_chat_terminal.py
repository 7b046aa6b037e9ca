"""`paceline chat` on a terminal: markdown, wrapped words, many lines, and input that is off."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

from paceline.commands.terminal import (
    LastLines,
    MarkdownView,
    WrappedView,
    end_of_blocks,
    printable,
)
from tests.terminal import Terminal, on_terminal

# `paceline chat` with the echo engine, which is ready when the file in argv[1] exists.
CHAT = """
import sys, time, pytest
from pathlib import Path
from tests.echo_session import use_echo
use_echo(pytest.MonkeyPatch())
from paceline.commands import loading
start, gate = loading.start_engine, Path(sys.argv.pop(1))
def start_later(config):
    print("the engine is starting")
    while not gate.exists():
        time.sleep(0.01)
    return start(config)
loading.start_engine = start_later
if sys.argv[1] == "without-rich":
    sys.argv.pop(1)
    sys.modules["rich.console"] = None
from paceline.cli import main
sys.exit(main())
"""
ENVIRONMENT = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
ENVIRONMENT.pop("NO_COLOR", None)
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|4[0-7])(?:;\d+)*m")


def command(gate: Path, *argv: str) -> list[str]:
    return [sys.executable, "-c", CHAT, str(gate), *argv]


class Chat:
    """Types a message at each prompt."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.num_prompts = 0

    def send(self, *lines: str, end: str = "\n") -> None:
        for number, line in enumerate(lines):
            self.num_prompts += number == 0
            mark = "\n> " if number == 0 else "\n. "
            times = self.num_prompts if number == 0 else self.terminal.text.count(mark) + 1
            if number:
                self.terminal.type("\n")
            self.terminal.wait_for(mark, times)
            self.terminal.type(line)
        self.terminal.type(end)


def test_a_conversation_with_markdown(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    argv = command(gate, "chat", "slots=2", "--max-tokens", "31")
    with on_terminal(argv, ENVIRONMENT) as (terminal, process):
        chat = Chat(terminal)
        terminal.wait_for("the engine is starting")
        terminal.type("typed too early\n")
        gate.touch()
        chat.send("/help")
        terminal.wait_for("/reset    forget the conversation")
        chat.send("a **bold** word and <b>tags</b>")
        terminal.wait_for("[31 tokens")
        assert "\x1b[1mbold\x1b[0m" in terminal.shown
        assert "user:a bold word and <b>tag" in terminal.text
        chat.send("/reset")
        chat.send("first \\", "second")
        terminal.wait_for("[31 tokens", times=2)
        assert "user:first\nsecond|user" in squeezed(terminal.text)
        chat.send("/reset")
        chat.send('"""', "one", "/exit", '"""')
        terminal.wait_for("[31 tokens", times=3)
        assert "user:one\n/exit|" in squeezed(terminal.text)
        chat.send("/reset")
        chat.send("\x1b[200~pasted\ntogether\x1b[201~")
        terminal.wait_for("[31 tokens", times=4)
        assert "user:pasted\ntogether|" in squeezed(terminal.text)
        chat.send("\x04", end="")
        terminal.wait_for_end()
        assert process.wait() == 0
    assert "typed too early" not in terminal.text
    assert COLOUR.search(terminal.shown)


def squeezed(text: str) -> str:
    """Without blanks at the ends of lines, with which a drawn block is filled up."""
    return re.sub(r" +\n", "\n", text)


def test_without_rich_words_are_wrapped_and_without_colour_nothing_is_styled(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    words = " ".join(["alpha", "beta", "gamma", "delta"] * 5)
    argv = command(gate, "without-rich", "chat", "slots=2", "--max-tokens", "115")
    environment = {**ENVIRONMENT, "NO_COLOR": "1"}
    with on_terminal(argv, environment, columns=30) as (terminal, process):
        chat = Chat(terminal)
        chat.send(words)
        terminal.wait_for("[115 tokens")
        chat.send("/exit")
        terminal.wait_for_end()
        assert process.wait() == 0
    answer = terminal.text[terminal.text.index("user:") : terminal.text.index("[115 tokens")]
    lines = answer.strip().split("\n")
    assert f"user:{words}|".startswith(" ".join(lines))
    assert len(lines) > 3
    assert all(len(line) <= 30 for line in lines)
    assert "\x1b[1m" not in terminal.shown
    assert not COLOUR.search(terminal.shown)


def test_ctrl_c_stops_an_answer_and_what_was_typed_meanwhile_is_dropped(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    argv = command(gate, "chat", "slots=2 delay_s=0.02", "--max-tokens", "400")
    with on_terminal(argv, ENVIRONMENT) as (terminal, process):
        chat = Chat(terminal)
        chat.send("hello")
        terminal.wait_for("user:hello|user:")
        terminal.type("impatient\n")
        terminal.type("\x03")
        terminal.wait_for("stopped]")
        chat.send("\x04", end="")
        terminal.wait_for_end()
        assert process.wait() == 0
    assert "impatient" not in terminal.text


@pytest.mark.parametrize("moment", ["start", "answer", "prompt"])
def test_sigterm_leaves_the_terminal_as_it_was(moment: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    argv = command(gate, "chat", "slots=2 delay_s=0.02", "--max-tokens", "400")
    with on_terminal(argv, ENVIRONMENT) as (terminal, process):
        terminal.wait_for("the engine is starting")
        assert not terminal.echoes
        if moment != "start":
            gate.touch()
            chat = Chat(terminal)
            chat.send("hello" if moment == "answer" else "/help")
            if moment == "answer":
                terminal.wait_for("user:hello|user:")
            else:
                terminal.wait_for("\n> ", times=2)
        process.send_signal(signal.SIGTERM)
        terminal.wait_for_end()
        assert process.wait() == 128 + signal.SIGTERM
        assert terminal.echoes
    assert terminal.shown.count(HIDE) == terminal.shown.count(SHOW)
    assert "Traceback" not in terminal.text


def test_the_cursor_is_hidden_from_the_first_text_to_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupt before the first text finds it shown."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    view = MarkdownView(has_colour=False)
    assert HIDE not in capsys.readouterr().out
    view.write("text")
    view.end()
    shown = capsys.readouterr().out
    assert shown.count(HIDE) == shown.count(SHOW) == 1


def test_dumb_terminals_get_no_escape_sequences(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    argv = command(gate, "chat", "slots=2", "--max-tokens", "10")
    environment = {**ENVIRONMENT, "TERM": "dumb"}
    with on_terminal(argv, environment) as (terminal, process):
        chat = Chat(terminal)
        chat.send("hello")
        terminal.wait_for("[10 tokens")
        chat.send("/exit")
        terminal.wait_for_end()
        assert process.wait() == 0
    after = terminal.shown[terminal.shown.index("hello") :]
    assert not re.search(r"\x1b\[[0-9;]*m", after)


def test_wrapping_does_not_depend_on_how_the_text_arrives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.commands.terminal.columns", lambda: 20)
    text = "one two three four five six\n\n- a list item that is long\n"
    text += "```\ncode that is not wrapped\n```\nend"
    shown = []
    for size in (1, 3, 7, len(text)):
        view = WrappedView()
        for at in range(0, len(text), size):
            view.write(text[at : at + size])
        view.end()
        shown.append(capsys.readouterr().out)
    assert len(set(shown)) == 1
    lines = shown[0].split("\n")
    assert lines[:3] == ["one two three four", "five six", ""]
    assert "code that is not wrapped" in lines
    assert [len(line) for line in lines if len(line) > 20] == [24]


def test_blocks_end_at_blank_lines_outside_of_code_and_lists() -> None:
    assert end_of_blocks("a paragraph\n\n") == 0  # an indented line may follow
    assert end_of_blocks("a paragraph\n\nnext") == len("a paragraph\n\n")
    assert end_of_blocks("1. item\n\n   more of it") == 0
    assert end_of_blocks("```\ncode\n\nmore code\n") == 0
    assert end_of_blocks("```\ncode\n```\n\nafter") == len("```\ncode\n```\n\n")


def test_of_a_tall_block_the_end_is_drawn() -> None:
    console = Console(file=io.StringIO(), width=20, height=5)
    view = LastLines("\n".join(f"line {i}" for i in range(30)))
    drawn = ["".join(s.text for s in line).strip() for line in console.render_lines(view)]
    assert [line for line in drawn if line] == [f"line {i}" for i in range(26, 30)]


def test_escape_sequences_of_a_model_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\tc\r\nd\x9b1m") == "a[2Jb\tc\nd1m"
