"""The GGUF header is read as it was written, and a damaged one is always a clear error."""

from __future__ import annotations

import contextlib
import functools
import struct
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.checkpoint.gguf_file import GgufFile
from paceline.errors import CheckpointError


@functools.cache
def whole_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return _write(Path(folder) / "x.gguf")


def written(path: Path) -> bytes:
    path.write_bytes(whole_file())
    return whole_file()


def _write(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -5)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -30000)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -7)
    writer.add_uint64("a.u64", 2**63)
    writer.add_int64("a.i64", -(2**62))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 1e300)
    writer.add_bool("a.yes", True)
    writer.add_string("a.text", "Grüße 😀")
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.texts", ["", "x", "東京"])
    writer.add_tensor("t.matrix", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("t.half", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_metadata_and_tensors_come_back_as_written(tmp_path: Path) -> None:
    written(tmp_path / "x.gguf")
    file = GgufFile(tmp_path / "x.gguf")
    assert dict(file) == {
        "general.architecture": "llama",
        "a.u8": 200,
        "a.i8": -5,
        "a.u16": 60000,
        "a.i16": -30000,
        "a.u32": 4_000_000_000,
        "a.i32": -7,
        "a.u64": 2**63,
        "a.i64": -(2**62),
        "a.f32": 0.5,
        "a.f64": 1e300,
        "a.yes": True,
        "a.text": "Grüße 😀",
        "a.numbers": [1, 2, 3],
        "a.texts": ["", "x", "東京"],
    }
    assert file.tensors["t.matrix"].shape == (3, 4)
    assert file.type_name("t.half") == "F16"
    np.testing.assert_array_equal(file.dequantise("t.matrix"), np.arange(12).reshape(3, 4))
    np.testing.assert_array_equal(file.dequantise("t.half"), np.arange(5))


def test_our_reader_and_the_packages_reader_agree(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    written(path)
    theirs = gguf.GGUFReader(path)
    ours = GgufFile(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert dict(ours) == fields
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].offset == tensor.data_offset
        assert list(reversed(ours.tensors[tensor.name].shape)) == tensor.shape.tolist()


def test_a_file_cut_anywhere_is_a_clear_error(tmp_path: Path) -> None:
    whole = written(tmp_path / "x.gguf")
    cut = tmp_path / "cut.gguf"
    end = GgufFile(tmp_path / "x.gguf").tensors["t.half"].offset + 10  # padding follows
    for length in range(end):
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            GgufFile(cut).check_tensors()


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, 900), value=st.integers(0, 255))
def test_a_damaged_byte_is_read_or_refused_but_never_crashes(
    tmp_path: Path, at: int, value: int
) -> None:
    path = tmp_path / "damaged.gguf"
    whole = bytearray(written(tmp_path / "x.gguf"))
    whole[at % len(whole)] = value
    path.write_bytes(whole)
    with contextlib.suppress(CheckpointError):
        file = GgufFile(path)
        dict(file)
        file.check_tensors()


def test_another_kind_of_file_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "zip.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="not a GGUF file: it begins with b'PK"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("version", "named"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")]
)
def test_another_version_is_refused_by_name(tmp_path: Path, version: int, named: str) -> None:
    path = tmp_path / "x.gguf"
    whole = bytearray(written(path))
    struct.pack_into("<I", whole, 4, version)
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match=f"{named} GGUF is not supported"):
        GgufFile(path)


def test_an_empty_or_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointError, match=r"empty\.gguf is empty"):
        GgufFile(tmp_path / "empty.gguf")
    with pytest.raises(CheckpointError, match="No such file"):
        GgufFile(tmp_path / "missing.gguf")
