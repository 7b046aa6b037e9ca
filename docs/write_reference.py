"""Writes docs/reference from the code: every flag, field and metric. Run by `make docs`.

Never edited by hand; a test compares the files with what this writes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from paceline.cli import build_parser, leaf_parsers
from paceline.observe.metrics import Metrics
from paceline.server.completions import MAX_PROMPTS
from paceline.server.fields import ECHOED, NOT_BUILT, WITHOUT_EFFECT
from paceline.server.limits import LIMITS, MAX_CONTAINERS, MAX_MEMBERS, MAX_VALUES
from paceline.server.params import MAX_TABLE_ENTRIES
from paceline.server.requests import ChatRequest, CompletionRequest, GenerateFields
from paceline.server.tokens import MAX_TOKENIZE_CHARS

FOLDER = Path(__file__).parent / "reference"
ROUTES = """
| route | |
|---|---|
| `POST /v1/chat/completions` | messages in, an answer out; `"stream": true` for SSE |
| `POST /v1/completions` | text or token ids in, text out; likewise |
| `GET /v1/models`, `GET /v1/models/NAME` | what is served, and its `max_model_len` |
| `POST /tokenize`, `POST /detokenize` | text or messages to token ids, and back |
| `GET /health` | 200 while the process and its engine live, also while the model loads |
| `GET /readyz` | 200 when requests are served, else 503 |
| `GET /metrics` | for Prometheus |
| `GET /version` | |

With `--api-key` (or `PACELINE_API_KEY`) all but the last four ask for `Authorization: Bearer KEY`.
"""
DOORS = """
A body must say that it is JSON (`Content-Type: application/json`); any other type, or none, is
answered 415.

On a loopback address (the default) the server keeps out web pages of other sites, and names that
were made to point to this machine. It answers 403 unless the `Host` header names `localhost`,
`*.localhost`, a loopback address or one of `--allowed-hosts`, and the `Origin`, if there is one, is
the server's own, one of this machine or one of `--allowed-origins`. On other addresses both are
checked when `--allowed-hosts` is given; the address that a client connected to is then allowed
too. HTTP/1.1 without exactly one `Host` is 400 everywhere.

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
a step verifies for this request (0 is none), and `extra_args`, which custom logits processors read.
What is not given comes from the model's generation config. `max_tokens` past the model's length is
no error: the answer ends there, with finish reason `length`.
"""
ECHO = """
Inside messages and content parts a field that is null is taken whatever its name, and so are
fields of earlier replies and of other servers' caches: {}.
"""
LIMITS_TEXT = """
A request over one of these is answered 400 with the field and the limit. A body may have
`--max-request-bytes` (413 otherwise), and in it at most {values} values, {members} members
of objects and {containers} objects and arrays. `prompt` may hold {prompts} prompts; one
prompt may be as long as the model's context. `allowed_token_ids`, `logit_bias` and the JSON bytes
of `extra_args` may come to {table} over all sequences of a request.
`/tokenize` takes {tokenize} characters.
"""

ENDS = """
## Exit codes, signals and logs

A command ends with 0 when all went well, with 2 for a wrong flag or file, and with 1 for any other
error, which is one line on standard error. Ctrl-C ends it with 130.

SIGTERM, SIGHUP or Ctrl-C lets a server finish its open requests (`--drain-timeout-s`); it ends with
0. A second signal ends it at once, with 130. A signal while the model is loading ends it with
"stopped while loading" and 128 plus the signal's number.

The log is written to standard error and never makes the server wait. Lines that cannot be written
(the reader is stuck, the disk is full) are dropped. Their number is logged when the log can be
written again, and `paceline:log_lines_dropped_total` counts those of the server process.
"""


def pages() -> dict[Path, str]:
    return {FOLDER / "cli.md": command_line(), FOLDER / "http.md": http()}


def http() -> str:
    common = GenerateFields.__struct_fields__
    own = {k: [n for n in k.__struct_fields__ if n not in common] for k in _BODIES}
    lines = ["# HTTP", "", "Written by `make docs`; do not edit.", ROUTES]
    lines += ["## Who may call, and how much", DOORS, "## Fields of a request", FIELDS]
    lines += ["| | |", "|---|---|", f"| both | {_listed(common)} |"]
    lines += [f"| {name} | {_listed(own[kind])} |" for kind, name in _BODIES.items()]
    lines += [f"| accepted, without effect | {_listed(sorted(WITHOUT_EFFECT))} |"]
    lines += [f"| not built: 400, unless they ask for nothing | {_listed(NOT_BUILT)} |", ""]
    lines += ["Any other name is answered 400 with the nearest one."]
    lines += [ECHO.format(_listed(sorted(ECHOED))), "## Limits", _limits_text()]
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


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
