"""House rules that a linter cannot say: docstrings, names, who may print, kernel pairs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.source_tree import ROOT, Source, dotted, sources

FORBIDDEN_WORDS = {"util", "utils", "manager", "managers", "helper", "helpers"}
ENVIRONMENT = {"os.environ", "os.getenv", "os.putenv", "os.environb"}
MAY_PRINT = re.compile(r"^(paceline/(cli|commands/.+)\.py|bench/.+)$")

PACKAGE = sources("paceline")
EVERY_FILE = sources("paceline", "tests", "bench")
WITH_CODE = [s for s in EVERY_FILE if s.path.name != "__init__.py"]


def words(name: str) -> set[str]:
    """`KVCacheManager` and `kv_cache_manager` are the same words."""
    parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return set(parts.lower().split("_"))


def defined_names(source: Source) -> Iterator[str]:
    yield source.path.stem
    yield from source.path.parent.relative_to(ROOT).parts
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


@pytest.mark.parametrize("source", WITH_CODE, ids=lambda s: s.name)
def test_module_opens_with_a_docstring(source: Source) -> None:
    doc = ast.get_docstring(source.tree)
    assert doc, f"{source.name}: say what it owns and what it never does"
    assert len(doc) >= 30, f"{source.name}: {doc!r} says too little"


@pytest.mark.parametrize("source", WITH_CODE, ids=lambda s: s.name)
def test_annotations_are_postponed(source: Source) -> None:
    assert "from __future__ import annotations" in source.text.splitlines()


@pytest.mark.parametrize("source", EVERY_FILE, ids=lambda s: s.name)
def test_names_say_what_a_thing_does(source: Source) -> None:
    vague = {name for name in defined_names(source) if words(name) & FORBIDDEN_WORDS}
    assert not vague, f"{source.name}: name what it does instead of {sorted(vague)}"


def test_package_markers_are_empty() -> None:
    markers = [s for s in EVERY_FILE if s.path.name == "__init__.py"]
    filled = [s.name for s in markers if s.text.strip()]
    assert filled == ["paceline/__init__.py"]


def test_every_test_folder_is_a_package() -> None:
    folders = {s.path.parent for s in sources("tests") if s.path.name != "__init__.py"}
    bare = sorted(str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists())
    assert not bare, f"without __init__.py equal file names collide: {bare}"


@pytest.mark.parametrize("source", PACKAGE, ids=lambda s: s.name)
def test_only_the_command_line_prints(source: Source) -> None:
    if MAY_PRINT.match(source.name):
        return
    calls = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call)]
    lines = [c.lineno for c in calls if dotted(c.func) in {"print", "pprint.pprint"}]
    assert not lines, f"{source.name} prints on lines {lines}; use logging"


@pytest.mark.parametrize("source", PACKAGE, ids=lambda s: s.name)
def test_only_the_configuration_reads_the_environment(source: Source) -> None:
    if source.name == "paceline/config.py":
        return
    nodes = [n for n in ast.walk(source.tree) if isinstance(n, ast.Attribute)]
    lines = [n.lineno for n in nodes if dotted(n) in ENVIRONMENT]
    assert not lines, f"{source.name} reads the environment on lines {lines}"


def test_every_fast_kernel_has_its_reference() -> None:
    kernels = {s.name for s in sources("paceline/kernels")}
    fast = re.compile(r"(paceline/kernels/\w+)/(triton|hopper|numba|numpy)(/\w+)?\.py")
    folders = {m[1] for k in kernels if (m := fast.fullmatch(k))} - {"paceline/kernels/gpu"}
    alone = sorted(f for f in folders if f"{f}/reference.py" not in kernels)
    assert not alone, f"without a torch reference: {alone}"


def test_triton_lives_in_kernel_files_only() -> None:
    for source in PACKAGE:
        imports = [n for n in ast.walk(source.tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        names = [a.name for n in imports if isinstance(n, ast.Import) for a in n.names]
        names += [n.module or "" for n in imports if isinstance(n, ast.ImportFrom)]
        if any(name.split(".")[0] == "triton" for name in names):
            pattern = r"paceline/kernels/(\w+/(triton|hopper)(/\w+)?|gpu/device)\.py$"
            assert re.match(pattern, source.name), source.name


# One reads weights with torch's restricted unpickler, one names the errors of numba's cache.
READS_PICKLED_FILES = {"paceline/models/weights.py", "paceline/kernels/vector/jit.py"}
PICKLING = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "multiprocessing"}
OBJECT_COLLECTIVE = re.compile(r"\w+_object(_list)?$")  # torch.distributed's, which unpickle


def test_nothing_is_unpickled_from_a_socket() -> None:
    for source in PACKAGE:
        nodes = list(ast.walk(source.tree))
        names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
        names += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
        found = PICKLING & {name.split(".")[0] for name in names}
        assert not found or source.name in READS_PICKLED_FILES, f"{source.name}: {found}"
        calls = [dotted(n.func) for n in nodes if isinstance(n, ast.Call)]
        collectives = [c for c in calls if c.startswith("dist.") and OBJECT_COLLECTIVE.search(c)]
        assert not collectives, f"{source.name}: {collectives}"
        loads = [n for n in nodes if isinstance(n, ast.Call) and dotted(n.func) == "torch.load"]
        for call in loads:
            assert any(k.arg == "weights_only" for k in call.keywords), source.name
