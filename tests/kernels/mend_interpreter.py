"""Import this before kernels run interpreted: numpy 2.4 turned what Triton 3.6 does into an error.

There a number is an array of one element, and a loop bound was made of it with int(). And what the
interpreter does again for every call of a function, it does once here: a third of its time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_patch = interpreter._patch_lang


def _patch_with_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


@cache
def _patch_once(function: Callable[..., Any]) -> Any:
    """In a process that only interprets, nothing has to be put back."""
    _patch(function)
    return interpreter._LangPatchScope()


interpreter._patch_lang_tensor = _patch_with_index
interpreter._patch_lang = _patch_once
