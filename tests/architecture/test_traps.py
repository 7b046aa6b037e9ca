"""tests/traps.md lists every known trap with its tests or why it cannot apply; both ways."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.architecture.source_tree import ROOT, Source, dotted, frozen_names, sources

ROW = re.compile(r"^\| (?P<id>[A-Z]-?\d+) \| (?P<trap>[^|]+) \| (?P<answer>[^|]+) \|$")
NODE = re.compile(r"`(tests/[^`]+)`")
REASON = re.compile(r"^(later|refused|covered): \S.{10,}")


@dataclass(frozen=True)
class Row:
    id: str
    answer: str

    @property
    def tests(self) -> list[str]:
        return NODE.findall(self.answer)


def table() -> list[Row]:
    lines = (ROOT / "tests/traps.md").read_text(encoding="utf-8").splitlines()
    matches = [ROW.match(line) for line in lines]
    return [Row(m["id"], m["answer"].strip()) for m in matches if m]


def trap_ids(marks: Sequence[ast.expr]) -> Iterator[str]:
    """The ids of `pytest.mark.trap(...)` among decorators or the values of `pytestmark`."""
    for mark in marks:
        if isinstance(mark, ast.Call) and dotted(mark.func) == "pytest.mark.trap":
            for argument in mark.args:
                assert isinstance(argument, ast.Constant), "trap ids are literal strings"
                yield str(argument.value)


def marked_in(source: Source) -> Iterator[tuple[str, str]]:
    """(id, node) for every marker of a file; a module-wide mark belongs to the file."""
    for statement in source.tree.body:
        if isinstance(statement, ast.Assign) and dotted(statement.targets[0]) == "pytestmark":
            value = statement.value
            marks = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
            yield from ((i, source.name) for i in trap_ids(marks))
        yield from marked_on(statement, source.name)


def marked_on(node: ast.stmt, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        name = f"{prefix}::{node.name}"
        yield from ((i, name) for i in trap_ids(node.decorator_list))
        if isinstance(node, ast.ClassDef):
            for child in node.body:
                yield from marked_on(child, name)


def marked_tests() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for source in sources("tests"):
        for trap, node in marked_in(source):
            found[trap].add(node)
    return found


def test_the_table_holds_every_known_trap_once_and_in_order() -> None:
    assert [row.id for row in table()] == frozen_names("trap_ids.txt")


def test_every_row_names_tests_or_a_reason() -> None:
    vague = [r.id for r in table() if not r.tests and not REASON.match(r.answer)]
    assert not vague, f"neither a test nor a reason: {', '.join(vague)}"


def test_a_covered_trap_points_to_rows_with_tests() -> None:
    tested = {row.id for row in table() if row.tests}
    for row in table():
        if row.answer.startswith("covered:"):
            named = set(re.findall(r"\b[A-Z]-?\d+\b", row.answer))
            assert named & tested == named != set(), f"{row.id}: {row.answer}"


def test_markers_and_table_agree() -> None:
    listed = {row.id: set(row.tests) for row in table()}
    marked = marked_tests()
    unknown = set(marked) - set(listed)
    assert not unknown, f"markers with unknown ids: {sorted(unknown)}"
    differ = {i: sorted(listed[i] ^ marked[i]) for i in listed if listed[i] != marked[i]}
    assert not differ, f"listed but not marked, or marked but not listed: {differ}"
