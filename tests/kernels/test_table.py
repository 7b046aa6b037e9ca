"""The table of operations: complete, the same signatures everywhere, and importable with little."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from paceline.kernels import table
from paceline.kernels.table import operations
from tests.architecture.source_tree import ROOT, sources
from tests.kernels.cases.cpu import all_cases
from tests.kernels.cases.pairs import all_triton_cases

NEEDED = {"numba": "numba", "triton": "triton", "hopper": "triton"}
IMPLEMENTATIONS = [
    (name, backend)
    for name, operation in operations().items()
    for backend in operation.files
    if backend != "reference"
]


@pytest.mark.parametrize(("name", "backend"), IMPLEMENTATIONS)
def test_an_implementation_has_the_signature_of_its_reference(name: str, backend: str) -> None:
    if find_spec(NEEDED.get(backend, "torch")) is None:
        pytest.skip(f"needs {NEEDED[backend]}")
    operation = operations()[name]
    assert operation.reference.__name__ == name
    found, wanted = (inspect.signature(f) for f in (operation.by(backend), operation.reference))
    assert found == wanted


def test_every_triton_kernel_has_cases() -> None:
    tried = {(case.operation, case.backend) for case in all_triton_cases()}
    # linear_silu chooses between the product of torch and that of Hopper.
    listed = {x for x in IMPLEMENTATIONS if x[1] in ("triton", "hopper")}
    assert tried == listed - {("linear_silu", "triton")}


def test_every_vector_kernel_has_cases() -> None:
    assert {case.kernel for case in all_cases()} == {
        x[0] for x in IMPLEMENTATIONS if x[1] == "numba"
    }


def test_every_file_of_a_backend_is_in_the_table_or_a_part_of_one_that_is() -> None:
    """A part is imported by other kernels; a file that no other imports is dead."""
    kernels = sources("paceline/kernels")
    listed = {
        f"{operation.reference.__module__.rpartition('.')[0]}.{file}"
        for operation in operations().values()
        for file in operation.files.values()
    }
    texts = {source.module: source.text for source in kernels}
    for module in texts:
        if module in listed or not set(module.split(".")) & {"numpy", "numba", "triton", "hopper"}:
            continue
        package, _, name = module.rpartition(".")
        ways = (f"from {module} import", f"from {package} import {name}")
        is_part = any(
            way in text for other, text in texts.items() if other != module for way in ways
        )
        assert is_part or not texts[module], module


def test_a_device_picks_its_backend() -> None:
    assert table.uniform.on(torch.device("cpu")) is table.uniform.by("numpy")
    assert table.uniform.on(torch.device("meta")) is table.uniform.reference
    assert table.draw.on(torch.device("cpu")) is table.draw.by("numpy")
    assert table.judge.on(torch.device("cpu")) is table.judge.reference
    if find_spec("triton") is not None:
        assert table.draw.on(torch.device("cuda")) is table.draw.by("triton")


def test_a_call_picks_by_where_its_first_argument_is() -> None:
    token_N, bad_N = table.greedy(torch.tensor([[1.0, 3.0, 2.0]]))
    assert (token_N.tolist(), bad_N.tolist()) == ([1], [False])
    normed = table.rms_norm(torch.empty(2, 3, device="meta"), torch.empty(3, device="meta"), 1e-5)
    assert normed.device.type == "meta"


@pytest.mark.parametrize("missing", ["numba", "triton"])
def test_the_table_and_its_references_need_neither_numba_nor_triton(missing: str) -> None:
    program = f"""
import sys
sys.modules[{missing!r}] = None
import torch
from paceline.kernels import table
from paceline.kernels.gpu.device import is_hopper
cpu = torch.device("cpu")
for operation in table.operations().values():
    assert callable(operation.on(cpu))
assert not is_hopper(cpu)
assert table.greedy(torch.eye(3))[0].tolist() == [0, 1, 2]
assert table.has_numba(cpu) == ({missing!r} != "numba")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
