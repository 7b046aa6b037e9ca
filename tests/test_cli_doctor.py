"""`paceline doctor` and the Makefile's first step: what is missing gets its fixing command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from paceline import commands
from paceline.cli import main
from paceline.commands.doctor import CORE_PACKAGES, CPU_PACKAGES, SERVER_PACKAGES
from paceline.commands.machine import package_version
from paceline.commands.serve import EXTRA_MODULES
from tests.architecture.source_tree import ROOT


def doctor(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", "doctor", *flags]
    env = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120
    )


def texts(report: dict[str, Any], section: str) -> str:
    return "\n".join(finding["text"] for finding in report[section])


def test_doctor_reports_what_this_machine_has(tmp_path: Path) -> None:
    done = doctor("--json", PACELINE_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert "torch 2." in texts(report, "Software")
    assert "cores" in texts(report, "Machine")
    assert "GiB memory" in texts(report, "Machine")
    assert str(tmp_path / "cache") in texts(report, "Storage")
    assert "the first use fetches it" in texts(report, "Storage")
    assert "Paceline would use" in report


def test_doctor_works_without_torch_and_names_the_fix(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')", encoding="utf-8")
    done = doctor(PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1
    assert "!!  torch cannot be imported: ImportError: no torch here" in done.stdout
    assert "pip install torch" in done.stdout
    assert "nothing until torch can be imported" in done.stdout
    assert done.stderr == ""


def test_doctor_runs_on_the_standard_library_alone(tmp_path: Path) -> None:
    """A broken installation is when it is needed: nothing but the checkout, no packages at all."""
    command = [sys.executable, "-S", "-c", "from paceline.cli import main; main(['doctor'])"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "not installed: numpy" in done.stdout, done.stderr
    assert "pip install 'paceline[server]'" in done.stdout
    assert done.stderr == ""


@pytest.fixture
def torch_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = '{"version": "2.13", "cuda": null, "gpus": [], "packed": true, "capability": "AVX2"}'
    monkeypatch.setattr(commands.doctor, "probe_torch", lambda: json.loads(found))


def test_doctor_without_the_server_extra_says_what_serve_needs(
    torch_is_fine: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = {"starlette", "uvicorn"}

    def version(name: str) -> str | None:
        return None if name in missing else package_version(name)

    monkeypatch.setattr(commands.doctor, "package_version", version)
    assert main(["doctor"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "Ready: paceline serve" not in last
    assert "paceline serve needs starlette, uvicorn: pip install 'paceline[server]'" in last


def test_doctor_with_everything_is_ready_to_serve(
    torch_is_fine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Ready: paceline serve"


def test_doctor_begins_its_report_before_it_asks_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def ask() -> dict[str, Any]:
        said.append(capsys.readouterr().out)
        return {"error": "no torch here"}

    monkeypatch.setattr(commands.doctor, "probe_torch", ask)
    assert main(["doctor"]) == 1
    assert said[0].startswith("Software\n  ok  Python 3.")


def test_doctor_sees_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    done = doctor(PACELINE_CACHE=str(folder))
    assert done.returncode == 1
    assert "not writable" in done.stdout
    assert "PACELINE_CACHE" in done.stdout


def required(extra: str | None = None) -> set[str]:
    """Names that pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return {re.split(r"[^\w-]", line)[0] for line in lines}


def test_doctor_and_serve_know_every_required_package() -> None:
    assert {"torch", *CORE_PACKAGES} == required()
    assert set(CPU_PACKAGES) == required("cpu")
    assert {"paceline", *SERVER_PACKAGES} == required("server")  # itself, with the cpu extra
    assert {name.replace("-", "_") for name in SERVER_PACKAGES} == EXTRA_MODULES


def test_serve_without_its_extra_names_the_command(tmp_path: Path) -> None:
    (tmp_path / "starlette.py").write_text(
        "raise ModuleNotFoundError('gone', name='starlette')", encoding="utf-8"
    )
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "pip install 'paceline[server]'" in done.stderr.splitlines()[-1]


def fake_python(tmp_path: Path, fails_on: str) -> str:
    """An interpreter that is python3 but for one import."""
    path = tmp_path / "python3"
    lines = [
        "#!/bin/sh",
        f'case "$*" in *"{fails_on}"*) exit 1;; esac',
        f'exec {sys.executable} "$@"',
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("fails_on", "word"),
    [("import venv", "apt install python3-venv"), ("version_info", "Python 3.11 or newer")],
)
def test_make_says_what_to_install_first(fails_on: str, word: str, tmp_path: Path) -> None:
    python = fake_python(tmp_path, fails_on)
    command = ["make", "install", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert word in done.stdout
    assert not (tmp_path / "venv").exists()
