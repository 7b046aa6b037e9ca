"""The command line: parses flags, runs a command, turns errors into one line and an exit code.

`paceline/commands` implements the commands.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from paceline import __version__
from paceline.commands.arguments import read_config_file
from paceline.commands.catalog import COMMANDS, Command
from paceline.config import refuse_by_name
from paceline.errors import ConfigError, PacelineError, nearest
from paceline.observe.stream import fill_closed_streams, make_lossy

SUMMARY = "An LLM inference engine: no bubbles between steps, speculation that changes nothing."
INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


class Parser(ArgumentParser):
    """argparse without abbreviations. Its errors are ConfigErrors, and its help is short."""

    def __init__(self, **keywords: Any) -> None:
        keywords.setdefault("formatter_class", ShortHelp)
        super().__init__(allow_abbrev=False, add_help=False, **keywords)
        self._positionals.title = "arguments"
        self.add_argument("-h", "--help", action="help", help="this text")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class ShortHelp(argparse.HelpFormatter):
    """One line per flag: `--[no-]enforce-eager`, and a wide first column."""

    def __init__(self, prog: str, **keywords: Any) -> None:
        columns = min(shutil.get_terminal_size((110, 24)).columns, 110)
        super().__init__(prog, max_help_position=38, width=columns - 2, **keywords)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0].replace("--", "--[no-]", 1)
        return super()._format_action_invocation(action)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Without `argv` its streams are replaced."""
    if argv is None:
        fill_closed_streams()
        make_lossy("stderr")
        argv = sys.argv[1:]
    try:
        try:
            return _run(list(argv))
        finally:
            sys.stdout.flush()  # also after --help, which raises SystemExit
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has exited: print nothing, and make the flush at exit harmless.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except PacelineError as error:
        _complain(str(error))
        return error.exit_code
    except OSError as error:
        _complain(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return 1


def build_parser() -> Parser:
    parser = Parser(prog="paceline", usage="paceline COMMAND [options]", description=SUMMARY)
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    _add_commands(parser, "command", COMMANDS.items())
    return parser


def _add_commands(parser: Parser, dest: str, commands: Iterable[tuple[str, Command]]) -> None:
    title = f"{dest}s"
    verbs = parser.add_subparsers(dest=dest, metavar=dest.upper(), title=title, required=True)
    for name, command in commands:
        prog = f"{parser.prog} {name}"
        child = verbs.add_parser(
            name,
            prog=prog,
            usage=f"{prog} {command.usage}",
            help=command.summary,
            description=command.summary,
        )
        command.add_arguments(child)
        child.set_defaults(start_message=command.start_message)
        if command.subcommands:
            _add_commands(child, "kind", command.subcommands)


def _run(argv: list[str]) -> int:
    parser = build_parser()
    leaf, rest = _find_leaf(parser, argv)
    if not rest and _children(leaf):
        leaf.print_help()
        return 0
    _check_flags(leaf, rest)
    path = _config_path(rest)
    if path is not None:
        leaf.set_defaults(**read_config_file(path, leaf))
    args: Namespace = parser.parse_args(argv)
    if args.start_message is not None:
        print(f"Paceline {__version__}: {args.start_message(args)}", file=sys.stderr)
    return _command(args.command)(args)


def _command(name: str) -> Callable[[Namespace], int]:
    """The function of a command. Other commands are not imported."""
    module = importlib.import_module(f"paceline.commands.{name}")
    run: Callable[[Namespace], int] = module.run
    return run


def _find_leaf(parser: ArgumentParser, argv: list[str]) -> tuple[ArgumentParser, list[str]]:
    """The parser of the command that argv names, and the arguments that belong to it."""
    rest = argv
    while (children := _children(parser)) and rest and not rest[0].startswith("-"):
        if rest[0] not in children:
            hint = nearest(rest[0], children)
            known = ", ".join(children)
            raise ConfigError(f"There is no `{parser.prog} {rest[0]}`; use one of {known}.{hint}")
        parser, rest = children[rest[0]], rest[1:]
    return parser, rest


def _check_flags(parser: ArgumentParser, rest: list[str]) -> None:
    """Refuse unknown flags here: argparse may take their values for positional arguments."""
    known = {option for action in parser._actions for option in action.option_strings}
    for token in rest:
        if token == "--":
            return
        name = token.split("=", 1)[0]
        if not name.startswith("--") or name in known or " " in name:
            continue
        refuse_by_name(name.lstrip("-").replace("-", "_"))
        if name == "--model" and "model" in {a.dest for a in parser._actions}:
            raise ConfigError(f"Give the model as an argument: {parser.prog} MODEL")
        hint = nearest(name.replace("_", "-"), known)
        raise ConfigError(
            f"{parser.prog} has no flag {name}.{hint} `{parser.prog} --help` lists them."
        )


def _config_path(rest: list[str]) -> str | None:
    """The file of --config. It is read before parsing: its values are the parser's defaults."""
    for token, following in pairwise([*rest, ""]):
        if token == "--config":
            return following or None
        if token.startswith("--config="):
            return token.partition("=")[2]
    return None


def _children(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def leaf_parsers(parser: ArgumentParser) -> Iterator[ArgumentParser]:
    children = _children(parser)
    if not children:
        yield parser
    for child in children.values():
        yield from leaf_parsers(child)


def _complain(message: str) -> None:
    print(f"paceline: {message}", file=sys.stderr)
