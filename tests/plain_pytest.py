"""A stand-in for pytest where it is not installed: enough of its names to import a test file, and
a runner for functions with fixtures and parameters. Never used where the real one is.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import math
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any


class Skipped(Exception):
    """Raised by `skip`: the test does not apply here."""


@dataclass(frozen=True)
class Mark:
    """`pytest.mark.NAME`, with or without arguments; as a decorator it notes itself."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and inspect.isfunction(args[0]):
            args[0].__dict__.setdefault("plain_marks", []).append(self)
            return args[0]
        return Mark(self.name, args, kwargs)


class Marks:
    def __getattr__(self, name: str) -> Mark:
        return Mark(name)


@dataclass(frozen=True)
class Case:
    """`pytest.param(...)`."""

    values: tuple[Any, ...]
    marks: Sequence[Mark] = ()


@dataclass
class Outcome:
    name: str
    state: str  # passed, failed or skipped
    seconds: float
    text: str = ""


class Approx:
    def __init__(self, expected: Any, rel: float = 1e-6, abs: float = 1e-12) -> None:
        self._expected, self._rel, self._abs = expected, rel, abs

    def __eq__(self, other: object) -> bool:
        if isinstance(self._expected, list | tuple):
            pairs = zip(self._expected, other, strict=True)  # type: ignore[call-overload]
            return all(Approx(e, self._rel, self._abs) == o for e, o in pairs)
        return math.isclose(self._expected, other, rel_tol=self._rel, abs_tol=self._abs)  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]


def skip(reason: str = "", **_: Any) -> None:
    raise Skipped(reason)


def importorskip(name: str, **_: Any) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skipped(str(error)) from None


@contextmanager
def raises(kind: type[BaseException], match: str | None = None) -> Iterator[None]:
    try:
        yield
    except kind as error:
        if match is not None and not re.search(match, str(error)):
            raise AssertionError(f"{error} does not match {match}") from error
        return
    raise AssertionError(f"did not raise {kind.__name__}")


def fixture(function: Any = None, *, scope: str = "function", **_: Any) -> Any:
    def note(inner: Any) -> Any:
        inner.plain_scope = scope
        return inner

    return note if function is None else note(function)


class MonkeyPatch:
    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def setattr(self, target: Any, name: str, value: Any) -> None:
        before = getattr(target, name)
        self._undo.append(lambda: setattr(target, name, before))
        setattr(target, name, value)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def install() -> None:
    """From here on `import pytest` gives this module."""
    module = ModuleType("pytest")
    module.__dict__.update(
        mark=Marks(),
        fixture=fixture,
        skip=skip,
        importorskip=importorskip,
        raises=raises,
        approx=Approx,
        param=lambda *values, marks=(), **_: Case(values, [marks] if _is_mark(marks) else marks),
        MonkeyPatch=MonkeyPatch,
        TempPathFactory=TempFolders,
    )
    sys.modules["pytest"] = module


def _is_mark(value: object) -> bool:
    return isinstance(value, Mark)


class TempFolders:
    """tmp_path_factory."""

    def __init__(self) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="paceline-tests-"))
        self._numbers = itertools.count()

    def mktemp(self, name: str) -> Path:
        folder = self._root / f"{name}{next(self._numbers)}"
        folder.mkdir()
        return folder

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


@dataclass
class Shared:
    """Values of fixtures that outlive a test, by the function that makes them."""

    folders: TempFolders = field(default_factory=TempFolders)
    values: dict[Any, Any] = field(default_factory=dict)
    to_close: list[Iterator[Any]] = field(default_factory=list)

    def close(self) -> None:
        _close(self.to_close)
        self.folders.close()


class Fixtures:
    """Values by name: a test's own module first, then conftest.py upwards, then the built-in."""

    def __init__(self, module: ModuleType, shared: Shared) -> None:
        self._modules = [module, *_conftests(module)]
        self._shared = shared
        self._own: dict[Any, Any] = {}
        self._to_close: list[Iterator[Any]] = []
        self._patches = MonkeyPatch()

    def get(self, name: str) -> Any:
        if name == "tmp_path_factory":
            return self._shared.folders
        if name == "monkeypatch":
            return self._patches
        if name == "tmp_path":
            return self._own.setdefault(name, self._shared.folders.mktemp("test"))
        function = next((f for m in self._modules if (f := getattr(m, name, None))), None)
        if function is None or not hasattr(function, "plain_scope"):
            raise LookupError(f"no fixture {name!r}")
        lives_on = function.plain_scope != "function"
        values = self._shared.values if lives_on else self._own
        if function not in values:
            value = self.call(function, {})
            if inspect.isgenerator(value):
                (self._shared.to_close if lives_on else self._to_close).append(value)
                value = next(value)
            values[function] = value
        return values[function]

    def call(self, function: Any, given: dict[str, Any]) -> Any:
        names = inspect.signature(function).parameters
        return function(**{n: given[n] if n in given else self.get(n) for n in names})

    def close(self) -> None:
        self._patches.undo()
        _close(self._to_close)


def _close(generators: Sequence[Iterator[Any]]) -> None:
    for generator in reversed(generators):
        next(generator, None)


def _conftests(module: ModuleType) -> list[ModuleType]:
    """Those of the folders above, nearest first; the root's holds pytest's own hooks only."""
    packages = module.__name__.split(".")[:-1]
    found = []
    for count in range(len(packages), 1, -1):
        name = ".".join([*packages[:count], "conftest"])
        if importlib.util.find_spec(name) is not None:
            found.append(importlib.import_module(name))
    return found


def run_module(
    name: str, mark: str, shared: Shared, words: str = "", *, can_run: bool = True
) -> Iterator[Outcome]:
    """Every test of a module that carries `mark` and whose name holds `words`."""
    module = importlib.import_module(name)
    whole = getattr(module, "pytestmark", [])
    module_marks = whole if isinstance(whole, list) else [whole]
    for test, function in vars(module).items():
        if not test.startswith("test_") or not inspect.isfunction(function):
            continue
        marks = [*module_marks, *getattr(function, "plain_marks", [])]
        if any(m.name == mark for m in marks):
            for values in _expanded([m for m in marks if m.name == "parametrize"]):
                label = f"{name}::{test}[{'-'.join(map(str, values.values()))}]"
                if words in label and not can_run:
                    yield Outcome(label, "skipped", 0.0)
                elif words in label:
                    yield _run(label, function, values, Fixtures(module, shared))


def _expanded(marks: Sequence[Mark]) -> Iterator[dict[str, Any]]:
    """Every combination of the values of some `parametrize` marks."""
    choices: list[list[dict[str, Any]]] = []
    for mark in marks:
        names = mark.args[0]
        if isinstance(names, str):
            names = [n.strip() for n in names.split(",")]
        rows = []
        for value in mark.args[1]:
            values = value.values if isinstance(value, Case) else value
            is_single = len(names) == 1 and not isinstance(value, Case)
            rows.append(dict(zip(names, [values] if is_single else values, strict=True)))
        choices.append(rows)
    for combination in itertools.product(*choices):
        yield {name: value for row in combination for name, value in row.items()}


def _run(label: str, function: Any, values: dict[str, Any], fixtures: Fixtures) -> Outcome:
    start_s = time.perf_counter()
    try:
        fixtures.call(function, values)
        state, text = "passed", ""
    except Skipped as error:
        state, text = "skipped", str(error)
    except Exception:
        state, text = "failed", traceback.format_exc()
    finally:
        fixtures.close()
    return Outcome(label, state, time.perf_counter() - start_s, text)
