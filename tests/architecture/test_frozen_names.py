"""Names that users depend on are frozen lists: a change is a line that a reviewer signs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

import paceline
from paceline.cli import build_parser, leaf_parsers
from tests.architecture.source_tree import dotted, frozen_names, sources

METRIC = re.compile(r"^paceline:[a-z0-9_]+$")
ENVIRONMENT_READS = {"os.environ.get", "os.getenv"}


def assert_frozen(file: str, names: Iterable[str]) -> None:
    now, frozen = set(names), set(frozen_names(file))
    added, gone = sorted(now - frozen), sorted(frozen - now)
    assert not added, f"new, add to frozen/{file} and to the changelog: {added}"
    assert not gone, f"gone, a break for users; remove from frozen/{file}: {gone}"


def string_constants() -> Iterable[str]:
    for source in sources("paceline"):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def environment_reads() -> Iterable[str]:
    """Literal names read through os.environ.get(...), os.getenv(...) and os.environ[...]."""
    for source in sources("paceline"):
        for node in ast.walk(source.tree):
            key: ast.expr | None = None
            if isinstance(node, ast.Call) and dotted(node.func) in ENVIRONMENT_READS:
                key = node.args[0]
            elif isinstance(node, ast.Subscript) and dotted(node.value) == "os.environ":
                key = node.slice
            if key is not None:
                assert isinstance(key, ast.Constant), f"{source.name}:{key.lineno} hides its name"
                yield str(key.value)


def test_cli_flags_are_frozen() -> None:
    names = (
        f"{parser.prog.removeprefix('paceline ')} {option}"
        for parser in leaf_parsers(build_parser())
        for action in parser._actions
        for option in action.option_strings
        if option not in ("-h", "--help")
    )
    assert_frozen("cli_flags.txt", names)


def test_public_names_are_frozen() -> None:
    assert_frozen("public_names.txt", paceline.__all__)


def test_environment_variables_are_frozen() -> None:
    assert_frozen("env_variables.txt", environment_reads())


def test_metrics_names_are_frozen() -> None:
    assert_frozen("metrics.txt", (s for s in string_constants() if METRIC.match(s)))
