"""Coding agents, each with its own API: they edit a file and run a command by the script.

`make test-agents` installs them. An agent has its home in a scratch folder and reaches loopback
only: every other address goes to a proxy that does not exist.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.clients.script import RESULT, call, script
from tests.clients.scripted import MODEL, scripted_server
from tests.e2e.serving import ServerProcess

BIN = Path(__file__).parent / "agents" / "node_modules" / ".bin"
WITHIN_S = 240
RUN = {"command": "cat note.txt && echo $((6 * 7)) > ran.txt", "description": "Show the file"}
FINAL = f"The command said: {RESULT}"


@dataclass(frozen=True)
class Scratch:
    """Where an agent lives, and the server that it talks to."""

    home: Path
    work: Path
    url: str

    @property
    def note(self) -> str:
        return str(self.work / "note.txt")


@dataclass
class Run:
    """How to start an agent: the arguments, and what it reads."""

    arguments: list[str]
    answers: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    prompt_in_arguments: bool = True  # else on its standard input


def codex(at: Scratch) -> Run:
    """Speaks Responses. It edits through a command that it knows."""
    (at.home / ".codex").mkdir()
    (at.home / ".codex" / "config.toml").write_text(
        f'model = "{MODEL}"\n'
        'model_provider = "paceline"\n'
        "check_for_update_on_startup = false\n"
        "[model_providers.paceline]\n"
        'name = "paceline"\n'
        f'base_url = "{at.url}/v1"\n'
        'wire_api = "responses"\n'
        "[analytics]\nenabled = false\n",
        encoding="utf-8",
    )
    patch = "*** Begin Patch\n*** Update File: note.txt\n@@\n-old line\n+new line\n*** End Patch"
    return Run(
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
        [
            "<think>A patch will do.</think>I edit."
            + call("exec_command", cmd=f"apply_patch <<'EOF'\n{patch}\nEOF"),
            call("exec_command", cmd=RUN["command"]),
            FINAL,
        ],
    )


def claude(at: Scratch) -> Run:
    """Speaks Messages."""
    edit: dict[str, Any] = {"old_string": "old line", "new_string": "new line"}
    return Run(
        ["--permission-mode", "bypassPermissions", "--print"],
        [
            "<think>I read it first.</think>I read." + call("Read", file_path=at.note),
            "I edit." + call("Edit", file_path=at.note, **edit),
            call("Bash", **RUN),
            FINAL,
        ],
        {
            "ANTHROPIC_BASE_URL": at.url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",  # root may bypass permissions
        },
    )


def opencode(at: Scratch) -> Run:
    """Speaks chat completions."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Paceline",
        "options": {"baseURL": f"{at.url}/v1", "apiKey": "none"},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 300_000, "output": 4096}}},
    }
    config = {
        "autoupdate": False,
        "share": "disabled",
        "model": f"paceline/{MODEL}",
        "provider": {"paceline": provider},
    }
    (at.work / "opencode.json").write_text(json.dumps(config), encoding="utf-8")
    return Run(
        ["run"],
        [
            "<think>I read it first.</think>I read." + call("read", filePath=at.note),
            "I edit." + call("edit", filePath=at.note, oldString="old line", newString="new line"),
            call("bash", **RUN),
            FINAL,
        ],
        {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
        prompt_in_arguments=False,  # there it would put a backslash before each quote
    )


def qwen(at: Scratch) -> Run:
    """Speaks chat completions."""
    edit: dict[str, Any] = {"old_string": "old line", "new_string": "new line"}
    return Run(
        ["--yolo", "--auth-type", "openai", "--prompt"],
        [
            "<think>I read it first.</think>I read." + call("read_file", file_path=at.note),
            "I edit." + call("edit", file_path=at.note, **edit),
            call("run_shell_command", is_background=False, **RUN),
            FINAL,
        ],
        {"OPENAI_BASE_URL": f"{at.url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL},
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with scripted_server(tmp_path_factory.mktemp("agents")) as process:
        yield process


@pytest.mark.agents
@pytest.mark.timeout(WITHIN_S + 60)
@pytest.mark.parametrize("agent", [codex, claude, opencode, qwen], ids=lambda a: a.__name__)
def test_an_agent_edits_a_file_and_runs_a_command(
    agent: Callable[[Scratch], Run], server: ServerProcess, tmp_path: Path
) -> None:
    program = BIN / agent.__name__
    if not program.exists():
        pytest.skip("the agents are not installed: `make test-agents` does it, and needs npm")
    at = Scratch(tmp_path / "home", tmp_path / "work", f"http://127.0.0.1:{server.port}")
    at.home.mkdir()
    at.work.mkdir()
    Path(at.note).write_text("old line\n", encoding="utf-8")
    logged = len(server.said())
    run = agent(at)
    said = ended([str(program), *run.arguments], script(*run.answers), run, at)
    assert Path(at.note).read_text(encoding="utf-8") == "new line\n", said
    assert (at.work / "ran.txt").read_text(encoding="utf-8") == "42\n", said
    assert "The command said: " in said
    assert "new line" in said.rpartition("The command said: ")[2]
    requests = [line for line in server.said()[logged:].splitlines() if " POST /v1/" in line]
    assert len(requests) >= len(run.answers)
    assert [line for line in requests if " 200 " not in line] == []
    drafts, accepted = (
        server.gauge(f"spec_decode_num_{kind}_tokens_total") for kind in ("draft", "accepted")
    )
    assert 0 < accepted < drafts


def ended(command: list[str], prompt: str, run: Run, at: Scratch) -> str:
    """What the agent printed, once it has ended well. Nothing that it started is left."""
    nowhere = "http://127.0.0.1:9"
    environment = {
        **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
        "HOME": str(at.home),
        "TERM": "dumb",
        "NO_COLOR": "1",
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "NO_PROXY": "127.0.0.1,localhost",
        **run.environment,
    }
    process = subprocess.Popen(
        [*command, prompt] if run.prompt_in_arguments else command,
        cwd=at.work,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate("" if run.prompt_in_arguments else prompt, timeout=WITHIN_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, said
    return said
