"""Compiles kernels before they run, several at a time: most of a cold start is Triton's compiler.

Launches nothing and knows no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NUM_COMPILERS = 8


class _ZeroedMemory(TorchDispatchMode):
    """New memory holds zeros: what no kernel wrote is a valid token, row and length to torch."""

    _EMPTY = frozenset(
        (
            torch.ops.aten.empty.memory_format,
            torch.ops.aten.empty_like.default,
            torch.ops.aten.empty_strided.default,
            torch.ops.aten.new_empty.default,
            torch.ops.aten.new_empty_strided.default,
        )
    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in self._EMPTY else made


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Kernels that are launched inside are compiled, in parallel, and not run.

    What they would have written is zero if its memory is new; older tensors must be harmless as
    they are.
    """
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    zeroed = _ZeroedMemory()  # type: ignore[no-untyped-call]
    JITFunction.run = only_compile
    try:
        with ThreadPoolExecutor(NUM_COMPILERS) as pool, AsyncCompileMode(pool), zeroed:
            yield
    finally:
        JITFunction.run = launch
