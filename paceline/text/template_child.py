"""Renders a chat template of a request in a child process with limits on memory and time.

Jinja's sandbox denies access to files and modules, but allows `'%1000000000d' % 1` and endless
loops. Parent and child exchange JSON.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import ConfigError, InvalidRequest
from paceline.text.chat import ChatTemplate

MEMORY_MIB = 512
CPU_S = 2
WALL_S = 20.0  # more than CPU_S, for a busy machine
MAX_CHARS = 1 << 24

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from paceline.text.template_child import main; main()"
)


def render_in_child(
    template: str,
    named_tokens: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
) -> str:
    """As `ChatTemplate.render`. Takes 0.1 s or more, so do not call it on the event loop."""
    request = json.dumps([template, dict(named_tokens), list(messages), dict(arguments)])
    command = [sys.executable, "-P", "-c", _BOOTSTRAP, json.dumps(sys.path)]
    try:
        done = subprocess.run(
            command,
            input=request.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=WALL_S,
        )
    except subprocess.TimeoutExpired:
        raise _stopped(f"took more than {WALL_S:.0f} s") from None
    if done.returncode == -signal.SIGXCPU:
        raise _stopped(f"took more than {CPU_S} s of CPU time")
    if done.returncode != 0:
        raise _stopped(f"ended its process with code {done.returncode}")
    text, error, param = json.loads(done.stdout)
    if error is not None:
        raise InvalidRequest(error, param=param)
    return str(text)


def _stopped(why: str) -> InvalidRequest:
    return InvalidRequest(f"chat_template was stopped: it {why}.", param="chat_template")


def main() -> None:
    """Runs in the child: set limits, then render."""
    num_bytes = MEMORY_MIB << 20
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template, named_tokens, messages, arguments = json.load(sys.stdin)
    text, error, param = None, None, None
    try:
        compiled = ChatTemplate("this request", {"default": template}, named_tokens)
        text = compiled.render(messages, **arguments)
        if len(text) > MAX_CHARS:
            text, error = None, f"chat_template gives a prompt of more than {MAX_CHARS} characters."
    except MemoryError:
        error = str(_stopped(f"needed more than {MEMORY_MIB} MiB of memory"))
    except InvalidRequest as refusal:
        error, param = str(refusal), refusal.param
    except ConfigError as refusal:
        error = str(refusal)
    json.dump([text, error, param or "chat_template"], sys.stdout)
