"""The weights of a GGUF as numpy arrays, with Hugging Face's names and row order.

Dequantises on request. Knows no torch and no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.checkpoint.gguf_file import GgufFile
from paceline.checkpoint.gguf_names import translate
from paceline.errors import CheckpointError, nearest

# Bytes per number of the types that a bias may have.
_BIAS_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class GgufWeights:
    """Memory-mapped tensors by Hugging Face name."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._file = GgufFile(path)
        self._file.check_tensors()
        self._names = translate(path, self._file.tensors)
        self._heads: dict[str, int] = {}
        if config["model_type"] == "llama":  # the converter permutes only this architecture
            self._heads = {
                "q_proj": config["num_attention_heads"],
                "k_proj": config["num_key_value_heads"],
            }

    def names(self) -> set[str]:
        return set(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._stored(name)].shape

    def kind(self, name: str) -> str:
        """The storage type: F32, BF16, Q4_1 ..."""
        return self._file.type_name(self._stored(name))

    def raw(self, name: str, part: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
        """The stored bytes, row by row, in Hugging Face's order of rows.

        `part` (start, stop) selects rows; for q and k it must consist of whole heads.
        """
        stored = self._stored(name)
        rows = self._file.raw(stored)
        heads = self._heads.get(name.split(".")[-2], 0)
        if part is not None:
            heads = heads * (part[1] - part[0]) // len(rows)
            rows = rows[part[0] : part[1]]
        if not heads:
            return rows
        is_bias = len(self._file.tensors[stored].shape) == 1
        return self._unpermute(name, rows, heads, _BIAS_BYTES.get(self.kind(name)), is_bias)

    def load(self, name: str) -> npt.NDArray[Any]:
        """The numbers as float32. They may be a view of the file, so do not write to them."""
        return self.numbers(name, self.raw(name)).reshape(self.shape(name))

    def numbers(self, name: str, rows: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """Dequantise rows, or parts of rows in whole blocks."""
        return self._file.numbers(self._stored(name), rows)

    def block(self, name: str) -> tuple[int, int]:
        """Numbers per quantisation block, and its size in bytes."""
        return self._file.block(self._stored(name))

    def _stored(self, name: str) -> str:
        found = self._names.get(name)
        if found is None:
            hint = nearest(name, self._names)
            raise CheckpointError(
                f"{self._file.path} holds no tensor named {name} (it holds {len(self._names)})."
                f"{hint}"
            )
        return found

    def _unpermute(
        self,
        name: str,
        rows: npt.NDArray[np.uint8],
        heads: int,
        number_bytes: int | None,
        is_bias: bool,
    ) -> npt.NDArray[np.uint8]:
        """Undo the converter's order of q and k rows: stored row 2j + p is row p D/2 + j.

        Each row is quantised separately, so rows can be moved without dequantising them.
        """
        if is_bias:  # one number for each row of the matrix
            if number_bytes is None:
                raise CheckpointError(
                    f"{self._file.path}: the bias {name} has type {self.kind(name)}; it must be "
                    f"one of {', '.join(_BIAS_BYTES)}."
                )
            rows = rows.reshape(-1, number_bytes)
        num_rows, row_bytes = rows.shape
        if num_rows % (heads * 2):
            raise CheckpointError(
                f"{self._file.path}: the {num_rows} rows of {name} do not split into {heads} heads."
            )
        moved = rows.reshape(heads, num_rows // heads // 2, 2, row_bytes).swapaxes(1, 2)
        return np.ascontiguousarray(moved).reshape(1 if is_bias else num_rows, -1)
