"""Reads a GGUF file: header, metadata and memory-mapped tensors. Knows no architecture.

The `gguf` package's reader takes seconds for a large vocabulary, because it makes a numpy view of
every string, and every process would pay that at start. The header is simple, so it is parsed here
with bounds checks. The package still dequantises tensors.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from paceline.errors import CheckpointError, MissingExtra

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Value types of the format, by number.
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
# Types of plain numbers, which need no gguf package.
PLAIN_TYPES = {0: "F32", 1: "F16", 30: "BF16"}
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's place in the file. `shape` is in torch order: the last axis is contiguous."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int  # from the start of the file


@dataclass(frozen=True, slots=True)
class _LazyStrings:
    """An array of strings that is decoded when it is first used."""

    start: int
    count: int


class GgufFile(Mapping[str, Any]):
    """The metadata as a mapping, and the tensors by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # mmap of an empty file
            raise CheckpointError(f"{path} is empty; fetch it again.") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
        self._metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read_header()
        except struct.error:
            self._refuse(f"the header ends beyond the file's {len(self._map)} bytes")

    def __getitem__(self, key: str) -> Any:
        value = self._metadata[key]
        if isinstance(value, _LazyStrings):
            value = self._metadata[key] = list(self._strings(value))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._metadata)

    def __len__(self) -> int:
        return len(self._metadata)

    def type_name(self, name: str) -> str:
        """The tensor's storage type as GGUF names it, such as Q4_1 or F16."""
        return _type_name(self.tensors[name].type_id)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, one row per index of all axes but the last. Nothing is copied."""
        tensor = self.tensors[name]
        rows, row_bytes = self._layout(tensor)
        view = np.frombuffer(self._map, np.uint8, rows * row_bytes, tensor.offset)
        return view.reshape(rows, row_bytes)

    def dequantise(self, name: str) -> npt.NDArray[Any]:
        """The tensor's numbers as float32."""
        return self.numbers(name, self.raw(name)).reshape(self.tensors[name].shape)

    def numbers(self, name: str, rows: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """Dequantise rows, or parts of rows in whole blocks, to float32."""
        type_id = self.tensors[name].type_id
        if PLAIN_TYPES.get(type_id) == "F32":
            return rows.view(np.float32)
        values = _gguf().quants.dequantize(rows, _gguf().GGMLQuantizationType(type_id))
        return np.asarray(values, dtype=np.float32)

    def block(self, name: str) -> tuple[int, int]:
        """Numbers per quantisation block, and its size in bytes."""
        type_id = self.tensors[name].type_id
        if type_id in PLAIN_TYPES:
            return 1, 4 if PLAIN_TYPES[type_id] == "F32" else 2
        gguf = _gguf()
        count, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_id)]
        return int(count), int(size)

    def check_tensors(self) -> None:
        """Refuse types that cannot be dequantised, and tensors that end past the file."""
        checked: set[int] = set()
        for tensor in self.tensors.values():
            if tensor.type_id not in checked:
                self._check_type(tensor)
                checked.add(tensor.type_id)
            rows, row_bytes = self._layout(tensor)
            end = tensor.offset + rows * row_bytes
            if end > len(self._map):
                self._refuse(
                    f"tensor {tensor.name} ends at byte {end}, the file has {len(self._map)}: "
                    "it is truncated"
                )

    def _check_type(self, tensor: GgufTensor) -> None:
        gguf = _gguf()
        try:
            kind = gguf.GGMLQuantizationType(tensor.type_id)
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError):
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name} has type {_type_name(tensor.type_id)}, which "
                "the gguf package cannot dequantise. Use a file with another quantisation, such "
                "as Q4_K_M or Q8_0."
            ) from None

    def _layout(self, tensor: GgufTensor) -> tuple[int, int]:
        """(rows, bytes per row)"""
        block, block_bytes = self.block(tensor.name)
        if not tensor.shape or tensor.shape[-1] % block:
            self._refuse(
                f"tensor {tensor.name} has shape {tensor.shape}, whose last axis is no multiple of "
                f"the {block} numbers in a block of {_type_name(tensor.type_id)}"
            )
        rows = 1
        for size in tensor.shape[:-1]:
            rows *= size
        return rows, tensor.shape[-1] // block * block_bytes

    def _read_header(self) -> None:
        if self._map[:4] != MAGIC:
            raise CheckpointError(
                f"{self.path} is not a GGUF file: it begins with {bytes(self._map[:4])!r}, not "
                f"{MAGIC!r}. Fetch it again, or give the folder of a Hugging Face checkpoint."
            )
        (version,) = struct.unpack_from("<I", self._map, 4)
        if version not in VERSIONS:
            # A byte-swapped version is a big-endian file.
            shown = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise CheckpointError(
                f"{self.path}: {shown} GGUF is not supported; convert it to version {VERSIONS[-1]}."
            )
        num_tensors, num_values = struct.unpack_from("<QQ", self._map, 8)
        at = 24
        for _ in range(num_values):
            key, at = self._text(at)
            (kind,) = struct.unpack_from("<I", self._map, at)
            self._metadata[key], at = self._value(kind, at + 4)
        infos = []
        for _ in range(num_tensors):
            info, at = self._tensor_info(at)
            infos.append(info)
        alignment = self._metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._refuse(f"general.alignment is {alignment!r}, not a power of two")
        base = -(-at // alignment) * alignment
        for name, shape, type_id, offset in infos:
            if name in self.tensors:
                self._refuse(f"tensor {name} appears twice")
            if base + offset >= len(self._map):
                self._refuse(
                    f"tensor {name} begins at byte {base + offset}, the file has "
                    f"{len(self._map)}: it is truncated"
                )
            self.tensors[name] = GgufTensor(name, shape, type_id, base + offset)

    def _tensor_info(self, at: int) -> tuple[tuple[str, tuple[int, ...], int, int], int]:
        name, at = self._text(at)
        (num_dims,) = struct.unpack_from("<I", self._map, at)
        if num_dims > _MAX_DIMS:
            self._refuse(f"tensor {name} claims {num_dims} dimensions")
        dims = struct.unpack_from(f"<{num_dims}Q", self._map, at + 4)
        at += 4 + 8 * num_dims
        type_id, offset = struct.unpack_from("<IQ", self._map, at)
        return (name, tuple(reversed(dims)), type_id, offset), at + 12

    def _text(self, at: int) -> tuple[str, int]:
        end = self._text_end(at)
        try:
            return self._map[at + 8 : end].decode("utf-8"), end
        except UnicodeDecodeError:
            self._refuse(f"the text at byte {at} is not UTF-8")

    def _text_end(self, at: int) -> int:
        (length,) = struct.unpack_from("<Q", self._map, at)
        end: int = at + 8 + length
        if end > len(self._map):
            self._refuse(f"a text of {length} bytes at byte {at} runs past the end of the file")
        return end

    def _value(self, kind: int, at: int) -> tuple[Any, int]:
        if kind in _SCALARS:
            layout = _SCALARS[kind]
            return struct.unpack_from(layout, self._map, at)[0], at + struct.calcsize(layout)
        if kind == _STRING:
            return self._text(at)
        if kind == _ARRAY:
            item, count = struct.unpack_from("<IQ", self._map, at)
            return self._array(item, count, at + 12)
        self._refuse(f"metadata at byte {at} has the unknown value type {kind}")

    def _array(self, kind: int, count: int, at: int) -> tuple[Any, int]:
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            end = at + count * dtype.itemsize
            if end > len(self._map):
                self._refuse(f"an array of {count} numbers at byte {at} runs past the end")
            return np.frombuffer(self._map, dtype, count, at).tolist(), end
        if kind == _STRING:
            lazy = _LazyStrings(at, count)
            for _ in range(count):
                at = self._text_end(at)
            return lazy, at
        items = []
        for _ in range(count):
            item, at = self._value(kind, at)
            items.append(item)
        return items, at

    def _strings(self, lazy: _LazyStrings) -> Iterator[str]:
        at = lazy.start
        for _ in range(lazy.count):
            text, at = self._text(at)
            yield text

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path} is a damaged GGUF file: {what}. Fetch it again.")


def _type_name(type_id: int) -> str:
    if type_id in PLAIN_TYPES:
        return PLAIN_TYPES[type_id]
    try:
        return str(_gguf().GGMLQuantizationType(type_id).name)
    except ValueError:
        return f"number {type_id}"


def _gguf() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise MissingExtra(
            f"reading GGUF weights needs the gguf package ({error}); install it: pip install gguf"
        ) from None
    return gguf
