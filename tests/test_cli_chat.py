"""`paceline chat` on the echo engine: turns, commands, costs, and Ctrl-C that stops one answer."""

from __future__ import annotations

import io
import os
import signal
import threading

import pytest

from paceline.cli import main
from paceline.commands import session
from tests.echo_session import use_echo


@pytest.fixture(autouse=True)
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    use_echo(monkeypatch)


def talk(monkeypatch: pytest.MonkeyPatch, lines: list[str], *argv: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", *argv])


def test_each_line_gets_an_answer_and_its_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Tokens that come one by one: there is no rate to show when all arrive together.
    assert talk(monkeypatch, ["hello"], "slots=2 delay_s=0.002", "--max-tokens", "10") == 0
    captured = capsys.readouterr()
    assert captured.out == "user:hello\n"
    assert "[10 tokens, " in captured.err
    assert "tok/s" in captured.err
    assert "cut at the length limit" in captured.err


def test_accepted_drafts_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = '{"method": "ngram", "num_speculative_tokens": 2}'
    argv = ["k=2", "--max-tokens", "12", "--speculative-config", spec]
    assert talk(monkeypatch, ["hello"], *argv) == 0
    assert "drafts accepted" in capsys.readouterr().err


def test_the_conversation_goes_on_until_it_is_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["a", "b", "/reset", "c", "/exit", "never read"]
    assert talk(monkeypatch, lines, "slots=2", "--max-tokens", "30") == 0
    answers = capsys.readouterr().out.splitlines()
    # The echo of the prompt shows what the model was told.
    assert answers[0].startswith("user:a|user:a|")
    assert answers[1].startswith("user:a|assistant:user:a|")
    assert answers[2].startswith("user:c|user:c|")
    assert len(answers) == 3


def test_the_system_prompt_stays_after_a_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["slots=2", "--max-tokens", "16", "--system-prompt", "be kind"]
    assert talk(monkeypatch, ["/reset", "x"], *argv) == 0
    assert capsys.readouterr().out == "system:be kind|u\n"


def test_an_unknown_slash_command_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, ["/hlp", "", "/help"], "slots=2") == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "There is no /hlp. /help lists" in captured.err
    assert "/reset    forget the conversation" in captured.err
    assert "\x1b" not in captured.err


def test_a_message_may_have_many_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["a\\", "b", "/reset", '"""', "", "/exit", '"""', "/reset", '"""', "unfinished"]
    assert talk(monkeypatch, lines, "slots=2", "--max-tokens", "12") == 0
    assert capsys.readouterr().out == "user:a\nb|use\nuser:\n/exit|\nuser:unfinis\n"


def test_a_conversation_that_is_too_long_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["x" * 600, "short"]
    assert talk(monkeypatch, lines, "slots=2", "--max-tokens", "10") == 0
    captured = capsys.readouterr()
    assert "/reset starts again." in captured.err
    assert captured.out == "user:short\n"


def test_ctrl_c_stops_the_answer_and_not_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fired = threading.Event()
    taking = session.Answer.take

    def take_then_interrupt(self: session.Answer, deltas: list[object]) -> None:
        taking(self, deltas)  # type: ignore[arg-type]
        if self.num_tokens >= 3 and not fired.is_set():
            fired.set()
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(session.Answer, "take", take_then_interrupt)
    argv = ["delay_s=0.02", "--max-tokens", "400"]
    assert talk(monkeypatch, ["a long one", "/reset", "/exit"], *argv) == 0
    captured = capsys.readouterr()
    assert fired.is_set()
    assert captured.out.startswith("use")
    assert "stopped]" in captured.err
    assert "(a new conversation)" in captured.err
