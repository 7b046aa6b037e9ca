"""numba, where it is installed: typed decorators, and a cache of machine code that can be written.

Kernels release the GIL. Their arguments are addresses and integers: no array is unboxed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba import types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

from paceline.config import cache_dir

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

# numpy's error model: a division is one instruction, without a check that could raise.
_OPTIONS = {"nogil": True, "error_model": "numpy"}


def jit(function: Function) -> Function:
    """Compiled at its first call, or taken from the cache."""
    with _own_cache() as is_cached:
        compiled = numba.njit(**_OPTIONS)(function)
        if is_cached:
            compiled._cache = _KernelCache(function)
    return cast(Function, compiled)


def c_function(function: Callable[..., None], num_arguments: int) -> int:
    """The address of `function` as a C function of int64 arguments. It is never freed."""
    signature = types.void(*[types.int64] * num_arguments)
    options = {"error_model": "numpy"}
    with _own_cache() as is_cached:
        try:
            compiled = numba.cfunc(signature, cache=is_cached, **options)(function)
        except _CACHE_FAILURES as error:
            _warn_of_cache(error)
            compiled = numba.cfunc(signature, **options)(function)
    _kept.append(compiled)
    return int(compiled.address)


# A full disk; a file that a crash left half written.
_CACHE_FAILURES = (OSError, EOFError, pickle.UnpicklingError)


class _KernelCache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """numba's cache, which no kernel needs: where it cannot be read or written, one is compiled."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except _CACHE_FAILURES as error:
            _warn_of_cache(error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except _CACHE_FAILURES as error:
            _warn_of_cache(error)


@cache
def _warn_once(folder: Path | None, reason: str) -> None:
    logger.warning(
        "the CPU kernels in %s cannot be read or written (%s), so they are compiled again at the "
        "next start; free some space, or remove that folder",
        folder,
        reason,
    )


def _warn_of_cache(error: Exception) -> None:
    _warn_once(_cache_folder(), str(getattr(error, "strerror", None) or error))


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
    kernels = Path(__file__).parents[1]
    sources = sorted((*kernels.glob("*/numba.py"), *kernels.glob("vector/*.py")))
    digest = hashlib.blake2b(digest_size=8)
    for path in sources:
        digest.update(path.read_bytes())
    folder = cache_dir() / "numba" / digest.hexdigest()
    is_new = not folder.exists()
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
    if is_new:
        logger.info("compiling the CPU kernels, some 15 s; later starts find them in %s", folder)
    return folder if os.access(folder, os.W_OK | os.X_OK) else None
