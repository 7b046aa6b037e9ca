"""Opens the weight files of a checkpoint: safetensors, PyTorch and GGUF. Tensors are on the CPU.

models/reader decides in which format a tensor is kept.
"""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from paceline.checkpoint.gguf_weights import GgufWeights
from paceline.checkpoint.source import ModelFiles
from paceline.errors import CheckpointError, nearest
from paceline.models.fp8_weights import Fp8Weights
from paceline.models.quantised_config import fp8_scheme
from paceline.models.sharding import Cut
from paceline.models.weight_source import RenamedWeights, WeightSource

logger = logging.getLogger(__name__)

T = TypeVar("T")
_HALF = {"F16": torch.float16, "BF16": torch.bfloat16}


class Weights(WeightSource, Protocol):
    """The tensors of opened files."""

    def close(self) -> None: ...


def open_weights(files: ModelFiles, load_format: str = "auto") -> Weights:
    """Open what `locate` found with this `load_format`. Dummy weights have no files."""
    if load_format == "dummy" or not files.weight_files:
        raise CheckpointError(
            f"{files.name} was located without weights (load format {load_format!r}), so there are "
            "none to open."
        )
    if files.gguf is not None:
        return _TorchGguf(GgufWeights(files.gguf, files.config))
    is_safe = files.weight_files[0].suffix == ".safetensors"
    stored: Weights = (_SafetensorsWeights if is_safe else _PickledWeights)(files.weight_files)
    scheme = fp8_scheme(files.config)
    if scheme is not None:
        stored = Fp8Weights(stored, scheme)
        for note in scheme.notes:
            logger.info("%s: %s", files.name, note)
    plain = {_plain(name): name for name in stored.names()}
    return _TextWeights(stored, plain) if set(plain) != stored.names() else stored


def _plain(name: str) -> str:
    """A tensor's name in a model for text alone. One that also reads images has a prefix."""
    for prefix, short in (("model.language_model.", "model."), ("language_model.", "")):
        if name.startswith(prefix):
            return short + name.removeprefix(prefix)
    return name


@dataclass(frozen=True, slots=True)
class _TextWeights(RenamedWeights):
    source: Weights

    def close(self) -> None:
        self.source.close()


class _SafetensorsWeights:
    """Memory-mapped: a tensor is read from disk when it is used."""

    def __init__(self, paths: list[Path]) -> None:
        # The package's own types are incomplete.
        self._opened: list[Any] = []
        self._file_of: dict[str, Any] = {}
        self._where = str(paths[0] if len(paths) == 1 else paths[0].parent)
        for path in paths:
            try:
                file: Any = safe_open(str(path), framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise _damaged(path, "safetensors", error) from None
            self._opened.append(file)
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._of(name).get_slice(name).get_shape())

    def load(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        if cut is None:
            tensor: torch.Tensor = self._of(name).get_tensor(name)
            return tensor
        stored = self._of(name).get_slice(name)
        return cut.joined([stored[x] for x in cut.slices()])

    def blocks(self, name: str, cut: Cut | None = None) -> None:
        return None

    def close(self) -> None:
        for file in self._opened:
            file.__exit__(None, None, None)
        self._opened.clear()
        self._file_of.clear()

    def _of(self, name: str) -> Any:
        return _lookup(self._file_of, name, self._where)


class _PickledWeights:
    """pytorch_model.bin files. Only tensors are unpickled: a file cannot run code."""

    def __init__(self, paths: list[Path]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._where = str(paths[0] if len(paths) == 1 else paths[0].parent)
        for path in paths:
            state = _load_pickle(path)
            if not isinstance(state, dict):
                raise CheckpointError(
                    f"{path} holds a {type(state).__name__}, not a dictionary of tensors."
                )
            tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
            self._tensors.update(tensors)

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(_lookup(self._tensors, name, self._where).shape)

    def load(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        mapped = _lookup(self._tensors, name, self._where)
        return (mapped if cut is None else cut.of(mapped)).contiguous()

    def blocks(self, name: str, cut: Cut | None = None) -> None:
        return None

    def close(self) -> None:
        self._tensors.clear()


def _load_pickle(path: Path) -> Any:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            # Files written before torch 1.6 are not zip archives and cannot be mapped.
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} is damaged or holds more than tensors, and Paceline runs no code from a "
            f"checkpoint ({reason}). Fetch it again, or take the safetensors version."
        ) from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, "PyTorch", error) from None


class _TorchGguf:
    """Memory-mapped; each tensor is dequantised when it is loaded."""

    def __init__(self, weights: GgufWeights) -> None:
        self._weights = weights

    def names(self) -> set[str]:
        return self._weights.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def load(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        raw = self._raw(name, cut)
        if raw is None:
            assert cut is not None
            return cut.of(self.load(name)).contiguous()
        shape = self.shape(name) if cut is None else cut.shape(self.shape(name))
        dtype = _HALF.get(self._weights.kind(name))
        if dtype is not None:
            return torch.from_numpy(raw.copy()).view(dtype).reshape(shape)
        values = self._weights.numbers(name, raw).reshape(shape)
        if not values.flags.writeable:  # float32 tensors are views of the file
            values = values.copy()
        return torch.from_numpy(values)

    def blocks(self, name: str, cut: Cut | None = None) -> tuple[str, torch.Tensor] | None:
        kind = self._weights.kind(name)
        if kind == "F32" or kind in _HALF:
            return None
        raw = self._raw(name, cut)
        return None if raw is None else (kind, torch.from_numpy(raw.copy()))

    def _raw(self, name: str, cut: Cut | None) -> npt.NDArray[np.uint8] | None:
        """The stored bytes; None if the tensor is not a matrix or the cut divides a block."""
        if cut is None:
            return self._weights.raw(name)
        if len(self.shape(name)) != 2:
            return None
        if cut.dim == 0:
            return np.concatenate([self._weights.raw(name, x) for x in cut.ranges])
        count, size = self._weights.block(name)
        if any(x % count for ends in cut.ranges for x in ends):
            return None
        rows, ranges = self._weights.raw(name), cut.ranges
        parts = [rows[:, a // count * size : b // count * size] for a, b in ranges]
        return np.concatenate(parts, axis=1)

    def close(self) -> None:
        pass  # the file is unmapped when its last array is freed


def _lookup(table: dict[str, T], name: str, where: str) -> T:
    found = table.get(name)
    if found is None:
        hint = nearest(name, table)
        raise CheckpointError(
            f"{where} holds no tensor named {name} (it holds {len(table)}).{hint}"
        )
    return found


def _damaged(path: Path, kind: str, error: Exception) -> CheckpointError:
    size = path.stat().st_size if path.exists() else 0
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return CheckpointError(
        f"{path} ({size} bytes) is a damaged {kind} file: {reason}. It may be truncated; fetch it "
        "again."
    )
