"""Writes docs/reference from the code: every flag, field and metric. Run by `make docs`.

Never edited by hand; a test compares the files with what this writes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from paceline.cli import build_parser, leaf_parsers
from paceline.observe.metrics import Metrics
from paceline.server.fields import NOT_BUILT, WITHOUT_EFFECT
from paceline.server.requests import ChatRequest, CompletionRequest, GenerateFields

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
FIELDS = """
Names and meanings are OpenAI's and vLLM's. Ours are `num_speculative_tokens`, the most drafts that
a step verifies for this request (0 is none), and `extra_args`, which custom logits processors read.
What is not given comes from the model's generation config. `max_tokens` past the model's length is
no error: the answer ends there, with finish reason `length`.
"""


def pages() -> dict[Path, str]:
    return {FOLDER / "cli.md": command_line(), FOLDER / "http.md": http()}


def http() -> str:
    common = GenerateFields.__struct_fields__
    own = {k: [n for n in k.__struct_fields__ if n not in common] for k in _BODIES}
    lines = ["# HTTP", "", "Written by `make docs`; do not edit.", ROUTES]
    lines += ["## Fields of a request", FIELDS]
    lines += ["| | |", "|---|---|", f"| both | {_listed(common)} |"]
    lines += [f"| {name} | {_listed(own[kind])} |" for kind, name in _BODIES.items()]
    lines += [f"| accepted, without effect | {_listed(sorted(WITHOUT_EFFECT))} |"]
    lines += [f"| not built: 400, unless they ask for nothing | {_listed(NOT_BUILT)} |", ""]
    lines += ["Any other name is answered 400 with the nearest one.", "", "## Metrics", ""]
    lines += ["| name | kind | |", "|---|---|---|"]
    for family in Metrics().collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        lines.append(f"| `{name}` | {family.type} | {family.documentation} |")
    return "\n".join(lines) + "\n"


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
    return "\n".join(lines).rstrip() + "\n"


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar)
    flag = action.option_strings[-1]
    if isinstance(action, argparse.BooleanOptionalAction):
        return action.option_strings[0].replace("--", "--[no-]", 1)
    return f"{flag} {action.metavar}" if action.metavar else flag


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("%%", "%")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
