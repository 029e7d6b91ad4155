"""The header of GGUF files: read as the package `gguf` reads it, and refused where it cannot be."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydevice._formats import gguf as ours
from anydevice._formats.gguf import Strings, read_gguf
from anydevice.errors import ConfigurationError, TransferError

F32, Q8_0, Q8_K = 0, 8, 15
U32, STRING, ARRAY = 4, 8, 9


def string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def number(key: str, value: int) -> bytes:
    return string(key) + struct.pack("<II", U32, value)


def strings(key: str, values: list[bytes], count: int | None = None) -> bytes:
    count = len(values) if count is None else count
    head = struct.pack("<IIQ", ARRAY, STRING, count)
    return string(key) + head + b"".join(map(string, values))


def tensor(name: str, sizes: list[int], kind: int = F32, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return string(name) + dims + struct.pack("<IQ", kind, offset)


def file(
    path: Path,
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = bytes(64),
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> Path:
    counts = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path


def test_a_header_as_the_package_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    words = ["", "a", "ü", "日本", "🚀" * 3, *(str(n) for n in range(50))]
    writer.add_array("words", words)
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, 1.5])
    writer.add_float32("eps", 0.25)
    writer.add_bool("flag", True)
    writer.add_int64("negative", -5)
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.arange(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = gguf.GGUFReader(tmp_path / "x.gguf")
    for window in (16, 40, 2**20):
        monkeypatch.setattr(ours, "_WINDOW", window)
        found = read_gguf(tmp_path / "x.gguf")
        for key, value in found.metadata.items():
            plain = list(value) if isinstance(value, Strings | np.ndarray) else value
            assert plain == theirs.fields[key].contents(), key
        assert isinstance(found.metadata["words"], Strings)
        assert found.metadata["words"][3:5] == words[3:5]
        assert found.metadata["words"][-1] == words[-1]
        assert {t.name: t.data_offset for t in theirs.tensors} == {
            name: each.start for name, each in found.tensors.items()
        }
        assert found.tensors["a"].shape == (2, 3)


ROW = [4, 2]
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an old version": ({"version": 1}, "version 1 of GGUF"),
    "the other byte order": ({"version": 3 << 24}, "version 50331648"),
    "too many tensors": ({"counts": (2**60, 0)}, "number of tensors is 1152921504606846976"),
    "too many keys": ({"counts": (0, 2**60)}, "number of keys is"),
    "more keys than there are": ({"counts": (0, 5), "data": b""}, "it ends inside|does not allow"),
    "a key twice": ({"keys": [number("k", 1), number("k", 2)]}, "'k' occurs twice"),
    "an endless string": ({"keys": [struct.pack("<Q", 2**63)]}, "length of a key is"),
    "a long key": ({"keys": [number("k" * 70000, 1)]}, "a key has 70000 bytes"),
    "an unknown type": ({"keys": [string("k") + struct.pack("<I", 77)]}, "unknown type 77"),
    "an array of arrays": (
        {"keys": [string("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1)]},
        "array of the type 9",
    ),
    "too many strings": ({"keys": [strings("k", [b"a"], 2**59)]}, "number of strings in"),
    "too many numbers": (
        {"keys": [string("k") + struct.pack("<IIQ", ARRAY, U32, 2**61)]},
        "number of elements of 'k'",
    ),
    "not UTF-8": ({"keys": [strings("k", [b"\xff"])]}, "utf-8"),
    "a character in two strings": ({"keys": [strings("k", [b"\xc3", b"\xbc"])]}, "not UTF-8"),
    "a name twice": ({"tensors": [tensor("t", ROW), tensor("t", ROW, offset=32)]}, "occurs twice"),
    "no dimensions": ({"tensors": [tensor("t", [])]}, "'t'.* has 0 dimensions"),
    "five dimensions": ({"tensors": [tensor("t", [1] * 5)]}, "'t' has 5 dimensions"),
    "an empty axis": ({"tensors": [tensor("t", [4, 0])]}, "'t' of the shape .* cannot be"),
    "a huge tensor": ({"tensors": [tensor("t", [2**31, 2**31])]}, "'t'.*(cannot be|ends behind)"),
    "an endless tensor": ({"tensors": [tensor("t", [2**40])]}, "'t' ends behind the end"),
    "half a block": ({"tensors": [tensor("t", [16], Q8_0)]}, "'t' of the shape"),
    "a type that is not read": ({"tensors": [tensor("t", [256], Q8_K)]}, "'t' has the type Q8_K"),
    "not aligned": ({"tensors": [tensor("t", ROW, offset=4)]}, "'t' .* at byte 4 cannot be"),
    "overlapping": (
        {"tensors": [tensor("s", [4, 4]), tensor("t", ROW, offset=32)]},
        "'s' and 't' share bytes",
    ),
    "an odd alignment": ({"keys": [number("general.alignment", 24)]}, "alignment is 24"),
    "no alignment": ({"keys": [number("general.alignment", 0)]}, "alignment is 0"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_is_refused(tmp_path: Path, kind: str) -> None:
    content, said = WRONG[kind]
    path = file(tmp_path / "x.gguf", **content)
    with pytest.raises(TransferError, match=said) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


def test_a_sound_file_of_that_kind_is_read(tmp_path: Path) -> None:
    keys = [number("general.alignment", 64), strings("k", ["ü".encode(), b"\xf0\x9f\x9a\x80"])]
    tensors = [tensor("s", ROW), tensor("t", ROW, offset=64)]
    path = file(tmp_path / "x.gguf", keys, tensors, bytes(96), alignment=64)
    found = read_gguf(path)
    assert list(found.metadata["k"]) == ["ü", "🚀"]
    assert found.tensors["t"].start == path.stat().st_size - 32
    assert found.expect("general.alignment", int) == 64
    with pytest.raises(ConfigurationError, match=r"x\.gguf: general\.alignment is 64"):
        found.expect("general.alignment", str)


@pytest.mark.parametrize("size", [0, 3, 4, 20, 23])
def test_a_file_that_was_cut_off_says_how_much_is_there(tmp_path: Path, size: int) -> None:
    path = file(tmp_path / "x.gguf")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(TransferError, match=rf"x\.gguf has {size} bytes.* incomplete: download it"):
        read_gguf(path)


@pytest.mark.parametrize("raw", [b"PK\x03\x04", b"GGML" + bytes(40), b"PK\x03\x04" + bytes(40)])
def test_files_of_another_kind(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    with pytest.raises(TransferError, match=r"x\.gguf is not a GGUF file"):
        read_gguf(path)
    with pytest.raises(TransferError, match="there is no file"):
        read_gguf(tmp_path / "y.gguf")
