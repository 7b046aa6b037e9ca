"""The command line as a user types it: help, wrong flags, config files, what reaches the engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from docs.write_reference import pages
from paceline.cli import build_parser, leaf_parsers, main
from paceline.commands.arguments import (
    dataclass_from,
    engine_config,
    engine_keywords,
    read_config_file,
    size,
)
from paceline.errors import ConfigError
from paceline.server.options import ServerOptions
from paceline.speculation import DEFAULT_SPECULATION, SpeculativeConfig

VERBS = ["serve", "generate", "chat", "bench", "convert", "doctor"]
LEAVES = [*VERBS[:3], "bench latency", "bench throughput", "bench serve", *VERBS[4:]]


def parse(line: str, *more: str) -> Namespace:
    return build_parser().parse_args([*line.split(), *more])


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of standard error of a command that is refused with exit code 2."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("paceline: ")
    return lines[0]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(f"    {verb} " in text for verb in VERBS)


@pytest.mark.parametrize("leaf", LEAVES)
def test_help_of_each_command_is_short(
    leaf: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # whatever terminal the tests run in
    with pytest.raises(SystemExit):
        main([*leaf.split(), "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: paceline {leaf}")
    assert len(text.splitlines()) <= (130 if leaf == "serve" else 45)


def test_without_arguments_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "commands:" in capsys.readouterr().out
    assert main(["bench"]) == 0
    assert "kinds:" in capsys.readouterr().out


def test_python_dash_m_is_the_same_program() -> None:
    command = [sys.executable, "-m", "paceline", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("paceline 0.")


def test_help_starts_without_numpy_or_torch() -> None:
    code = (
        "import sys; from paceline.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(m in sys.modules for m in ('numpy', 'torch', 'tokenizers', 'jinja2')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--max-modle-len", "--max-model-len"),
        ("--max_model_len", "--max-model-len"),
        ("--tensor-parallel", "--tensor-parallel-size"),
        ("--speculative-conf", "--speculative-config"),
        ("--enable-prefix-cache", "--enable-prefix-caching"),
    ],
)
def test_a_wrong_flag_is_answered_with_the_nearest_one(
    wrong: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = complaint(capsys, "serve", "model", wrong, "4096")
    assert wrong in line
    assert f"Did you mean {right!r}?" in line


def test_flags_are_never_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--max-num-s" in complaint(capsys, "serve", "--max-num-s", "4")


@pytest.mark.parametrize(
    "flag", ["--trust-remote-code", "--enable-lora", "--lora-modules", "--pipeline-parallel-size"]
)
def test_flags_that_we_never_support_say_why(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(capsys, "serve", "model", flag)
    assert f"{flag} is not supported" in line


def test_a_wrong_command_is_answered_with_the_nearest_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "Did you mean 'serve'?" in complaint(capsys, "serv")
    assert "Did you mean 'latency'?" in complaint(capsys, "bench", "latencies")


def test_the_model_is_an_argument_not_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert "paceline serve MODEL" in complaint(capsys, "serve", "--model", "x")


def test_a_wrong_choice_names_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(capsys, "chat", "--dtype", "bfloat")
    assert "--dtype" in line
    assert "Did you mean 'bfloat16'?" in line


def test_contradicting_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(capsys, "generate", "--run-ahead", "1", "--no-async-scheduling")
    assert "contradicts" in line


@pytest.mark.parametrize(
    ("flags", "prefix_caching", "depth"),
    [
        ("", True, 1),
        ("--enable-prefix-caching --async-scheduling", True, 1),
        ("--no-enable-prefix-caching --no-async-scheduling", False, 0),
        ("--run-ahead 2", True, 2),
    ],
)
def test_switches_have_three_states(flags: str, prefix_caching: bool, depth: int) -> None:
    config = engine_config(parse(f"serve {flags}"))
    assert config.cache.enable_prefix_caching is prefix_caching
    assert config.scheduler.depth == depth


def test_without_a_model_ngram_drafts_are_the_default() -> None:
    assert engine_config(parse("serve")).speculative == SpeculativeConfig(
        method="ngram", num_speculative_tokens=5
    )
    assert engine_config(parse("serve some/model")).speculative is None
    assert engine_config(parse("serve --speculative-config none")).speculative is None


def test_short_flags_name_the_drafter() -> None:
    short = engine_config(parse("serve m --spec-method eagle3 --spec-model h --spec-tokens 2"))
    assert short.speculative == SpeculativeConfig(
        method="eagle3", model="h", num_speculative_tokens=2
    )
    # Without MODEL they replace the default drafter.
    alone = engine_config(parse("serve --spec-method ngram --spec-tokens 2"))
    assert alone.speculative == SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    with pytest.raises(ConfigError, match="none contradicts --spec-method"):
        engine_config(parse("serve --speculative-config none --spec-method ngram"))


def test_the_speculative_config_is_json() -> None:
    text = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2})
    config = engine_config(parse("serve m --speculative-config", text))
    assert config.speculative is not None
    assert config.speculative.num_speculative_tokens == 3


@pytest.mark.parametrize("text", ["{", "[]", "3", "{}"])
def test_a_broken_speculative_config_shows_an_example(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--speculative-config" in complaint(capsys, "serve", "--speculative-config", text)


def test_every_server_option_is_a_flag() -> None:
    args = parse("serve --port 0 --served-model-name a b --max-request-bytes 1MiB --host ::1")
    options = dataclass_from(args, ServerOptions)
    assert options == ServerOptions(
        port=0, served_model_name=("a", "b"), max_request_bytes=1 << 20, host="::1"
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("8k", 8000), ("8K", 8192), ("2GiB", 2 << 30), ("1.5G", 3 << 29)],
)
def test_sizes_may_carry_a_unit(text: str, number: int) -> None:
    assert size(text) == number


def write(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


CONFIG_JSON = """{
"model": "from/file", "max-num-seqs": 4, "enable_prefix_caching": false, "port": 7,
"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}"""
CONFIG_TOML = """
model = "from/file"
max-num-seqs = 4
enable_prefix_caching = false
port = 7
speculative_config = {method = "ngram", num_speculative_tokens = 2}
"""


@pytest.mark.parametrize(("name", "text"), [("c.json", CONFIG_JSON), ("c.toml", CONFIG_TOML)])
def test_a_config_file_holds_flags_and_given_flags_win(
    name: str, text: str, tmp_path: Path
) -> None:
    parser = build_parser()
    leaf = next(a for a in parser._actions if a.dest == "command").choices["serve"]  # type: ignore[index]
    leaf.set_defaults(**read_config_file(write(tmp_path, name, text), leaf))
    args = parser.parse_args(["serve", "--max-num-seqs", "9", "--enable-prefix-caching"])
    assert dataclass_from(args, ServerOptions).port == 7
    assert engine_keywords(args) == {
        "model": "from/file",
        "max_num_seqs": 9,
        "enable_prefix_caching": True,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    }


def test_a_config_file_may_use_any_name_of_a_flag(tmp_path: Path) -> None:
    path = write(tmp_path, "c.json", '{"dataset-path": "a.jsonl", "random_input_len": 3}')
    leaf = next(p for p in leaf_parsers(build_parser()) if p.prog == "paceline bench serve")
    assert read_config_file(path, leaf) == {"dataset": "a.jsonl", "input_len": 3}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"max-modle-len": 5}', "Did you mean 'max-model-len'?"),
        ('{"trust_remote_code": true}', "is not supported"),
        ('{"enforce-eager": "yes"}', "true or false"),
        ('{"port": "many"}', "port"),
        ('{"host": 5}', "must be a string"),
        ('{"dtype": "flot16"}', "Did you mean 'float16'?"),
        ("{", "not JSON"),
        ("port = ", "not TOML"),
    ],
)
def test_a_wrong_config_file_is_refused_by_name(
    text: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = complaint(capsys, "serve", "--config", write(tmp_path, "wrong", text))
    assert word in line


def test_a_missing_config_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in complaint(capsys, "serve", "--config=/no/such/file.json")


def test_the_default_speculation_is_valid() -> None:
    assert SpeculativeConfig.from_mapping(DEFAULT_SPECULATION).adaptive


def test_options_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        engine_config(parse("serve --max-num-seqs 512 --max-num-batched-tokens 256"))


def test_the_written_reference_is_up_to_date() -> None:
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text, "run `make docs`"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_server_runs_is_one_while_loading(
    number: signal.Signals, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_server(*_: object, on_ready: object) -> int:
        os.kill(os.getpid(), number)
        return 0

    monkeypatch.setattr("paceline.server.app.run_server", run_server)
    monkeypatch.setattr("paceline.commands.serve.configure_logging", lambda level: None)
    before = signal.getsignal(number)
    assert main(["serve", "some/model"]) == 128 + number
    assert capsys.readouterr().err.splitlines()[-1] == "paceline: stopped while loading"
    assert signal.getsignal(number) is before


def test_the_collector_leaves_alone_what_a_server_has_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the moment that it is ready."""
    calls: list[str] = []

    def run_server(*_: object, on_ready: Callable[[str, str], None]) -> int:
        calls.append("loaded")
        on_ready("http://here", "curl")
        return 0

    monkeypatch.setattr("paceline.server.app.run_server", run_server)
    monkeypatch.setattr("paceline.commands.serve.configure_logging", lambda level: None)
    monkeypatch.setattr("paceline.commands.serve.freeze_gc", lambda: calls.append("kept"))
    assert main(["serve", "some/model"]) == 0
    assert calls == ["loaded", "kept"]
    assert "http://here" in capsys.readouterr().out
