"""Writes docs/reference from the code: every flag, field and metric. Run by `make docs`.

Never edited by hand; a test compares the files with what this writes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path

from docs.python_reference import python_api
from docs.supported import supported
from paceline.cli import build_parser, leaf_parsers
from paceline.server.completions import MAX_PROMPTS
from paceline.server.fields import ECHOED
from paceline.server.limits import LIMITS, MAX_CONTAINERS, MAX_MEMBERS, MAX_VALUES
from paceline.server.messages_types import MessagesRequest
from paceline.server.metrics import Metrics
from paceline.server.middleware import OPEN_PATHS
from paceline.server.operations import OPERATIONS
from paceline.server.params import MAX_TABLE_ENTRIES
from paceline.server.requests import (
    NOT_BUILT,
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
    GenerateFields,
)
from paceline.server.responses_types import ResponsesRequest
from paceline.server.tokens import MAX_TOKENIZE_CHARS
from paceline.speculation import METHODS_NOT_SERVED, NOT_SERVED, SpeculativeConfig

FOLDER = Path(__file__).parent / "reference"
KEYS = """
[The page](../howto/page.md) tells what browsers get at `/`, and what `/v1/live` sends.
`--no-page` switches off both, `/page/` and `/v1/live/trace`.

Routes that generate take `"stream": true` and then answer with server-sent events.
[The other two APIs](../howto/apis.md) says what of Responses and Messages is served.
`/openapi.json` has every type, and `/docs` shows it.

With `--api-key` (or `PACELINE_API_KEY`) a request needs `Authorization: Bearer KEY` or
`x-api-key: KEY`, except for {}.
Without a key, `/admin` is served to this machine only.

While ranks restart, `/health` says `"status": "restarting"` (no replica serves; new requests wait)
or `"degraded"`, and the reason. See [faults](../howto/faults.md).
"""
DOORS = """
A body must say that it is JSON (`Content-Type: application/json`); any other type, or none, is
answered 415.

On a loopback address (the default) the server refuses web pages of other sites and host names that
were made to resolve to this machine (DNS rebinding). It answers 403 unless the `Host` header names
`localhost`, `*.localhost`, a loopback address or one of `--allowed-hosts`, and the `Origin`, if
there is one, is the server's own, one of this machine or one of `--allowed-origins`. On other
addresses both are checked if `--allowed-hosts` is given; the address that a client connected to is
then allowed too. HTTP/1.1 without exactly one `Host` is 400 everywhere.

| of one request | limit | beyond it |
|---|---|---|
| request line, headers, trailers and chunk extensions | 64 KiB | the connection is closed |
| time for the header | `--header-timeout-s` | the connection is closed |
| body | `--max-request-bytes` | 413 |
| time for the body and its trailers | 60 s | 408 |

A reply that begins before the whole request has arrived ends the connection, and so does every 401.
At `--max-connections`, connections without a request are closed to let others in. So are the oldest
that have sent no complete header after 0.25 s, or no complete body after `--header-timeout-s`.
"""
FIELDS = """
Names and meanings are OpenAI's and vLLM's. Ours are `num_speculative_tokens`, the most drafts that
a step verifies for this request (0 is none), `speculative`, an object with this number and the
`method` of the loaded drafter or "none", and `extra_args`, which custom logits processors read.
`return_token_sources: true` adds `token_sources` to each choice: for each output token its text
(`token`) and its `source`, which is `draft` (an accepted draft), `forced` (an accepted draft for
which a grammar left no other choice) or `drawn`. A step ends with a drawn token unless the output
ends with a draft. In a chunk these are the tokens since the chunk before.
`response_format` and `structured_outputs` make the output follow a schema, a regex, a list of
choices or a grammar; see [structured output](../howto/structured_output.md).
What is not given comes from the model's generation config. `max_tokens` past the model's length is
no error: the answer ends there, with finish reason `length`.
"""
TOOLS = """
[Tools and reasoning](../howto/tools.md) has examples. `tool_choice` is `auto` (the default if there
are tools), `none`, `required` or `{"type": "function", "function": {"name": ...}}`. A message or
delta with reasoning has it under two names, vLLM's `reasoning` and DeepSeek's `reasoning_content`;
`include_reasoning: false` leaves both out. The finish reason of a choice that made a call is
`tool_calls`, also for a required call. `reasoning_effort` is passed to the chat template;
`none` also sets its `enable_thinking` and `thinking` to false. `functions` and `function_call` are
answered 400: send `tools` and `tool_choice`. The same holds for tools of other types than
`function`, and for `tool_choice` of type `allowed_tools`.
"""
ECHO = """
In messages and content parts a field of any name is accepted if it is null. So are fields of
earlier replies and of other servers' caches: {}.
"""
LIMITS_TEXT = """
A request over one of these is answered 400 with the field and the limit. A body may have
`--max-request-bytes` (413 otherwise), and in it at most {values} values, {members} members
of objects and {containers} objects and arrays. `prompt` may hold {prompts} prompts; one
prompt may be as long as the model's context. `allowed_token_ids`, `logit_bias`, the JSON bytes of
`extra_args` and a sixteenth of those of `structured_outputs` may come to {table} over all sequences
of a request. A schema or grammar has at most 131,072 bytes.
`/tokenize` takes {tokenize} characters.
"""

ENDS = """
## Exit codes, signals and logs

The exit code is 0 for success, 2 for a wrong flag or file, 1 for any other error (one line on
standard error), and 130 after Ctrl-C.

On SIGTERM, SIGHUP or Ctrl-C a server finishes its open requests (`--drain-timeout`) and exits
with 0. A second signal ends it at once, with 130. A signal while the model is loading ends it with
"stopped while loading" and 128 plus the signal's number.

The log is written to standard error and never makes the server wait. Lines that cannot be written
(the reader is stuck, the disk is full) are dropped. Their number is logged when the log can be
written again, and `paceline:log_lines_dropped_total` counts those of the server process.
"""


def pages() -> dict[Path, str]:
    texts = {"cli": command_line, "http": http, "python": python_api, "supported": supported}
    return {FOLDER / f"{name}.md": write() for name, write in texts.items()}


def http() -> str:
    common = GenerateFields.__struct_fields__
    own = {k: [n for n in k.__struct_fields__ if n not in common] for k in _BODIES}
    lines = ["# HTTP", "", "Written by `make docs`; do not edit.", "", "| route | |", "|---|---|"]
    lines += [f"| `{op.method} {op.open_path}` | {op.summary} |" for op in OPERATIONS]
    lines += [KEYS.format(_listed(sorted(OPEN_PATHS)))]
    lines += ["## Who may call, and how much", DOORS, "## Fields of a request", FIELDS]
    lines += ["| | |", "|---|---|", f"| chat and text completions | {_listed(common)} |"]
    lines += [f"| {name} | {_listed(own[kind])} |" for kind, name in _BODIES.items()]
    lines += [f"| {name} | {_listed(kind.__struct_fields__)} |" for kind, name in _OTHERS.items()]
    lines += [f"| accepted, without effect | {_listed(sorted(WITHOUT_EFFECT))} |"]
    lines += [f"| not supported: 400, unless they ask for nothing | {_listed(NOT_BUILT)} |", ""]
    lines += ["Any other name is answered 400 with the nearest one."]
    lines += [ECHO.format(_listed(sorted(ECHOED))), "## Tools and reasoning", TOOLS]
    lines += ["## Limits", _limits_text()]
    lines += ["| field | entries | characters of a string | bytes of JSON |", "|---|---|---|---|"]
    for name, limit in LIMITS.items():
        numbers = (limit.entries, limit.chars, limit.json_bytes)
        cells = " | ".join("" if n is None else f"{n:,}" for n in numbers)
        lines.append(f"| `{name}` | {cells} |")
    lines += ["", "## Metrics", ""]
    lines += ["| name | kind | |", "|---|---|---|"]
    for family in Metrics().collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        lines.append(f"| `{name}` | {family.type} | {family.documentation} |")
    return "\n".join(lines) + "\n"


def _limits_text() -> str:
    return LIMITS_TEXT.format(
        values=f"{MAX_VALUES:,}",
        members=f"{MAX_MEMBERS:,}",
        containers=f"{MAX_CONTAINERS:,}",
        prompts=f"{MAX_PROMPTS:,}",
        table=f"{MAX_TABLE_ENTRIES:,}",
        tokenize=f"{MAX_TOKENIZE_CHARS:,}",
    )


_BODIES = {ChatRequest: "chat completions", CompletionRequest: "text completions"}
_OTHERS = {ResponsesRequest: "responses", MessagesRequest: "messages"}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def command_line() -> str:
    lines = ["# Command line", "", "Written by `make docs`; do not edit.", ""]
    lines += ["Flags marked (ours) are not vLLM's.", ""]
    for parser in leaf_parsers(build_parser()):
        lines += [f"## {parser.prog}", "", str(parser.description), ""]
        lines += [f"    {parser.format_usage().removeprefix('usage: ').strip()}", ""]
        for group in parser._action_groups:
            actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS]
            if actions:
                lines += [f"| {group.title} | |", "|---|---|"]
                lines += [f"| `{_name(a)}` | {_escape(str(a.help))} |" for a in actions]
                lines.append("")
        if parser.epilog:
            lines += [parser.epilog, ""]
    return "\n".join(lines).rstrip() + "\n" + ENDS


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar)
    flag = action.option_strings[-1]
    if isinstance(action, argparse.BooleanOptionalAction):
        return action.option_strings[0].replace("--", "--[no-]", 1)
    more = " ..." if action.nargs == "+" else ""
    return f"{flag} {action.metavar}{more}" if action.metavar else flag


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("%%", "%")


def documented_rows() -> Iterator[str]:
    """The rows of the tables in docs/howto/speculation.md: keys that are served, methods and keys
    that are not."""
    for field in fields(SpeculativeConfig):
        if "help" in field.metadata:
            is_empty = field.default in (MISSING, None)
            default = "" if is_empty else f"`{json.dumps(field.default)}`"
            yield f"| `{field.name}` | {default} | {field.metadata['help']} |"
    for name, advice in METHODS_NOT_SERVED.items():
        yield f"| `{name}` | {advice} |"
    for name, (advice, neutral) in NOT_SERVED.items():
        accepted = ", ".join(f"`{json.dumps(value)}`" for value in neutral)
        yield f"| `{name}` | {accepted} | {advice} |"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
