"""Import this before kernels run interpreted: numpy 2.4 turned what Triton 3.6 does into an error.

There a number is an array of one element, and a loop bound was made of it with int(). The rest
makes it three times as fast: what is done again for every call or every value is done once, and
integer sums are no longer computed a second time, in 64 bits, to see whether they overflow; cases
that are small enough for an interpreter have none.

e4m3 becomes what torch makes of it; the interpreter rounds a part of them wrongly, and has no NaN.

Products of half precision or of e4m3 are summed up in 64 bits, where they have no rounding to speak
of: numpy gives a row of a block other last digits in another place of it, on CPUs without AVX-512.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from triton.language import core
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_patch = interpreter._patch_lang
_numpy_type = interpreter._get_np_dtype
_numpy_types: dict[str, Any] = {}
_dot = interpreter.InterpreterBuilder.create_dot
_convert = interpreter._convert_float
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def _patch_with_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


@cache
def _patch_once(function: Callable[..., Any]) -> Any:
    """In a process that only interprets, nothing has to be put back."""
    _patch(function)
    return interpreter._LangPatchScope()


def _numpy_type_once(type_: Any) -> Any:
    name = type_.scalar.name
    if name not in _numpy_types:
        _numpy_types[name] = _numpy_type(type_)
    return _numpy_types[name]


def _convert_e4m3(data: Any, old: Any, new: Any, rounding_mode: Any) -> Any:
    """Bits of the type `old` as those of `new`."""
    if old.scalar == core.float8e4nv:
        return _E4M3[data].astype(_numpy_type_once(new))
    if new.scalar == core.float8e4nv:
        numbers = torch.from_numpy(np.ascontiguousarray(data.view(_numpy_type_once(old))))
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(data.shape)
    return _convert(data, old, new, rounding_mode)


def _exact_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    numbers = [_E4M3[x.data] if x.dtype.scalar == core.float8e4nv else x.data for x in (a, b)]
    if numbers[0] is a.data and a.data.dtype != np.float16:
        return _dot(self, a, b, d, *rest)
    product = np.matmul(*numbers, dtype=np.float64).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _without_name(self: Any, types: Any, fields: Any = None) -> None:
    """Every shape of every value is such a tuple; the names of their types are not needed."""
    self.types = types
    self.fields = fields or [""] * len(types)


interpreter._patch_lang_tensor = _patch_with_index
interpreter._patch_lang = _patch_once
interpreter._get_np_dtype = _numpy_type_once
interpreter._convert_float = _convert_e4m3
core.tuple_type.__init__ = _without_name
interpreter.InterpreterBuilder.create_dot = _exact_dot
builder = interpreter.interpreter_builder
builder.options = replace(builder.options, sanitize_overflow=False)
