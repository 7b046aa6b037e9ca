"""The way to the GPU tests: what is collected where little is installed, what is written down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import run_gpu
from tests.architecture.source_tree import ROOT
from tests.run_gpu import Outcomes, gpu_files, sources_hash, warn_if_stale

# What a machine with a GPU need not have.
EXTRAS = (
    *("numba", "starlette", "uvicorn", "uvloop", "httptools", "msgspec", "prometheus_client"),
    *("gguf", "huggingface_hub", "openai", "scipy", "importlinter"),
)
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))\n"  # None: as if not there


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


SAMPLE = """
from __future__ import annotations
import pytest
pytestmark = [pytest.mark.gpu]
closed = []

@pytest.fixture(scope="module")
def shared():
    yield []

@pytest.fixture
def own(shared, tmp_path):
    assert tmp_path.is_dir()
    yield len(shared)
    closed.append(True)

@pytest.mark.parametrize("b", [1, pytest.param(2)])
@pytest.mark.parametrize(("x", "y"), [(1, 2), (3, 4)], ids=["p", "q"])
def test_pairs(own, shared, b, x, y):
    shared.append((b, x, y))
    assert own == len(shared) - 1 == len(closed)

def test_after(shared):
    assert sorted(shared) == [(1, 1, 2), (1, 3, 4), (2, 1, 2), (2, 3, 4)]
    with pytest.raises(ValueError, match="no"):
        raise ValueError("no")
    assert 0.1 + 0.2 == pytest.approx(0.3)

def test_skipped():
    pytest.importorskip("no_such_module")

@pytest.mark.trap("A1")
def test_wrong():
    assert 1 == 2

def helper():
    raise AssertionError("is no test")
"""


def make_project(folder: Path, sample: str) -> Path:
    """A project of one test file; its way to the GPU tests."""
    tests = folder / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    (tests / "test_sample.py").write_text(sample, encoding="utf-8")
    for name in ("run_gpu.py", "plain_pytest.py"):
        (tests / name).write_text((ROOT / "tests" / name).read_text("utf-8"), encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n gpu\n alone\n trap(id)\n")
    return tests / "run_gpu.py"


@pytest.mark.parametrize("how", [[], ["--plain"]], ids=["pytest", "plain"])
def test_both_ways_run_the_same_tests_with_the_same_end(tmp_path: Path, how: list[str]) -> None:
    """With pytest and with the stand-in."""
    script = make_project(tmp_path, SAMPLE)
    report = tmp_path / "report.json"
    code = """
import runpy, sys, torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_name = lambda: "a GPU"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    arguments = [str(script), "--report", str(report), "--commit", "abc", *how]
    done = run_python(code, *arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(report.read_text(encoding="utf-8"))
    assert (found["passed"], found["failed"], found["skipped"]) == (5, 1, 1), done.stdout
    assert [name.partition("::")[2].partition("[")[0] for name in found["failures"]] == [
        "test_wrong"
    ]
    assert (found["commit"], found["gpu"]) == ("abc", "a GPU")
    assert found["runner"] == ("plain" if how else "pytest")
    assert found["versions"]["torch"]
    assert len(found["sources_sha256"]) == 64


SIDE_BY_SIDE = """
import pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("n", range(7))
def test_all_but_one(n):
    assert n != 4

@pytest.mark.alone
def test_alone():
    pass
"""
ENDLESS = SIDE_BY_SIDE.replace("assert n != 4", "__import__('time').sleep(600 * (n == 4))")


def test_processes_side_by_side_run_every_test_once(tmp_path: Path) -> None:
    script, report = make_project(tmp_path, SIDE_BY_SIDE), tmp_path / "report.json"
    command = [sys.executable, str(script), "--report", str(report), "--jobs", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(report.read_text(encoding="utf-8"))
    assert (found["passed"], found["failed"], found["skipped"]) == (7, 1, 0), done.stdout
    assert found["failures"] == ["tests/test_sample.py::test_all_but_one[4]"]


def test_a_process_that_does_not_end_is_stopped_and_named(tmp_path: Path) -> None:
    script, report = make_project(tmp_path, ENDLESS), tmp_path / "report.json"
    command = [sys.executable, str(script), "--report", str(report), "--jobs", "3"]
    command += ["--seconds", "20"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["failures"] == ["process 1 of 3 ended with no time left"], done.stdout
    assert found["passed"] == 3 + 2 + 1  # the two others', and the one that runs alone


def test_gpu_tests_are_collected_where_hardly_anything_is_installed() -> None:
    """Only pytest beside what the engine needs: no timeout plugin, no server, no numba."""
    files = [str(path) for path in gpu_files(with_pytest=True)[0] if path.parent.name == "gpu"]
    assert len(files) >= 2
    code = BLOCK + "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    flags = ["-p", "no:timeout", "-p", "no:hypothesispytest", "-m", "gpu", "--collect-only", "-q"]
    done = run_python(code, *files, str(ROOT / "tests/e2e/test_ladder.py"), *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/gpu/test_engine_gpu.py::test_two_hundred_steady" in done.stdout


def test_the_time_limit_is_ignored_without_its_plugin() -> None:
    code = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    test = "tests/e2e/test_ladder.py"
    flags = ["-p", "no:timeout", "-m", "slow", "--collect-only", "-q"]
    done = run_python(code, str(ROOT / test), *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "for_the_whole_product" in done.stdout


def test_the_core_generates_with_nothing_but_what_it_needs(tmp_path: Path) -> None:
    """torch, numpy, safetensors, tokenizers, jinja2; transformers made the checkpoint."""
    made = run_python(
        "import sys; from pathlib import Path; from tests.tiny import save_tiny\n"
        "save_tiny(Path(sys.argv[1]), 'llama')",
        str(tmp_path),
    )
    assert made.returncode == 0, made.stderr
    code = f"""{BLOCK}
from paceline import LLM, SamplingParams
spec = {{"method": "ngram", "num_speculative_tokens": 3}}
options = dict(dtype="float32", device="cpu", skip_tokenizer_init=True, engine_in_process=True)
with LLM(sys.argv[1], speculative_config=spec, **options) as llm:
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)
    (output,) = llm.generate({{"prompt_token_ids": [5, 6, 7]}}, params, use_tqdm=False)
    print(len(output.outputs[0].token_ids))
import bench.bench_engines, bench.mixed_tpot, docs.draw_trace, paceline.commands.bench
from paceline.cli import build_parser
build_parser()
"""
    done = run_python(code, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["9"]


def test_files_whose_packages_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_gpu, "_importable", lambda names: names - {"scipy"})
    files, left_out = gpu_files(with_pytest=True)
    assert any(line.startswith("tests/kernels/test_sampling.py (needs scipy)") for line in left_out)
    assert not any(path.name == "test_sampling.py" for path in files)


def test_a_change_of_the_sources_makes_the_last_run_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in run_gpu.HASHED:
        (tmp_path / "paceline" / folder).mkdir(parents=True)
    source = tmp_path / "paceline" / "kernels" / "norm.py"
    source.write_text("x = 1\n", encoding="utf-8")
    monkeypatch.setattr(run_gpu, "ROOT", tmp_path)
    monkeypatch.setattr(run_gpu, "REPORT", tmp_path / "gpu_last_run.json")
    warn_if_stale()
    assert "no GPU run is on record" in capsys.readouterr().out
    record: dict[str, object] = {
        "sources_sha256": sources_hash(),
        "date": "2026-01-01",
        "gpu": "H200",
    }
    record |= {"commit": "abc", "failed": 0, "selection": None}
    run_gpu.REPORT.write_text(json.dumps(record), encoding="utf-8")
    warn_if_stale()
    assert capsys.readouterr().out == ""
    source.write_text("x = 2\n", encoding="utf-8")
    warn_if_stale()
    assert "have changed since the last GPU run (2026-01-01, H200" in capsys.readouterr().out
    source.rename(source.with_name("other.py"))
    assert sources_hash() != record["sources_sha256"]


def test_a_file_that_cannot_be_collected_counts_as_a_failure() -> None:
    outcomes = Outcomes()

    class Report:
        nodeid, outcome, when = "tests/x.py", "failed", "collect"

    outcomes.pytest_collectreport(Report())
    assert (outcomes.counts["failed"], outcomes.failures) == (1, ["tests/x.py"])
