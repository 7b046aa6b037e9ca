"""`paceline generate` on the echo engine: files in, JSONL out, every prompt answered in order."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from tests.echo_session import use_echo

MODEL = "slots=4"


@pytest.fixture(autouse=True)
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    use_echo(monkeypatch)


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def generate(tmp_path: Path, text: str, *flags: str, code: int = 0) -> list[dict[str, Any]]:
    prompts, answers = tmp_path / "in", tmp_path / "out"
    prompts.write_text(text, encoding="utf-8")
    argv = ["generate", MODEL, "--input", str(prompts), "--output", str(answers), *flags]
    assert main(argv) == code
    return records(answers.read_text(encoding="utf-8"))


def test_each_line_is_a_prompt_and_answers_keep_the_order(tmp_path: Path) -> None:
    lines = [f"prompt number {i} " for i in range(50)]
    found = generate(tmp_path, "\n".join(lines), "--max-tokens", "9")
    assert [r["index"] for r in found] == list(range(50))
    assert [r["prompt"] for r in found] == lines
    assert [r["outputs"][0]["text"] for r in found] == [line[:9] for line in lines]
    assert {r["outputs"][0]["finish_reason"] for r in found} == {"length"}
    assert all(r["usage"]["completion_tokens"] == 9 for r in found)


def test_jsonl_lines_bring_their_own_parameters(tmp_path: Path) -> None:
    lines = [
        {"prompt": "abcdef", "max_tokens": 2, "id": "first"},
        {"prompt_token_ids": [70, 71, 72], "max_tokens": 3},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7},
        {"prompt": "xyz", "n": 2},
    ]
    text = "\n".join(json.dumps(line) for line in lines)
    found = generate(tmp_path, text, "--max-tokens", "4")
    assert found[0]["id"] == "first"
    assert found[0]["outputs"][0]["text"] == "ab"
    assert found[1]["outputs"][0]["token_ids"] == [70, 71, 72]
    assert found[2]["outputs"][0]["text"] == "user:hi"
    assert [o["text"] for o in found[3]["outputs"]] == ["xyzx", "xyzx"]


def test_chat_wraps_each_line_in_a_message(tmp_path: Path) -> None:
    found = generate(tmp_path, "hello", "--chat", "--max-tokens", "10")
    assert found[0]["outputs"][0]["text"] == "user:hello"


def test_stop_strings_and_lengths_come_from_flags(tmp_path: Path) -> None:
    found = generate(tmp_path, "one two three ", "--stop", "three", "--max-tokens", "40")
    assert found[0]["outputs"][0]["text"] == "one two "
    assert found[0]["outputs"][0]["stop_reason"] == "three"


def test_standard_input_and_output_are_the_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("ping \n\npong \n"))
    assert main(["generate", MODEL, "--max-tokens", "4"]) == 0
    found = records(capsys.readouterr().out)
    assert [r["outputs"][0]["text"] for r in found] == ["ping", "pong"]


def test_a_prompt_that_is_too_long_fails_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = generate(tmp_path, f"short\n{'x' * 600}\nfine", "--max-tokens", "2", code=1)
    assert found[0]["outputs"][0]["text"] == "sh"
    assert "600 tokens" in found[1]["error"]
    assert found[2]["outputs"][0]["text"] == "fi"
    assert "1 of 3 prompts failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no prompts"),
        ('{"prompt": "a"}\n{"prompt"', ":2: not JSON"),
        ('{"prompt": "a"}\n{"text": "b"}', ":2: give one of"),
        ('{"prompt": "a", "temprature": 1}', "Did you mean 'temperature'?"),
        ('{"prompt": "a", "top_p": 3}', ":1: top_p"),
        ('{"prompt_token_ids": ["a"]}', "list of integers"),
        ('{"messages": []}', "messages"),
    ],
)
def test_a_broken_input_file_is_refused_before_loading(
    text: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    # A model that cannot be loaded: if anything were loaded first, that would be the complaint.
    assert main(["generate", "refuse=everything", "--input", str(path)]) == 2
    opening, line = capsys.readouterr().err.splitlines()
    assert opening.startswith("Paceline 0.")
    assert word in line


def test_files_that_cannot_be_opened_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", MODEL, "--input", "/no/such/file"]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "reason"),
    [("refuse=nonsense", "nonsense is no checkpoint."), ("fail_at=3", "the device caught fire")],
)
def test_an_engine_that_fails_is_one_line_of_ours(
    model: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts"
    path.write_text("hello", encoding="utf-8")
    assert main(["generate", model, "--input", str(path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    ours = [line for line in lines if line.startswith("paceline: ")]
    assert len(ours) == 1
    assert reason in ours[0]


class Unread(io.StringIO):
    """A standard input that must not be read."""

    def read(self, size: int | None = -1, /) -> str:
        raise AssertionError("stdin was read")


def test_a_prompt_may_be_given_as_a_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Unread())
    assert main(["generate", MODEL, "--prompt", "two\nlines", "--max-tokens", "5"]) == 0
    (found,) = records(capsys.readouterr().out)
    assert (found["prompt"], found["outputs"][0]["text"]) == ("two\nlines", "two\nl")
    assert main(["generate", MODEL, "--prompt", "a", "--input", "b"]) == 2
    assert "--prompt and --input" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["./no-such-folder", "no-owner", "no/such.gguf"])
def test_a_model_that_is_not_there_is_named_before_stdin_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    monkeypatch.undo()  # the true check of MODEL
    monkeypatch.setattr("sys.stdin", Unread())
    assert main(["generate", model]) == 1
    assert "is not a file or folder" in capsys.readouterr().err
