"""Arrays that are read from one or several stored tensors, each straight into its place."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from anydevice._arrays.memory.out_of_memory import raise_if_oom
from anydevice._arrays.stage import WORTH_STAGING, Piece, Ring, ring_of, usable_cores
from anydevice._core.device import Device
from anydevice._core.dtypes import DType
from anydevice._core.engine import Engine
from anydevice._core.locks import side_by_side
from anydevice._core.record import Record, replace
from anydevice._core.text import shortened
from anydevice._formats.files import PlainFile, Stamp
from anydevice._formats.safetensors import Entry, Header
from anydevice.errors import TransferError, UnsupportedError

CHUNK = 2 * 2**20
"""Bytes that are read, and converted where a dtype is given, at a time by one thread."""
MOST_THREADS, WORTH_THREADS = 8, 2 * 2**20
"""Threads that read one array into host memory, and the bytes from which on it is worth them."""

_WIDEST = 16
"""Bytes of the widest element, a complex128."""

Advance = Callable[[int], None]


class Stored(Protocol):
    """One tensor of a file, which can be read from any element on."""

    @property
    def name(self) -> str:
        """The name in the file."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def stamp(self) -> Stamp:
        """The state of the file that the tensor was found in."""

    @property
    def dtype(self) -> DType:
        """The dtype of its elements, unpacked."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""

    @property
    def start(self) -> int:
        """The position of the first byte in the file."""

    @property
    def nbytes(self) -> int:
        """The bytes that it has in the file."""

    def read(self, file: PlainFile, target: Any, first: int) -> None:
        """Fill a flat array with the elements from `first` on, in the array's dtype.

        `first` is a multiple of `BLOCK`. Raises `TransferError` for what the dtype cannot hold.
        """

    def row(self, number: int) -> Stored:
        """Return one row of its first axis as a tensor of its own."""


BLOCK = 256
"""Elements: a tensor can be read from each multiple of it on."""


class SafeTensor:
    """A tensor of a safetensors file."""

    def __init__(self, header: Header, entry: Entry) -> None:
        self.header, self.entry = header, entry
        self.path, self.stamp = header.path, header.stamp
        self.name, self.dtype, self.shape = entry.name, entry.dtype, entry.shape
        self.start, self.nbytes = entry.start, entry.stop - entry.start

    def read(self, file: PlainFile, target: Any, first: int) -> None:
        dtype = self.dtype.numpy()
        same = target.dtype == dtype
        stored = target if same else np.empty(target.size, dtype)
        file.read_into(stored.view(np.uint8).data, self.start + first * dtype.itemsize)
        if self.dtype.kind == "bool" and stored.size and stored.view(np.uint8).max() > 1:
            raise refusal(self, "it is BOOL, and holds bytes that are neither 0 nor 1")
        if not same:
            convert(self, stored, target)

    def row(self, number: int) -> SafeTensor:
        entry, size = self.entry, self.entry.nbytes // self.entry.shape[0]
        start = entry.start + number * size
        row = replace(entry, shape=entry.shape[1:], start=start, stop=start + size)
        return SafeTensor(self.header, row)


def convert(tensor: Stored, source: Any, target: Any) -> None:
    """Copy numbers into another dtype; one that was finite and no longer is, is an error."""
    with np.errstate(all="ignore"):
        target[...] = source
    if source.dtype == target.dtype:
        return
    finite = np.isfinite(target)
    if not finite.all() and (np.isfinite(source) & ~finite).any():
        raise refusal(
            tensor, f"it holds numbers that {target.dtype} cannot; load it as {tensor.dtype}"
        )


def refusal(tensor: Stored, problem: str) -> TransferError:
    """Return the error for a tensor that cannot be loaded."""
    return TransferError(
        f"{tensor.path}: the tensor {shortened(tensor.name)!r}: {problem}", tensor.name
    )


class Segment(Record):
    """A stored tensor on its way into an array.

    `arrange` brings it, as an array in host memory of its own dtype, into the order in which it is
    to lie there.
    """

    tensor: Stored
    arrange: Callable[[Any], Any] | None = None

    @property
    def size(self) -> int:
        """The number of its elements."""
        return prod(self.tensor.shape)


class Joined(Record):
    """An array whose elements are those of its parts, one behind the other, in C order.

    Three matrices (q, k, v) become one whose rows are theirs; matrices of equal size become a
    stack of them.
    """

    shape: tuple[int, ...]
    dtype: DType
    parts: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """The bytes that its parts have in their files."""
        total = 0
        for part in self.parts:
            total += part.tensor.nbytes
        return total

    def offsets(self) -> list[int]:
        """Return the number of elements in front of each part."""
        offsets, end = [], 0
        for part in self.parts:
            offsets.append(end)
            end += prod(part.tensor.shape)
        return offsets


class OpenFiles:
    """The files of a model, each opened when a tensor of it is first read; a context manager.

    At the end of the block without an error, each must still be what it was.
    """

    def __init__(self) -> None:
        self._files: dict[Path, PlainFile] = {}
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._closing:
            if kind is None:
                for file in self._files.values():
                    file.confirm_unchanged()

    def of(self, tensor: Stored) -> PlainFile:
        """Return the file that a tensor is in."""
        if tensor.path not in self._files:
            opened = PlainFile(tensor.path, tensor.stamp)
            self._files[tensor.path] = self._closing.enter_context(opened)
        return self._files[tensor.path]

    def adopt(self, file: PlainFile) -> None:
        """Use a file that the caller has opened, and closes."""
        self._files[file.path] = file


def place(
    joined: Joined, files: OpenFiles, engine: Engine, device: Device, advance: Advance
) -> Any:
    """Read an array from its files onto a device.

    A large one is read straight into its memory on the CPU, and on CUDA devices through pinned
    memory, by several threads. Others are one copy in host memory beside the array. Raises
    `TransferError` and `OutOfMemoryError` with the file and the tensor.
    """
    try:
        if prod(joined.shape) >= WORTH_STAGING // _WIDEST:
            array = _place_straight(joined, files, engine, device, advance)
            if array is not None:
                return array
        host = np.empty(joined.shape, joined.dtype.numpy())
        _read(joined, files, host.reshape(-1), advance)
        # The memory it was read into has no other owner, so NumPy needs no copy.
        return host if engine.name == "numpy" else engine.place(host, device)
    except TransferError:
        raise
    except Exception as error:  # each library refuses with errors of its own
        tensor = joined.parts[0].tensor
        raise_if_oom(error, device, what=f"{tensor.path}: the tensor {shortened(tensor.name)!r}")
        raise refusal(tensor, str(error)) from error


def _place_straight(
    joined: Joined, files: OpenFiles, engine: Engine, device: Device, advance: Advance
) -> Any:
    """Return a large array if the library gives out its address, else `None`."""
    size = prod(joined.shape) * joined.dtype.itemsize
    if size < WORTH_STAGING or joined.dtype.kind == "bool":
        return None
    on_host = device.backend == "cpu" and engine.name != "numpy"
    ring = ring_of(device) if device.backend == "cuda" else None
    if not (on_host or ring):
        return None
    try:
        array = engine.empty(joined.shape, joined.dtype, device)
    except UnsupportedError:
        return None  # the plain copy says what is wrong, or narrows
    address = engine.address(array)
    if address is None:
        return None
    if ring is not None:
        _upload(joined, files, ring, address, advance)
    else:
        _read(joined, files, _memory(address, size, joined.dtype), advance)
    return array


def _memory(address: int, size: int, dtype: DType) -> Any:
    """Bytes at an address as a flat array."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), dtype.numpy())


def _upload(joined: Joined, files: OpenFiles, ring: Ring, address: int, advance: Advance) -> None:
    """Bring all parts to their places on the device: those that are to be arranged one by one."""
    kind, width = joined.dtype.numpy(), joined.dtype.itemsize
    starts = [offset * width for offset in joined.offsets()]
    straight: list[Piece] = []
    for part, start in zip(joined.parts, starts, strict=True):
        file = files.of(part.tensor)  # opened here, and not by several threads at once
        if part.arrange is None:
            straight.append(Piece(start, address + start, part.size * width))
            continue
        host = np.empty(part.size, kind)
        _read_part(part, file, host, advance)
        ring.upload([Piece(host.ctypes.data, address + start, host.nbytes)])

    def fill(buffer: int, piece: Piece) -> None:
        number = bisect_right(starts, piece.host) - 1
        part = joined.parts[number]
        pinned = _memory(buffer, piece.size, joined.dtype)
        part.tensor.read(files.of(part.tensor), pinned, (piece.host - starts[number]) // width)
        advance(piece.size // width * part.tensor.nbytes // part.size)

    if straight:
        ring.upload(straight, fill)


def _read(joined: Joined, files: OpenFiles, flat: Any, advance: Advance) -> None:
    """All parts into memory of the host; several threads read and convert what is large."""
    if flat.nbytes <= min(CHUNK, WORTH_THREADS):
        end = size = 0
        file = files.of(joined.parts[0].tensor)
        for part in joined.parts:
            tensor, start = part.tensor, end
            end += prod(tensor.shape)
            if tensor.path != file.path:
                file = files.of(tensor)
            if part.arrange is not None:
                _read_part(part, file, flat[start:end], advance)
            else:
                tensor.read(file, flat[start:end], 0)
                size += tensor.nbytes
        advance(size)
        return
    works = _Works()
    for part, offset in zip(joined.parts, joined.offsets(), strict=True):
        room = flat[offset : offset + part.size]
        works.pending += _reading(part, files.of(part.tensor), room, advance)
    threads = min(MOST_THREADS, usable_cores()) if flat.nbytes > WORTH_THREADS else 1
    side_by_side(*[works.do_all] * min(threads, len(works.pending) or 1))


class _Works:
    """Work that threads take one by one."""

    def __init__(self) -> None:
        self.pending: deque[Callable[[], None]] = deque()

    def do_all(self) -> None:
        while True:
            try:
                work = self.pending.popleft()
            except IndexError:
                return
            work()


def _reading(
    part: Segment, file: PlainFile, flat: Any, advance: Advance
) -> Iterator[Callable[[], None]]:
    """Yield the steps that bring a stored tensor into memory of its size."""
    if part.arrange is not None:
        yield partial(_read_part, part, file, flat, advance)
        return
    step = CHUNK // max(flat.itemsize, part.tensor.dtype.itemsize)
    for first in range(0, flat.size, step):
        yield partial(_read_chunk, part, file, flat[first : first + step], first, advance)


def _read_chunk(part: Segment, file: PlainFile, some: Any, first: int, advance: Advance) -> None:
    part.tensor.read(file, some, first)
    advance(some.size * part.tensor.nbytes // part.size)


def _read_part(part: Segment, file: PlainFile, flat: Any, advance: Advance) -> None:
    """A stored tensor, arranged, into memory of its size."""
    assert part.arrange is not None
    whole = np.empty(part.tensor.shape, part.tensor.dtype.numpy())
    for read in _reading(Segment(part.tensor), file, whole.reshape(-1), advance):
        read()
    convert(part.tensor, part.arrange(whole).reshape(-1), flat)


def in_file_order(arrays: Mapping[Any, Joined]) -> list[Any]:
    """Return the keys of arrays in the order in which their first parts lie in the files."""
    ranks: dict[Path, int] = {}
    order = []
    for number, joined in enumerate(arrays.values()):
        tensor = joined.parts[0].tensor
        order.append((ranks.setdefault(tensor.path, len(ranks)), tensor.start, number))
    keys = list(arrays)
    return [keys[number] for _, _, number in sorted(order)]
