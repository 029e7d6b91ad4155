"""Arrays loaded from stored tensors, each straight to its place, and `load_weights`."""

from __future__ import annotations

import ctypes
import os
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from anydevice._arrays.memory.out_of_memory import raise_if_oom
from anydevice._arrays.stage import WORTH_STAGING, Piece, Ring, ring_of, usable_cores
from anydevice._core.device import Device, not_driven
from anydevice._core.dtypes import DType, as_dtype
from anydevice._core.engine import Engine
from anydevice._core.files import PlainFile, expanded
from anydevice._core.hooks import is_loaded
from anydevice._core.locks import side_by_side
from anydevice._core.progress import ProgressBar, in_notebook
from anydevice._core.record import Record
from anydevice._core.text import shortened
from anydevice._formats.safetensors import (
    Header,
    SafeTensor,
    StoredTensor,
    header_of,
    is_index,
    open_safetensors,
    read_index,
    source_of,
)
from anydevice._machine.choose.scope import one_device
from anydevice._machine.engines import registry
from anydevice.errors import ConfigurationError, TransferError, UnsupportedError

LARGE, SLOW = 100_000_000, 1.0
"""Bytes, and seconds, from which on a load shows its progress."""

CHUNK = 2 * 2**20
"""Bytes that are read, and converted where a dtype is given, at a time by one thread."""
MOST_THREADS, WORTH_THREADS = 8, 2 * 2**20
"""Threads that read one array into host memory, and the bytes from which on it is worth them."""

_WIDEST = 16
"""Bytes of the widest element, a complex128."""

Advance = Callable[[int], None]

Key = TypeVar("Key")


def load_weights(
    path: str | os.PathLike[str],
    device: Device | str,
    dtype: object = None,
    *,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Load the tensors of a safetensors model onto `device`, by name.

    `path` is one `.safetensors` file, a sharded model's index file, or a folder that holds either.
    The tensors come in the order in which the file, or the index, lists them. They are read one
    after another, so that beside the arrays themselves only one tensor is in host memory.

    With `dtype`, such as `"bfloat16"`, floating point tensors are converted to it; integers,
    booleans and complex numbers stay as they are. A number too large for the dtype is an error.

    A load of more than 100 MB or one second shows its progress on a terminal and in a notebook;
    `progress=False` turns that off, `progress=True` shows it from the start.

    Every header is checked before the first array is made: a damaged, incomplete or foreign file is
    a `TransferError` that names it, and so is a tensor that the engine cannot hold. A tensor for
    which there is no memory is an `OutOfMemoryError` that names it. No error keeps the arrays that
    were loaded before it. Pickles are never read.

    >>> import tempfile
    >>> from pathlib import Path
    >>> header = b'{"bias": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}'
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "tiny.safetensors")
    ...     _ = path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    ...     load_weights(path, "cpu", "float32")
    {'bias': array([0., 0.], dtype=float32)}
    """
    wanted = _float_dtype(dtype)
    target = device if isinstance(device, Device) and device.usable else one_device(device)
    if sys.byteorder != "little":
        raise UnsupportedError("safetensors files are little-endian, and this machine is not")
    source = source_of(expanded(path))
    if not is_index(source):
        with open_safetensors(source) as file:
            return load_file(file, header_of(file), target, wanted, progress)
    model = read_index(source)
    arrays = {name: _alone(tensor, wanted) for name, tensor in model.items()}
    return load_joined(arrays, target, progress)


def load_file(
    file: PlainFile,
    header: Header,
    device: Device,
    dtype: DType | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Load the tensors of an opened file, whose header was read, as `load_weights` does.

    Raises `TransferError` if the file was changed since it was opened.
    """
    arrays = {name: _alone(tensor, dtype) for name, tensor in header.entries.items()}
    return load_joined(arrays, device, progress, file)


def load_joined(
    arrays: Mapping[Key, Joined],
    device: Device,
    progress: bool | None = None,
    opened: PlainFile | None = None,
) -> dict[Key, Any]:
    """Arrays on a device, each joined from stored tensors, under the keys that they are given.

    They are read one after another, in the order of the files; `opened` is a file that the caller
    has opened. An error leaves no array behind.
    """
    if device.engine is None:
        raise not_driven(device)
    loaded: dict[Key, Any] = dict.fromkeys(arrays)
    try:
        with _progress(arrays, progress) as advance, OpenFiles() as files:
            if opened is not None:
                files.adopt(opened)
            engine = registry.load(device.engine)
            for key in in_file_order(arrays):
                loaded[key] = place(arrays[key], files, engine, device, advance)
    except BaseException:
        loaded.clear()  # the error keeps the frames, and half a model is of no use
        raise
    return loaded


def _alone(tensor: SafeTensor, wanted: DType | None) -> Joined:
    """Return an array of one tensor; `wanted` is the dtype of a floating one."""
    dtype = wanted if wanted and tensor.dtype.kind == "float" else tensor.dtype
    return Joined(tensor.shape, dtype, (Segment(tensor),))


def _float_dtype(dtype: object) -> DType | None:
    if dtype is None:
        return None
    wanted = as_dtype(dtype)
    if wanted.kind != "float" or wanted.packed:
        raise ConfigurationError(
            f"weights cannot be loaded as {wanted}: dtype is that of floating point tensors, such "
            "as 'bfloat16', 'float16' or 'float32'; all others keep their own"
        )
    return wanted


@contextmanager
def _progress(arrays: Mapping[Any, Joined], wanted: bool | None) -> Iterator[Advance]:
    """Return a bar on a terminal or in a notebook; called with each number of new bytes.

    It appears at once for a large load and else after a while. `wanted` is true for a bar from the
    start, false for none.
    """
    shown = wanted is not False and sys.stderr is not None and sys.stderr.isatty()
    notebook = wanted is not False and is_loaded("IPython") and in_notebook()
    if not shown and not notebook:
        yield _show_nothing
        return
    total = sum(joined.nbytes for joined in arrays.values())
    delay = 0.0 if wanted or total > LARGE else SLOW
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        bar.tell(done, total, "loading weights")

    with ProgressBar(
        sys.stderr if shown else None, in_bytes=True, delay=delay, notebook=notebook
    ) as bar:
        advance(0)
        yield advance


def _show_nothing(size: int) -> None:
    """Ignore progress: there is no terminal and no notebook."""


class Segment(Record):
    """A stored tensor on its way into an array.

    `arrange` brings it, as an array in host memory of its own dtype, into the order in which it is
    to lie there.
    """

    tensor: StoredTensor
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

    def of(self, tensor: StoredTensor) -> PlainFile:
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
        raise tensor.error(str(error)) from error


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
    part.tensor.convert(part.arrange(whole).reshape(-1), flat)


def in_file_order(arrays: Mapping[Any, Joined]) -> list[Any]:
    """Return the keys of arrays in the order in which their first parts lie in the files."""
    ranks: dict[Path, int] = {}
    order = []
    for number, joined in enumerate(arrays.values()):
        tensor = joined.parts[0].tensor
        order.append((ranks.setdefault(tensor.path, len(ranks)), tensor.start, number))
    keys = list(arrays)
    return [keys[number] for _, _, number in sorted(order)]
