"""`paceline doctor`: what this machine has, what Paceline would use, what is missing and its fix.

Needs only the standard library, so that it works in a broken installation.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.commands.machine import cpu_info, package_version
from paceline.config import cache_dir
from paceline.observe.memory import host_memory

State = Literal["ok", "note", "missing"]
_MARKS: dict[State, str] = {"ok": "ok", "note": "--", "missing": "!!"}
_CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16")
_GIB = 1 << 30
CORE_PACKAGES = ("numpy", "safetensors", "tokenizers", "jinja2", "huggingface-hub", "gguf")
CPU_PACKAGES = ("numba",)
SERVER_PACKAGES = ("starlette", "uvicorn", "uvloop", "httptools", "msgspec", "prometheus-client")
_SERVER_FIX = "pip install 'paceline[server]'"
# Runs in a separate process, because importing a broken torch may crash.
_PROBE = """
import json, torch
gpus = []
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        compute = f"{p.major}.{p.minor}"
        gpus.append({"name": p.name, "memory": p.total_memory, "capability": compute})
packed = "fbgemm" in torch.backends.quantized.supported_engines
if packed:
    try:
        torch.backends.quantized.engine = "fbgemm"
        weight = torch.ops.quantized.linear_prepack_fp16(torch.ones(8, 8), None)
        product = torch.ops.quantized.linear_dynamic_fp16(torch.ones(3, 8), weight)
        packed = bool((product == 8).all())
    except (RuntimeError, AttributeError):
        packed = False
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus, "packed": packed,
    "capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads(),
}))
"""


@dataclass
class Finding:
    """One line of the report. `fix` is a command that repairs it."""

    state: State
    text: str
    fix: str | None = None


@dataclass
class Report:
    """Findings by section. With `is_shown` each is printed at once, because some take seconds."""

    is_shown: bool
    sections: dict[str, list[Finding]] = field(default_factory=dict)

    def add(self, section: str, state: State, text: str, fix: str | None = None) -> None:
        if self.is_shown:
            if section not in self.sections:
                print(section)
            print(f"  {_MARKS[state]}  {text}" + (f"\n        {fix}" if fix else ""), flush=True)
        self.sections.setdefault(section, []).append(Finding(state, text, fix))

    @property
    def findings(self) -> list[Finding]:
        return [finding for found in self.sections.values() for finding in found]

    @property
    def is_complete(self) -> bool:
        """Whether everything that Paceline needs is there."""
        return all(finding.state != "missing" for finding in self.findings)


def run(args: Namespace) -> int:
    report = Report(is_shown=not args.json)
    examine(report)
    if args.json:
        print(json.dumps({"ok": report.is_complete, **asdict(report)["sections"]}, indent=2))
    else:
        print(f"\n{verdict(report)}")
    return 0 if report.is_complete else 1


def examine(report: Report) -> None:
    _python(report)
    torch = probe_torch()
    _torch(report, torch)
    _packages(report)
    _hardware(report, torch)
    _storage(report)
    _choices(report, torch)


def verdict(report: Report) -> str:
    missing = [f for f in report.findings if f.state == "missing"]
    if missing:
        return f"{len(missing)} missing; run the indented commands."
    if gone := _missing(SERVER_PACKAGES):
        needs = f"paceline serve needs {', '.join(gone)}: {_SERVER_FIX}"
        return f"Ready: paceline generate, chat and bench. {needs}"
    return "Ready: paceline serve"


def probe_torch() -> dict[str, Any]:
    """Version, GPUs and features of torch; {"error": ...} if it cannot be imported."""
    command = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"error": lines[-1]}
    return found


def _python(report: Report) -> None:
    report.add("Software", "ok", f"Python {platform.python_version()} ({sys.executable})")
    own = package_version("paceline")
    report.add("Software", "ok" if own else "note", f"paceline {own or '(not installed)'}")


def _torch(report: Report, torch: dict[str, Any]) -> None:
    if "error" in torch:
        text = f"torch cannot be imported: {torch['error']}"
        cpu = "https://download.pytorch.org/whl/cpu"
        fix = f"pip install torch==2.13.0   (CPU only: add --index-url {cpu})"
        report.add("Software", "missing", text, fix)
        return
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU build"
    report.add("Software", "ok", f"torch {torch['version']} ({build})")


def _packages(report: Report) -> None:
    core = {name: package_version(name) for name in CORE_PACKAGES}
    if gone := _missing(CORE_PACKAGES):
        report.add(
            "Software", "missing", f"not installed: {', '.join(gone)}", "pip install paceline"
        )
    if have := [f"{name} {found}" for name, found in core.items() if found]:
        report.add("Software", "ok", ", ".join(have))
    if numba := package_version("numba"):
        report.add("Software", "ok", f"numba {numba}: vector kernels on the CPU")
    else:
        text = "no numba: CPU kernels run in plain torch, much slower"
        report.add("Software", "note", text, "pip install 'paceline[cpu]'")
    if missing := _missing(SERVER_PACKAGES):
        text = f"no server: {', '.join(missing)} not installed"
        report.add("Software", "note", text, _SERVER_FIX)
    else:
        found = ", ".join(f"{name} {package_version(name)}" for name in SERVER_PACKAGES)
        report.add("Software", "ok", f"server: {found}")


def _hardware(report: Report, torch: dict[str, Any]) -> None:
    name, flags = cpu_info()
    cores = len(os.sched_getaffinity(0))
    have = [flag for flag in _CPU_FLAGS if flag in flags]
    report.add("Machine", "ok", f"{name}, {cores} cores ({', '.join(have) or 'no vector flags'})")
    memory = host_memory()
    text = f"{memory.total / _GIB:.1f} GiB memory, {memory.available / _GIB:.1f} GiB available"
    report.add("Machine", "ok", text)
    for gpu in torch.get("gpus", ()):
        size = f"{gpu['memory'] / _GIB:.0f} GiB"
        report.add("Machine", "ok", f"{gpu['name']}, {size}, compute {gpu['capability']}")
    if not torch.get("gpus"):
        has_driver = Path("/proc/driver/nvidia/version").exists()
        text = "an NVIDIA driver, but torch sees no GPU" if has_driver else "no NVIDIA GPU"
        fix = "pip install --force-reinstall torch==2.13.0" if has_driver else None
        report.add("Machine", "note", text, fix)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    fix = "ulimit -n 65536" if files < 4096 else None
    report.add("Machine", "note" if fix else "ok", f"{files} open files allowed", fix)


def _storage(report: Report) -> None:
    # Imported here: this module must load without the packages that checkpoint/ needs.
    from paceline.checkpoint.default_model import NAME, SIZE, default_model_path

    folder = cache_dir()
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(nearest).free
    writable = os.access(nearest, os.W_OK)
    text = f"cache {folder} ({free / _GIB:.1f} GiB free)"
    if writable:
        report.add("Storage", "ok", text)
    else:
        fix = "export PACELINE_CACHE=/a/folder/you/may/write"
        report.add("Storage", "missing", f"{text}: not writable", fix)
    path = default_model_path()
    if path.exists() and path.stat().st_size == SIZE:
        report.add("Storage", "ok", f"default model {NAME}")
    else:
        text = f"default model {NAME} is not here yet; the first use fetches it ({SIZE >> 20} MiB)"
        report.add("Storage", "note", text)


def _choices(report: Report, torch: dict[str, Any]) -> None:
    section = "Paceline would use"
    if "error" in torch:
        report.add(section, "note", "nothing until torch can be imported")
        return
    if count := len(torch["gpus"]):
        report.add(section, "ok", "cuda: the first GPU; --device cpu leaves it alone")
        if count > 1:
            text = f"up to {count} ranks: --tensor-parallel-size x --data-parallel-size"
            report.add(section, "note", text)
    report.add(section, "ok", f"cpu: torch's {torch['capability']} kernels")
    state: State = "ok"
    if package_version("numba"):
        form = "as in the checkpoint, with vector kernels"
    elif torch["packed"]:
        form = "packed fp16 through FBGEMM"
    else:
        state, form = "note", "fp32, because FBGEMM's fp16 product is missing"
    report.add(section, state, f"half-precision and quantised weights: {form}")


def _missing(names: Iterable[str]) -> list[str]:
    return [name for name in names if package_version(name) is None]
