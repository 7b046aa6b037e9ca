"""numba, where it is installed: typed decorators, and a cache of machine code that can be written.

Kernels release the GIL. Their arguments are addresses and integers: no array is unboxed.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba import types
from numba.extending import intrinsic

from paceline.config import cache_dir

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

# numpy's error model: a division is one instruction, without a check that could raise.
_OPTIONS = {"nogil": True, "error_model": "numpy"}


def jit(function: Function) -> Function:
    """Compiled at its first call, or taken from the cache."""
    with _own_cache() as is_cached:
        compiled = numba.njit(cache=is_cached, **_OPTIONS)(function)
    return cast(Function, compiled)


def c_function(function: Callable[..., None], num_arguments: int) -> int:
    """The address of `function` as a C function of int64 arguments. It is never freed."""
    signature = types.void(*[types.int64] * num_arguments)
    with _own_cache() as is_cached:
        options = {"cache": is_cached, "error_model": "numpy"}
        compiled = numba.cfunc(signature, **options)(function)
    _kept.append(compiled)
    return int(compiled.address)


def emitted(function: Callable[..., Any]) -> Any:
    """`function` types a call and writes its LLVM code; integers it is given stay literals."""
    return intrinsic(prefer_literal=True)(function)


_kept: list[Any] = []


@contextmanager
def _own_cache() -> Iterator[bool]:
    """numba looks for its cache folder when it decorates; that setting is the whole process's."""
    folder = _cache_folder()
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder or before)
    try:
        yield folder is not None
    finally:
        numba.config.CACHE_DIR = before


@cache
def _cache_folder() -> Path | None:
    """A folder of this version of the kernels, or None where nothing can be written.

    numba notices a change in the function's own file only, not in what it calls: so the name of
    the folder is a digest of all of them.
    """
    sources = sorted(Path(__file__).parent.glob("*numba*.py"))
    digest = hashlib.blake2b(digest_size=8)
    for path in sources:
        digest.update(path.read_bytes())
    folder = cache_dir() / "numba" / digest.hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning(
            "%s cannot be made (%s), so the CPU kernels are compiled at every start; point "
            "PACELINE_CACHE at a folder that can be written",
            folder,
            error.strerror,
        )
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None
