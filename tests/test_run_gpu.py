"""The way to the GPU tests: every test runs once, whatever others do, and what is written down."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import run_gpu
from tests.architecture.source_tree import ROOT
from tests.last_run import sources_hash
from tests.parallel_pytest import Done, ParallelRun
from tests.run_gpu import HASHED, gpu_files, warn_if_stale
from tests.tiny import save_tiny

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
import os, time
import pytest
pytestmark = pytest.mark.gpu

@pytest.fixture(scope="module")
def shared():
    yield []

@pytest.mark.parametrize("n", range(7))
def test_all_but_one(n, shared):
    shared.append(n)
    assert n != 4, "four is wrong"

def test_skipped():
    pytest.importorskip("no_such_module")
"""
HANGS = """
def test_that_hangs():
    time.sleep(600)
"""
DIES = """
def test_that_dies():
    os._exit(7)
"""
POISONED = """
broken = False

@pytest.mark.parametrize("n", range(6))
def test_poison(n):
    global broken
    broken = broken or n == 2
    assert not broken, "CUDA error: an illegal memory access was encountered"
"""


@pytest.fixture(autouse=True)
def _no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a sample need none, and importing them takes longer than the sample."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def make_project(root: Path, *parts: str) -> Path:
    """A project with one test file and its way to the GPU tests, which is returned."""
    tests = root / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    (tests / "test_sample.py").write_text("".join(parts), encoding="utf-8")
    for name in ("run_gpu.py", "last_run.py", "parallel_pytest.py"):
        shutil.copy(ROOT / "tests" / name, tests / name)
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n gpu\n")
    return tests / "run_gpu.py"


def run_sample(root: Path, *parts: str, jobs: int = 3, **limits: float) -> tuple[list[Done], str]:
    """How each test ended, and what the reader was told."""
    make_project(root, *parts)
    said: list[str] = []
    arguments = ["tests/test_sample.py", f"--rootdir={root}"]
    logs = root / "logs"
    logs.mkdir()
    run = ParallelRun(
        root, arguments, logs, said.append, **{"test_s": 120.0, "seconds": 240.0, **limits}
    )
    return run.run(jobs), "\n".join(said)


def outcomes(done: list[Done]) -> dict[str, str]:
    assert len({one.test for one in done}) == len(done), "a test ran twice"
    return {one.test.partition("::")[2]: one.outcome for one in done}


EXPECTED = {f"test_all_but_one[{n}]": "failed" if n == 4 else "passed" for n in range(7)}
EXPECTED["test_skipped"] = "skipped"


@pytest.mark.parametrize("jobs", [1, 4])
def test_processes_run_every_test_once(tmp_path: Path, jobs: int) -> None:
    done, said = run_sample(tmp_path, SAMPLE, jobs=jobs)
    assert outcomes(done) == EXPECTED
    assert "FAILED tests/test_sample.py::test_all_but_one[4]" in said
    assert "four is wrong" in said
    assert sum(one.seconds for one in done) > 0


def test_a_test_that_does_not_end_is_stopped_and_named_and_all_others_run(tmp_path: Path) -> None:
    done, _ = run_sample(tmp_path, SAMPLE, HANGS, test_s=5.0)
    assert outcomes(done) == EXPECTED | {"test_that_hangs": "failed"}
    assert [one.text for one in done if "did not end within 5 s" in one.text] != []


def test_a_test_that_ends_its_process_is_named_and_all_others_run(tmp_path: Path) -> None:
    done, said = run_sample(tmp_path, DIES, SAMPLE)
    assert outcomes(done) == EXPECTED | {"test_that_dies": "failed"}
    assert "Its process ended with 7." in said


def test_a_cuda_error_fails_no_test_but_its_own(tmp_path: Path) -> None:
    """Every later CUDA call of that process would fail: the next test gets another process."""
    done, _ = run_sample(tmp_path, "import pytest\n", POISONED, jobs=1)
    wanted = {f"test_poison[{n}]": "failed" if n == 2 else "passed" for n in range(6)}
    assert outcomes(done) == wanted


def test_tests_for_which_no_time_is_left_are_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ParallelRun, "_is_over", lambda run: run._waiting is not None)
    done, _ = run_sample(tmp_path, HANGS, SAMPLE, jobs=1)
    assert set(outcomes(done).values()) == {"failed"}
    assert len(done) == len(EXPECTED) + 1
    assert sum("It did not run" in one.text for one in done) == len(EXPECTED)


def test_a_file_that_cannot_be_collected_counts_as_one_failure(tmp_path: Path) -> None:
    done, said = run_sample(tmp_path, SAMPLE, "import no_such_module\n")
    assert [(one.test, one.outcome) for one in done] == [("tests/test_sample.py", "failed")]
    assert said.count("No module named 'no_such_module'") >= 1


def test_the_report_says_what_ran_where_and_for_how_long(tmp_path: Path) -> None:
    script, report = make_project(tmp_path, SAMPLE), tmp_path / "report.json"
    command = [sys.executable, str(script), "--report", str(report), "--commit", "abc"]
    command += ["--jobs", "2", "-k", "not skipped"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(report.read_text(encoding="utf-8"))
    assert (found["passed"], found["failed"], found["skipped"]) == (6, 1, 0), done.stdout
    assert found["failures"] == ["tests/test_sample.py::test_all_but_one[4]"]
    assert (found["commit"], found["selection"], found["jobs"]) == ("abc", "not skipped", 2)
    assert found["files"]["tests/test_sample.py"]["tests"] == 7
    assert found["versions"]["torch"]
    assert len(found["sources_sha256"]) == 64
    assert "6 passed, 1 failed, 0 skipped in " in done.stdout
    assert "7      " in done.stdout.partition("seconds  file")[2].splitlines()[1]


def test_gpu_tests_are_collected_where_hardly_anything_is_installed() -> None:
    """Only pytest beside what the engine needs: no plugin, no server, no numba."""
    files = [str(path) for path in gpu_files()[0] if path.parent.name == "gpu"]
    assert len(files) >= 2
    code = BLOCK + "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    flags = [f"-pno:{plugin}" for plugin in ("timeout", "xdist", "hypothesispytest")]
    flags += ["-m", "gpu or slow", "--collect-only", "-q"]
    done = run_python(code, *files, str(ROOT / "tests/e2e/test_ladder.py"), *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/gpu/test_engine_gpu.py::test_two_hundred_steady" in done.stdout
    assert "for_the_whole_product" in done.stdout, "its mark needs the timeout plugin"


def test_the_core_generates_with_nothing_but_what_it_needs(tmp_path: Path) -> None:
    """torch, numpy, safetensors, tokenizers, jinja2; transformers made the checkpoint."""
    save_tiny(tmp_path, "llama")
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
    monkeypatch.setattr(run_gpu, "_importable", lambda names: names - {"torch"})
    files, left_out = gpu_files()
    name = "tests/kernels/test_triton_pairs.py"
    assert f"{name} (needs torch)" in left_out
    assert not any(path.name == Path(name).name for path in files)


def test_a_change_of_the_sources_makes_the_last_run_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in HASHED:
        (tmp_path / "paceline" / folder).mkdir(parents=True)
    source = tmp_path / "paceline" / "kernels" / "norm.py"
    source.write_text("x = 1\n", encoding="utf-8")
    monkeypatch.setattr(run_gpu, "ROOT", tmp_path)
    monkeypatch.setattr(run_gpu, "REPORT", tmp_path / "gpu_last_run.json")
    warn_if_stale()
    assert "no GPU run is on record" in capsys.readouterr().out
    record: dict[str, object] = {
        "sources_sha256": sources_hash(tmp_path, HASHED),
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
    assert sources_hash(tmp_path, HASHED) != record["sources_sha256"]
