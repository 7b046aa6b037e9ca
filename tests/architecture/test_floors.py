"""Imports go downward only, and the host floors start without torch. Runs what CI runs."""

from __future__ import annotations

import subprocess
import sys

from tests.architecture.source_tree import ROOT, sources

HOST_FLOORS = {"cli", "commands", "server", "llm", "engine", "scheduler", "text", "checkpoint"}
HOST_FLOORS |= {"observe", "config", "request", "step", "errors"}
# engine.launch resolves it by name in the engine process; it is the only door to torch.
TORCH_DOOR = "paceline.engine.worker"

IMPORT_EACH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules or "triton" in sys.modules:
        sys.exit(f"importing {name} imported torch")
"""


def host_modules() -> list[str]:
    modules = [s.module for s in sources("paceline")]
    floor_of = {m: m.split(".")[1] for m in modules if "." in m}
    return [m for m in modules if floor_of.get(m) in HOST_FLOORS and m != TORCH_DOOR]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_import_contracts_are_kept() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    result = run_python("-c", code)
    assert result.returncode == 0, result.stdout + result.stderr


def test_host_modules_import_no_torch() -> None:
    modules = host_modules()
    assert "paceline.scheduler" in modules
    assert "paceline.config" in modules
    result = run_python("-c", IMPORT_EACH, *modules)
    assert result.returncode == 0, result.stderr[-2000:]


def test_the_public_package_imports_no_torch() -> None:
    code = "import sys, paceline; sys.exit(int('torch' in sys.modules))"
    assert run_python("-c", code).returncode == 0
