"""Writes docs/reference/cli.md from the code: every command, every flag. Run by `make docs`.

Never edited by hand; a test compares the file with what this writes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli import build_parser, leaf_parsers

TARGET = Path(__file__).parent / "reference" / "cli.md"


def reference() -> str:
    lines = ["# Command line", "", "Written by `make docs`; do not edit.", ""]
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
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(reference(), encoding="utf-8")
    print(f"wrote {TARGET}")
