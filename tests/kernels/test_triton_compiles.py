"""Every Triton kernel compiles for GPUs that are not here: the interpreter knows less.

Loop-carried types, shapes and instructions are checked by the compiler alone.
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch

PROGRAM = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from paceline.kernels.delta_rule.triton import apply
from tests.kernels.cases.pairs import all_triton_cases

apply.USES_CHUNKS = True  # kernels that no GPU runs yet (ADR 21) must compile too

class Target:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", ARCH, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=None: 0)

driver.set_active(Target())
launch, needed = JITFunction.run, {}

def only_compile(self, *args, grid, warmup, **options):
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    needed[self.__name__] = max(needed.get(self.__name__, 0), kernel.metadata.shared)
    return kernel

JITFunction.run = only_compile
seen, failed = set(), []
for case in all_triton_cases():
    if case.name.startswith("fp8 pages") != PAGES and not ALL:
        continue
    kind = (case.operation, case.name.startswith("block_"), case.least_arch)
    if kind in seen and not ALL or case.is_large or ARCH < case.least_arch:
        continue
    seen.add(kind)
    try:
        case.function(case.backend)(*case.make(torch.device("cpu"), case.dtypes[-1]))
    except Exception as error:
        failed.append(f"FAILED {case}: {type(error).__name__}: {error}")
if SHAPES:  # without a measurement for the GPU, its tiles are the default ones
    from paceline.kernels.linear.reference import Product
    from paceline.kernels.linear.tiles import default_tile
    from paceline.kernels.linear.triton.products import linear
    for num_outputs, num_inputs in SHAPES:
        product = Product(torch.empty(num_outputs, num_inputs, dtype=torch.bfloat16), None)
        for num_rows in (1, 8, 16, 32, 64):
            x = torch.empty(num_rows, num_inputs, dtype=torch.bfloat16)
            linear(x, product, tile=default_tile(num_outputs, num_inputs, num_rows, x.dtype))
if ARCH >= 89:  # e4m3 by both kinds of scales: few rows, and many
    from paceline.kernels.fp8.reference import quantise_rows, quantise_weight
    from paceline.kernels.fp8.triton.products import fp8_linear
    from paceline.kernels.linear.tiles import default_fp8_tile
    for num_outputs, num_inputs in SHAPES or [(4096, 512)]:
        wide = torch.zeros(num_outputs, num_inputs)
        for is_blocked in (False, True):
            weight = quantise_weight(wide, is_blocked)
            for num_rows in (1, 128, 2000):
                rows = quantise_rows(wide[:1].expand(num_rows, -1), is_blocked)
                tile = default_fp8_tile(num_outputs, num_inputs, num_rows, wide.device)
                tile = tile._replace(kind="tma" if ARCH >= 90 else "dot")
                fp8_linear(rows, weight, None, torch.bfloat16, tile)
needed.pop("_gated_kernel", None)  # chosen on Hopper alone
failed += [f"{name} needs {n} bytes of {LIMIT}" for name, n in needed.items() if n > LIMIT]
print(len(seen), "kernels", *failed, sep="\\n")
raise SystemExit(bool(failed) or not seen)
"""
# Bytes of shared memory that a program may have.
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
# Products of 8B and 0.1B models.
SHAPES = [(6144, 4096), (4096, 14336), (28672, 4096), (960, 576), (576, 1536), (3072, 576)]


def check_compiles(
    arch: int, cache: Path, *, shapes: bool = False, every: bool = False, fp8_pages: bool = False
) -> None:
    head = f"ARCH, LIMIT, ALL, PAGES = {arch}, {SHARED_BYTES[arch]}, {every}, {fp8_pages}\n"
    program = f"{head}SHAPES = {SHAPES if shapes else []}\n{PROGRAM}"
    done = run_program(program, cache, 3600 if every else 280)
    assert done.returncode == 0, done.stdout + done.stderr


def run_program(
    program: str, cache: Path, timeout_s: float = 280
) -> subprocess.CompletedProcess[str]:
    """In a process of its own: Triton knows one driver."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={
            "PYTHONPATH": ".",
            "PATH": "/usr/bin:/bin",
            "TRITON_CACHE_DIR": str(cache),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """The first case of each; nothing is launched."""
    pytest.importorskip("triton")
    check_compiles(90, tmp_path)


@pytest.mark.more
@pytest.mark.parametrize("arch", [80, 89, 100])
def test_every_kernel_compiles_for_other_gpus(arch: int, tmp_path: Path) -> None:
    """Ampere, Ada and Blackwell, on which nothing was run: they lack instructions of Hopper, and
    Ada has half of its shared memory."""
    pytest.importorskip("triton")
    check_compiles(arch, tmp_path, shapes=True)


@pytest.mark.more
@pytest.mark.parametrize("arch", [80, 89, 90, 100])
def test_kernels_of_fp8_pages_compile(arch: int, tmp_path: Path) -> None:
    """Ampere has no instruction for e4m3."""
    pytest.importorskip("triton")
    check_compiles(arch, tmp_path, fp8_pages=True)


@pytest.mark.slow
@pytest.mark.timeout(3700)
@pytest.mark.parametrize("arch", [80, 89, 90, 100])
def test_every_case_of_every_kernel_compiles(arch: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    check_compiles(arch, tmp_path, every=True)


def test_what_no_kernel_wrote_is_zero_while_kernels_are_only_compiled() -> None:
    """Tokens and rows that torch looks up meanwhile exist, whatever the memory held before."""
    pytest.importorskip("triton")
    from paceline.kernels.gpu.device import compiling_ahead

    like = torch.full((3, 1000), 7)
    with compiling_ahead():
        made = [
            torch.empty(3, 1000, dtype=torch.int64),
            torch.empty_like(like),
            like.new_empty((3, 1000)),
            torch.empty_strided((3, 1000), (1000, 1), dtype=torch.int64),
            like.new_empty_strided((3, 1000), (1000, 1)),
        ]
        assert not any(x.any() for x in made)
        assert (like.index_select(0, made[0][0]) == 7).all()


DRIVER = """
import sys, threading
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime import driver, jit
from paceline.kernels.gpu import device as gpu
from paceline.kernels.gpu import device as gpu

made, ran = [], []

class Hopper:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=None: 0)

    class utils:
        get_device_properties = staticmethod(lambda device: {"max_shared_mem": 227 << 10})
        load_binary = staticmethod(lambda *binary: (1, 1, 32, 0, 1024))

    @staticmethod
    def launcher_cls(source, metadata):
        made.append(threading.current_thread())
        return lambda *launch: ran.append(launch)

driver.set_active(Hopper())
"""

AHEAD = """
from paceline.kernels.elementwise.triton import rms_norm

asked, look_up = [], jit.get_cache_key
jit.get_cache_key = lambda *of: asked.append(of) or look_up(*of)
x_TD, weight_D = torch.ones(4, 64), torch.ones(64)
with gpu.compiling_ahead():
    for _ in range(3):
        rms_norm(x_TD, weight_D, 1e-5)
assert len(asked) == len(made) == 1, "looked up once, and loaded"
assert made[0] is not threading.main_thread()
assert not ran
rms_norm(x_TD, weight_D, 1e-5)
assert len(ran) == len(made) == 1, "the first launch finds everything"
assert "torch._dynamo" not in sys.modules
"""


def test_a_kernel_is_looked_up_and_loaded_once_before_it_runs(tmp_path: Path) -> None:
    """And torch's own compiler, which takes seconds to import, stays out of it."""
    pytest.importorskip("triton")
    done = run_program(DRIVER + AHEAD, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


PROMPTS = """
gpu.is_hopper = lambda device: True
from paceline.kernels.attention.triton import attend
from tests.kernels.cases.attention import Shape, arguments
from tests.kernels.cases.kv_codes import coded_attention

# Queries that the copy engine fetches and that it does not; with and without the step's own blocks.
shapes = [Shape([(270, 300)], (4, 1), 128), Shape([(40, 150)], (3, 1), 128)]
calls = [arguments(shape)(torch.device("cpu"), torch.bfloat16) for shape in shapes]
for call in calls:
    kernel = attend.tiles_kernel(*call[:-1])
    assert kernel.__module__.endswith("attention.hopper.tiles"), kernel
    attend.GLUONS_TRITON = "another."
    kernel = attend.tiles_kernel(*call[:-1])
    assert kernel.__module__.endswith("attention.triton.tiles"), kernel
    attend.GLUONS_TRITON = triton.__version__
coded = coded_attention(arguments(shapes[0]))(torch.device("cpu"), torch.bfloat16)
kernel = attend.tiles_kernel(*coded[:4])
assert kernel.__module__.endswith("attention.triton.tiles"), "fp8 pages"
with gpu.compiling_ahead():
    for call in calls:
        attend.paged_attention(*call)
num_made = len(made)
assert num_made and threading.main_thread() not in made
assert not ran
for call in calls:
    call[3].work = None
    attend.paged_attention(*call)
assert len(made) == num_made, "the first launch finds everything"
assert ran
"""


@pytest.mark.more
def test_prompts_compile_for_hopper_in_gluon(tmp_path: Path) -> None:
    """Ahead, and by other threads, as all others; with another Triton it is left alone."""
    triton = pytest.importorskip("triton")
    from paceline.kernels.attention.triton.attend import GLUONS_TRITON

    if not triton.__version__.startswith(GLUONS_TRITON):
        pytest.skip("written for another Gluon")
    done = run_program(DRIVER + PROMPTS, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_launcher_is_its_own_though_they_are_loaded_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library that was loaded before comes as the module of the newest of its name, overwritten;
    Triton takes the function out of it a moment later."""
    pytest.importorskip("triton")
    from triton.runtime import build

    from paceline.kernels.gpu.device import compiling_ahead

    shared = ModuleType("__triton_launcher")

    def load(name: str, path: str) -> ModuleType:
        shared.__dict__["launch"] = path
        time.sleep(0.001)
        return shared

    monkeypatch.setattr(build, "_load_module_from_path", load)
    paths = [str(number) for number in range(20)]
    with compiling_ahead(), ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda path: build._load_module_from_path("", path), paths))
    assert [module.launch for module in made] == paths
    assert build._load_module_from_path is load
