"""The project's Python files as the architecture tests see them: paths, text, syntax trees.

Reads files only; never imports what it looks at.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FROZEN = Path(__file__).parent / "frozen"


@dataclass(frozen=True)
class Source:
    """One file; `name` is its path from the root of the repository."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.name)

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def sources(*folders: str) -> list[Source]:
    """Every Python file below these folders of the repository, sorted by name."""
    found = [p for folder in folders for p in (ROOT / folder).rglob("*.py")]
    return [_source(p) for p in sorted(found) if "__pycache__" not in p.parts]


@cache
def _source(path: Path) -> Source:
    """One object per file, so that each is read and parsed once."""
    return Source(path)


def frozen_names(file: str) -> list[str]:
    """The lines of a frozen list; blank lines and `#` comments do not count."""
    lines = (FROZEN / file).read_text(encoding="utf-8").splitlines()
    return [line for line in map(str.strip, lines) if line and not line.startswith("#")]


def dotted(node: ast.expr) -> str:
    """`a.b.c` for a chain of names, an empty string for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""
