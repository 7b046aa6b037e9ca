"""Renders a chat template that came with a request: in a process with limits on memory and time.

Jinja's sandbox keeps a template from files and modules, but not from `'%1000000000d' % 1` or an
endless loop. Both sides of the pipe speak JSON.
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
from paceline.text.chat import ChatTemplate, Message

MEMORY_MIB = 512
CPU_S = 2
WALL_S = 20.0  # for a machine that is busy with other work
MAX_CHARS = 1 << 24

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from paceline.text.template_child import main; main()"
)


def render_apart(
    template: str,
    named_tokens: Mapping[str, str],
    messages: Sequence[Message],
    arguments: Mapping[str, Any],
) -> str:
    """As `ChatTemplate.render`. Takes a tenth of a second or more: not for the event loop."""
    asked = json.dumps([template, dict(named_tokens), list(messages), dict(arguments)])
    command = [sys.executable, "-P", "-c", _BOOTSTRAP, json.dumps(sys.path)]
    try:
        done = subprocess.run(
            command,
            input=asked.encode(),
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
    """The child: limits first, then the template."""
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
