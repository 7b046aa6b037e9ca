"""Compiles kernels before they run, several at a time: most of a cold start is Triton's compiler.

Launches nothing and knows no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

NUM_COMPILERS = 8


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Kernels that are launched inside are compiled, in parallel, and not run.

    What they would have written is not there: the tensors must be harmless as they are.
    """
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = only_compile
    try:
        with ThreadPoolExecutor(NUM_COMPILERS) as pool, AsyncCompileMode(pool):
            yield
    finally:
        JITFunction.run = launch
