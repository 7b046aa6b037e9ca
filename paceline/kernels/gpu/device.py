"""The GPU that kernels run on: what it is, and kernels compiled for it before they run.

They are compiled several at a time, because most of a cold start is Triton's compiler. Launches
nothing and knows no kernel; needs Triton only to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

NUM_COMPILERS = 8


@cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # interpreted: few programs, so that each has several items
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


class _ZeroedMemory(TorchFunctionMode):
    """New memory holds zeros: what no kernel wrote is a valid token, row and length to torch.

    A mode of functions: one of dispatch makes torch import its own compiler, which takes seconds.
    """

    _NEW = (torch.Tensor.new_empty, torch.Tensor.new_empty_strided)
    _EMPTY = frozenset((torch.empty, torch.empty_like, torch.empty_strided, *_NEW))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in self._EMPTY else made


@cache
def open_compiler() -> Thread:
    """Triton reads and hashes its own files once, for its cache: start that early."""

    def read() -> None:
        from triton.runtime.cache import triton_key

        triton_key()

    thread = Thread(target=read, name="paceline-triton", daemon=True)
    thread.start()
    return thread


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Kernels that are launched inside are compiled and loaded, in parallel, and not run.

    What they would have written is zero if its memory is new; older tensors must be harmless as
    they are.
    """
    from triton import AsyncCompileMode
    from triton.runtime import build
    from triton.runtime.jit import JITFunction

    class Ahead(AsyncCompileMode):  # type: ignore[misc]
        def submit(self, key: str, compiled: Callable[[], Any], keep: Callable[[Any], None]) -> Any:
            future = super().submit(key, lambda: _loaded(compiled()), keep)
            # Triton would do so at the end, and until then look each launch up on disk again.
            keep(future)
            return future

    launch, load, alone = JITFunction.run, build._load_module_from_path, Lock()

    def own_module(name: str, path: str) -> Any:
        # Launchers share a name: loading one again gives the newest's module, overwritten.
        with alone:
            return SimpleNamespace(**vars(load(name, path)))

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    open_compiler().join()
    JITFunction.run, build._load_module_from_path = only_compile, own_module
    try:
        with _pool() as pool, Ahead(pool), _ZeroedMemory():
            yield
    finally:
        JITFunction.run, build._load_module_from_path = launch, load


def _pool() -> ThreadPoolExecutor:
    """Threads on the current GPU: a new thread starts on the first one."""
    if not torch.cuda.is_initialized():
        return ThreadPoolExecutor(NUM_COMPILERS)
    here = (torch.cuda.current_device(),)
    return ThreadPoolExecutor(NUM_COMPILERS, initializer=torch.cuda.set_device, initargs=here)


def _loaded(kernel: Any) -> Any:
    """Compile its launcher and load its code now; else the first launch would do both, one kernel
    after the other."""
    kernel._init_handles()
    return kernel
