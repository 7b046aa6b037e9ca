"""What the assembler makes of kernels whose speed depends on it, read from machine code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.test_triton_compiles import run_program

PROGRAM = """
import re, subprocess, tempfile
from pathlib import Path
import torch, triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from bench.gemm_tiles import NoGpu
from tests.kernels.cases.attention import Shape, arguments
from paceline.kernels.attention.triton import spans
from paceline.kernels.attention.triton.attend import paged_attention

driver.set_active(NoGpu())
launch, made = JITFunction.run, {}

def only_compile(self, *args, grid, warmup, **options):
    made[self.__name__] = launch(self, *args, grid=grid, warmup=True, **options)
    return made[self.__name__]

JITFunction.run = only_compile
paged_attention(*arguments(Shape([(1, 300)], (32, 8), 128, width=1))("cpu", torch.bfloat16))
tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"

def code(name):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made[name].asm["cubin"])
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True).stdout

kinds = {"LDG": "L", "MUFU.EX2": "E", "BRA": "B"}
found = re.findall("|".join(map(re.escape, kinds)), code("_merge_kernel"))
order = "".join(kinds[x] for x in found)
# Of every partial result: its sum, and highest score and total in two layouts.
loads = max(map(len, re.findall("L+(?=BE)", order)), default=0)
assert loads >= 3 * spans.PARTIALS_AT_ONCE, order
walk = code("_span_kernel")
assert walk.count("LDGSTS.E.BYPASS.128") == walk.count("LDGSTS") > 0, "keys come by 16 bytes"
assert "HMMA" in walk
"""


@pytest.mark.more
def test_loads_of_partial_results_come_before_their_merges(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = run_program(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
