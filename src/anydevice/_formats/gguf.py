"""GGUF files: metadata and tensors, read and checked; packed tensors are unpacked as they are read.

A file is a magic number, counts, the metadata, a table of tensors, and their bytes. Files may come
from anyone: each count and length is compared with what is left of the file before it is used,
and arrays of metadata stay packed, so that a header never takes more than about twice its bytes.
Unpacking itself is done by the package `gguf`.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, overload

import numpy as np

from anydevice._core.dtypes import DTYPES, DType
from anydevice._core.record import Record, replace
from anydevice._core.text import shortened
from anydevice._formats.files import PlainFile, Stamp
from anydevice._formats.join import convert
from anydevice.errors import ConfigurationError, TransferError, UnsupportedError

MAGIC = b"GGUF"
LONGEST_KEY, LONGEST_NAME = 2**16 - 1, 255
MOST_DIMENSIONS = 4
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_AGAIN = "it is damaged or incomplete: download it again"
_WINDOW = 2**20
_SMALLEST = 24
"""Bytes of the magic number, the version and the numbers of tensors and keys."""
_SIZE = struct.Struct("<Q")

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBERS |= {12: "d"}


class Packing(Record):
    """How tensors of one type are stored: elements and bytes of a block, and their dtype."""

    name: str
    elements: int
    bytes: int
    dtype: DType = DTYPES["float32"]


PACKINGS = {
    0: Packing("F32", 1, 4),
    1: Packing("F16", 1, 2, DTYPES["float16"]),
    2: Packing("Q4_0", 32, 18),
    3: Packing("Q4_1", 32, 20),
    8: Packing("Q8_0", 32, 34),
    12: Packing("Q4_K", 256, 144),
    13: Packing("Q5_K", 256, 176),
    14: Packing("Q6_K", 256, 210),
    30: Packing("BF16", 1, 2, DTYPES["bfloat16"]),
}
"""The types of tensors that are read, by the format's number for them."""

_OTHERS = {6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 39: "MXFP4"}
_OTHERS |= {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"}
_OTHERS |= {22: "IQ2_S", 23: "IQ4_XS"}
_OTHERS |= {24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M"}


class Strings(Sequence[str]):
    """A list of strings that stay packed, as they are in the file, until one is asked for."""

    def __init__(self, text: bytes, ends: Any) -> None:
        self._text, self._ends = text, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(index)
        start = int(self._ends[number - 1]) if number else 0
        return self._text[start : int(self._ends[number])].decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self._ends:
            yield self._text[start:end].decode("utf-8")
            start = int(end)


class GgufTensor(Record):
    """A tensor of a GGUF file, which is read unpacked; its last axis is the one that is packed."""

    name: str
    path: Path
    stamp: Stamp
    shape: tuple[int, ...]
    packing: Packing
    start: int

    @property
    def dtype(self) -> DType:
        return self.packing.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.packing.elements * self.packing.bytes

    def read(self, file: PlainFile, target: Any, first: int) -> None:
        each = self.packing
        count = -(-target.size // each.elements)
        raw = np.empty(count * each.bytes, np.uint8)
        file.read_into(raw.data, self.start + first // each.elements * each.bytes)
        plain = each.elements == 1
        values = raw.view(each.dtype.numpy()) if plain else _unpacked(raw, each.name)
        convert(self, values[: target.size], target)

    def row(self, number: int) -> GgufTensor:
        start = self.start + number * (self.nbytes // self.shape[0])
        return replace(self, shape=self.shape[1:], start=start)

    def as_matrix(self) -> GgufTensor:
        """A vector as a matrix of one row."""
        return replace(self, shape=(1, *self.shape))


class GgufFile(Record):
    """The header of a file: metadata and tensors by name; `stamp` is the state of the file."""

    path: Path
    stamp: Stamp
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def expect(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A value of the metadata, which must have this type where it is there."""
        value = self.metadata.get(key, default)
        wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind in (int, float))
        if value is not default and wrong:
            raise ConfigurationError(
                f"{self.path}: {key} is {shortened(repr(value))}, which is not valid; {_AGAIN}",
                str(self.path),
            )
        return value


def read_gguf(path: Path) -> GgufFile:
    """The checked header of a file.

    Raises `TransferError`, with the file's path and the key or tensor, for everything that is
    wrong: each tensor that is returned lies inside the file, has a type that can be unpacked, and
    shares no byte with another.
    """
    with PlainFile(path) as file:
        try:
            return _read(file)
        except (UnicodeDecodeError, struct.error, _DamagedError) as error:
            raise TransferError(f"{path}: {error}; {_AGAIN}") from error


class _DamagedError(ValueError):
    """The header says what cannot be."""


class _Cursor:
    """Reads a file from front to back through a window."""

    def __init__(self, file: PlainFile) -> None:
        self._file = file
        self._window = bytearray()
        self._start = self._at = 0

    @property
    def position(self) -> int:
        return self._start + self._at

    @property
    def left(self) -> int:
        return self._file.size - self.position

    def take(self, size: int, what: str) -> bytearray:
        if size > self.left:
            raise _DamagedError(f"it ends inside {what}, which has {size} bytes")
        if self._at + size > len(self._window):
            self._start, self._at = self.position, 0
            wanted = min(max(size, _WINDOW), self._file.size - self._start)
            self._window = self._file.read(wanted, self._start)
        found = self._window[self._at : self._at + size]
        self._at += size
        return found

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def count(self, least: int, what: str) -> int:
        """A number of things of which each takes at least so many bytes."""
        found = int(self.number("Q", what))
        if found > self.left // least:
            raise _DamagedError(f"it says that {what} is {found}, which its size does not allow")
        return found

    def strings_within(self, most: int, text: bytearray) -> list[int]:
        """The sizes of the next strings, which are appended, as far as all of them is at hand."""
        window, at, end = self._window, self._at, len(self._window)
        sizes: list[int] = []
        while len(sizes) < most and at + 8 <= end:
            (size,) = _SIZE.unpack_from(window, at)
            if size > end - at - 8:
                break
            text += window[at + 8 : at + 8 + size]
            sizes.append(size)
            at += 8 + size
        self._at = at
        return sizes

    def string(self, what: str, most: int | None = None) -> str:
        size = self.count(1, f"the length of {what}")
        if most is not None and size > most:
            raise _DamagedError(f"{what} has {size} bytes; at most {most} are allowed")
        return self.take(size, what).decode("utf-8")


def _read(file: PlainFile) -> GgufFile:
    cursor = _Cursor(file)
    if not MAGIC.startswith(bytes(cursor.take(min(4, file.size), "its magic number"))):
        raise TransferError(f"{file.path} is not a GGUF file: it does not begin with {MAGIC!r}")
    if file.size < _SMALLEST:
        raise TransferError(
            f"{file.path} has {file.size} bytes, and a GGUF file has at least {_SMALLEST}; "
            "it is incomplete: download it again"
        )
    version = cursor.number("I", "its version")
    if version not in _VERSIONS:
        raise TransferError(
            f"{file.path} is version {version} of GGUF, and versions 2 and 3, little-endian, "
            "are read; convert the model again with a current llama.cpp"
        )
    count = cursor.count(24, "the number of tensors")
    metadata = _metadata(cursor)
    table = [_entry(cursor) for _ in range(count)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise _DamagedError(f"its alignment is {shortened(repr(alignment))}")
    base = -(-cursor.position // alignment) * alignment
    tensors = _tensors(file, table, base, alignment)
    return GgufFile(file.path, file.stamp, metadata, tensors)


def _metadata(cursor: _Cursor) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count(13, "the number of keys")):
        key = cursor.string("a key", LONGEST_KEY)
        if key in metadata:
            raise _DamagedError(f"the key {shortened(key)!r} occurs twice")
        metadata[key] = _value(cursor, key)
    return metadata


def _value(cursor: _Cursor, key: str) -> Any:
    what = f"the value of {shortened(key)!r}"
    kind = cursor.number("I", what)
    if kind in _NUMBERS:
        return cursor.number(_NUMBERS[kind], what)
    if kind == _STRING:
        return cursor.string(what)
    if kind != _ARRAY:
        raise _DamagedError(f"{what} has the unknown type {kind}")
    kind = cursor.number("I", what)
    if kind in _NUMBERS:
        dtype = np.dtype(f"<{_NUMBERS[kind]}") if kind != _BOOL else np.dtype(np.bool_)
        count = cursor.count(dtype.itemsize, f"the number of elements of {shortened(key)!r}")
        return np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype)
    if kind == _STRING:
        return _strings(cursor, what)
    raise _DamagedError(f"{what} is an array of the type {kind}, which is not read")


def _strings(cursor: _Cursor, what: str) -> Strings:
    count = cursor.count(8, f"the number of strings in {what}")
    text, sizes = bytearray(), np.empty(count, np.int64)
    done = 0
    while done < count:
        some = cursor.strings_within(count - done, text)
        if not some:  # one that reaches beyond what is read at once
            some = [cursor.count(1, f"the length of a string in {what}")]
            text += cursor.take(some[0], what)
        sizes[done : done + len(some)] = some
        done += len(some)
    ends = np.cumsum(sizes)
    text.decode("utf-8")
    inner = ends[ends < len(text)]
    if (np.frombuffer(text, np.uint8)[inner] & 0xC0 == 0x80).any():
        raise _DamagedError(f"{what} has strings that are not UTF-8")
    return Strings(bytes(text), ends)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """The name, the shape, the type and the offset of one tensor."""
    name = cursor.string("the name of a tensor", LONGEST_NAME)
    what = f"the entry of the tensor {shortened(name)!r}"
    axes = cursor.number("I", what)
    if not 1 <= axes <= MOST_DIMENSIONS:
        raise _DamagedError(f"the tensor {shortened(name)!r} has {axes} dimensions")
    sizes = struct.unpack(f"<{axes}Q", cursor.take(8 * axes, what))
    return name, sizes[::-1], cursor.number("I", what), cursor.number("Q", what)


def _tensors(
    file: PlainFile, table: list[tuple[str, tuple[int, ...], int, int]], base: int, alignment: int
) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in table:
        said = f"the tensor {shortened(name)!r}"
        if name in tensors:
            raise _DamagedError(f"{said} occurs twice")
        packing = PACKINGS.get(kind)
        if packing is None:
            known = ", ".join(each.name for each in PACKINGS.values())
            called = _OTHERS.get(kind, f"number {kind}")
            raise TransferError(
                f"{file.path}: {said} has the type {called}, which is not read; "
                f"types that are: {known}",
                name,
            )
        if 0 in shape or prod(shape) >= 2**62 or shape[-1] % packing.elements or offset % alignment:
            raise _DamagedError(f"{said} of the shape {shape} at byte {offset} cannot be")
        tensor = GgufTensor(name, file.path, file.stamp, shape, packing, base + offset)
        if tensor.start + tensor.nbytes > file.size:
            raise _DamagedError(f"{said} ends behind the end of the file")
        tensors[name] = tensor
    _refuse_overlaps(tensors)
    return tensors


def _refuse_overlaps(tensors: Mapping[str, GgufTensor]) -> None:
    reached, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda each: each.start):
        if tensor.start < reached:
            raise _DamagedError(f"the tensors {before!r} and {tensor.name!r} share bytes")
        reached, before = tensor.start + tensor.nbytes, tensor.name


def _unpacked(raw: Any, name: str) -> Any:
    """Blocks of a type as float32."""
    gguf = unpacker()
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])


def unpacker() -> Any:
    """The package that unpacks; raises `UnsupportedError` if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedError(
            "packed GGUF files need the package gguf, which is not installed; "
            "run: pip install 'anydevice[llm]'"
        ) from error
    return gguf
