"""Arrays loaded from stored tensors, each straight to its place, and `load_weights`."""

from __future__ import annotations

import ctypes
import os
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import accumulate
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
from anydevice._core.quantized import QuantizedWeight
from anydevice._core.record import Record, replace
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
"""Bytes that one thread reads, and converts to another dtype, at a time."""
MOST_THREADS, WORTH_THREADS = 8, 2 * 2**20
"""Threads that read one array into host memory, and the bytes from which on that pays."""

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

    Every header is checked before the first array is made. Raises `TransferError`, with file and
    tensor, if a file is damaged, incomplete or of another format, or the engine lacks a dtype, and
    `OutOfMemoryError` if there is no memory for a tensor. No error keeps the arrays that were
    loaded before it. Pickles are never read.

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
    """Load an opened file as `load_weights` does; raises `TransferError` if it was changed."""
    arrays = {name: _alone(tensor, dtype) for name, tensor in header.entries.items()}
    return load_joined(arrays, device, progress, file)


def load_joined(
    arrays: Mapping[Key, Stored],
    device: Device,
    progress: bool | None = None,
    opened: PlainFile | None = None,
) -> dict[Key, Any]:
    """Load arrays, joined from stored tensors, in the order of the files; none if one fails."""
    if device.engine is None:
        raise not_driven(device)
    loaded: dict[Key, Any] = dict.fromkeys(arrays)
    try:
        with loading_progress(arrays, progress) as advance, OpenFiles() as files:
            if opened is not None:
                files.adopt(opened)
            engine = registry.load(device.engine)
            for key in in_file_order(arrays):
                stored = arrays[key]
                if isinstance(stored, tuple):
                    loaded[key] = tuple([place(s, files, engine, device, advance) for s in stored])
                else:
                    loaded[key] = place(stored, files, engine, device, advance)
    except BaseException:
        loaded.clear()  # the error keeps this frame, and half a model is of no use
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


def loading_progress(
    arrays: Mapping[Any, Stored], wanted: bool | None
) -> AbstractContextManager[Advance]:
    """Show the progress of a load, as `progress_in_bytes` does."""

    def total() -> int:
        return sum(part.nbytes for stored in arrays.values() for part in stored_parts(stored))

    return progress_in_bytes(total, wanted, "loading weights")


@contextmanager
def progress_in_bytes(
    count: Callable[[], int], wanted: bool | None, doing: str
) -> Iterator[Advance]:
    """Show a bar if `wanted` or slow; yield a function that takes newly read bytes of `count()`."""
    shown = wanted is not False and sys.stderr is not None and sys.stderr.isatty()
    notebook = wanted is not False and is_loaded("IPython") and in_notebook()
    if not shown and not notebook:
        yield lambda size: None
        return
    total = count()
    delay = 0.0 if wanted or total > LARGE else SLOW
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        bar.tell(done, total, doing)

    with ProgressBar(
        sys.stderr if shown else None, in_bytes=True, delay=delay, notebook=notebook
    ) as bar:
        advance(0)
        yield advance


class Segment(Record):
    """A stored tensor on its way into an array; `arrange` reorders it in host memory first."""

    tensor: StoredTensor
    arrange: Callable[[Any], Any] | None = None

    @property
    def size(self) -> int:
        return prod(self.tensor.shape)


class Joined(Record):
    """An array of its parts' elements in C order: q, k and v in one matrix, experts in a stack."""

    shape: tuple[int, ...]
    dtype: DType
    parts: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of its parts in their files."""
        return sum(part.tensor.nbytes for part in self.parts)

    def offsets(self) -> list[int]:
        """Return the number of elements in front of each part."""
        return list(accumulate((part.size for part in self.parts[:-1]), initial=0))


Quantizer = Callable[[Any], QuantizedWeight]
"""Quantizes rows of float32, (rows, columns), with one scheme."""
WriteRows = Callable[[Any, QuantizedWeight], None]
"""Takes the numbers of rows, as an index, and the rows."""


class Packed(Record):
    """A quantized weight of stacked rows: blocks of one scheme, or floats with a `quantizer`."""

    shape: tuple[int, ...]
    parts: tuple[Segment, ...]
    quantizer: Quantizer | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of its parts in their files."""
        return sum(part.tensor.nbytes for part in self.parts)

    def read(self, files: OpenFiles, advance: Advance) -> QuantizedWeight:
        """Return the weight in host memory; several threads unpack it, some rows at a time."""
        if self.parts[0].tensor.whole and self.quantizer is None:
            return self._read_whole(files, advance)
        rows, first = prod(self.shape[:-1]), self.row(files)
        arrays = {n: np.empty((rows, x.shape[-1]), x.dtype) for n, x in first.arrays.items()}

        def write(numbers: Any, weight: QuantizedWeight) -> None:
            for name, x in weight.arrays.items():
                arrays[name][numbers] = x

        self.read_rows(files, write, advance)
        return first.with_arrays(
            {name: x.reshape(*self.shape[:-1], -1) for name, x in arrays.items()}, self.shape
        )

    def _read_whole(self, files: OpenFiles, advance: Advance) -> QuantizedWeight:
        """Return the weight from parts that are unpacked as wholes, several at a time."""
        works, weights = _Works(), dict[int, QuantizedWeight]()

        def unpack(number: int, part: Segment, file: PlainFile) -> None:
            weight = part.tensor.blocks(file, 0, (part.size // self.shape[-1], self.shape[-1]))
            if part.arrange is not None:
                arrays = {name: part.arrange(x) for name, x in weight.arrays.items()}
                weight = weight.with_arrays(arrays)
            weights[number] = weight
            advance(part.tensor.nbytes)

        for number, part in enumerate(self.parts):
            works.pending.append(partial(unpack, number, part, files.of(part.tensor)))
        side_by_side(*[works.do_all] * min(MOST_THREADS, usable_cores(), len(self.parts)))
        parts: list[Mapping[str, Any]] = [weights[n].arrays for n in range(len(self.parts))]
        arrays = parts[0]
        if len(parts) > 1:
            arrays = {name: np.concatenate([part[name] for part in parts]) for name in arrays}
        return weights[0].with_arrays(
            {name: x.reshape(*self.shape[:-1], -1) for name, x in arrays.items()}, self.shape
        )

    def row(self, files: OpenFiles, number: int = 0) -> QuantizedWeight:
        """Return a row of the first part; all rows differ in their arrays only."""
        part = replace(self.parts[0], arrange=None)
        return self._rows(part, files.of(part.tensor), number, number + 1)

    def read_rows(self, files: OpenFiles, write: WriteRows, advance: Advance) -> None:
        """Call `write` with the numbers of rows, and these rows, from several threads."""
        columns, works, start = self.shape[-1], _Works(), 0
        step = max(1, CHUNK // (4 * columns))
        for part in self.parts:
            count, file = part.size // columns, files.of(part.tensor)
            numbers = np.arange(start, start + count)
            if part.arrange is not None and self.quantizer is None:  # it reorders rows
                numbers = start + np.argsort(part.arrange(numbers[:, None])[:, 0])
            whole = part.tensor.whole or (part.arrange is not None and self.quantizer is not None)
            stride = count if whole else step
            for at in range(0, count, stride):
                end = min(count, at + stride)
                own = slice(start + at, start + end) if part.arrange is None else numbers[at:end]
                work = partial(self._read_some, part, file, (at, end), own, write, advance)
                works.pending.append(work)
            start += count
        threads = min(MOST_THREADS, usable_cores(), len(works.pending))
        side_by_side(*[works.do_all] * threads)

    def _read_some(
        self, part: Segment, file: PlainFile, rows: tuple[int, int], numbers: Any,
        write: WriteRows, advance: Advance,
    ) -> None:  # fmt: skip
        write(numbers, self._rows(part, file, *rows))
        advance(part.tensor.nbytes * (rows[1] - rows[0]) * self.shape[-1] // part.size)

    def _rows(self, part: Segment, file: PlainFile, start: int, stop: int) -> QuantizedWeight:
        columns = self.shape[-1]
        if self.quantizer is None:
            weight: QuantizedWeight = part.tensor.blocks(
                file, start * columns, (stop - start, columns)
            )
            return weight
        numbers = np.empty(((stop - start), columns), np.float32)
        if part.arrange is None:
            part.tensor.read(file, numbers.reshape(-1), start * columns)
        else:
            _read_part(part, file, numbers.reshape(-1), lambda size: None)
        part.tensor.check_numbers(numbers, "a quantized weight", np.float16)
        return self.quantizer(numbers)


Stored = Joined | Packed | tuple[Joined | Packed, ...]
"""A parameter in files; the parts of a tuple have rows of different kinds, and stay apart."""


def stored_parts(stored: Stored) -> tuple[Joined | Packed, ...]:
    return stored if isinstance(stored, tuple) else (stored,)


class OpenFiles:
    """The files of a model, each opened for its first tensor; none may change during the block."""

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
        if tensor.path not in self._files:
            opened = PlainFile(tensor.path, tensor.stamp)
            self._files[tensor.path] = self._closing.enter_context(opened)
        return self._files[tensor.path]

    def adopt(self, file: PlainFile) -> None:
        """Use a file that the caller has opened, and closes."""
        self._files[file.path] = file


def place(
    joined: Joined | Packed, files: OpenFiles, engine: Engine, device: Device, advance: Advance
) -> Any:
    """Read an array, or a quantized weight, from its files onto a device."""
    try:
        if isinstance(joined, Packed):
            weight = joined.read(files, advance)
            if engine.name == "numpy":
                return weight
            return weight.with_arrays(
                {n: engine.place(x, device) for n, x in weight.arrays.items()}
            )
        if prod(joined.shape) >= WORTH_STAGING // _WIDEST:
            array = _place_straight(joined, files, engine, device, advance)
            if array is not None:
                return array
        host = np.empty(joined.shape, joined.dtype.numpy())
        _read(joined, files, host.reshape(-1), advance)
        # Nothing else refers to this memory, so NumPy needs no copy.
        return host if engine.name == "numpy" else engine.place(host, device)
    except TransferError:
        raise
    except Exception as error:  # each library has its own errors
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
        return None  # the plain copy reports the error, or narrows
    address = engine.address(array)
    if address is None:
        return None
    if ring is not None:
        _upload(joined, files, ring, address, advance)
    else:
        _read(joined, files, _memory(address, size, joined.dtype), advance)
    return array


def _memory(address: int, size: int, dtype: DType) -> Any:
    """Return the bytes at an address as a flat array."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), dtype.numpy())


def _upload(joined: Joined, files: OpenFiles, ring: Ring, address: int, advance: Advance) -> None:
    """Copy all parts to the device: together, except parts that are rearranged."""
    kind, width = joined.dtype.numpy(), joined.dtype.itemsize
    starts = [offset * width for offset in joined.offsets()]
    straight: list[Piece] = []
    for part, start in zip(joined.parts, starts, strict=True):
        file = files.of(part.tensor)  # opened here, and not by several threads at once
        if part.arrange is None and not part.tensor.whole:
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
    """Read all parts into host memory; several threads read and convert a large array."""
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
    """Tasks that threads take one by one."""

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
    """Yield the steps that read a stored tensor into memory of its size."""
    if part.arrange is not None:
        yield partial(_read_part, part, file, flat, advance)
        return
    step = CHUNK // max(flat.itemsize, part.tensor.dtype.itemsize)
    step = max(1, flat.size) if part.tensor.whole else step
    for first in range(0, flat.size, step):
        yield partial(_read_chunk, part, file, flat[first : first + step], first, advance)


def _read_chunk(part: Segment, file: PlainFile, some: Any, first: int, advance: Advance) -> None:
    part.tensor.read(file, some, first)
    advance(some.size * part.tensor.nbytes // part.size)


def _read_part(part: Segment, file: PlainFile, flat: Any, advance: Advance) -> None:
    """Read a stored tensor and rearrange it into memory of its size."""
    assert part.arrange is not None
    whole = np.empty(part.tensor.shape, part.tensor.dtype.numpy())
    for read in _reading(Segment(part.tensor), file, whole.reshape(-1), advance):
        read()
    part.tensor.convert(part.arrange(whole).reshape(-1), flat)


def in_file_order(arrays: Mapping[Any, Stored]) -> list[Any]:
    """Return the keys of arrays in the order in which their first parts lie in the files."""
    ranks: dict[Path, int] = {}
    order = []
    for number, stored in enumerate(arrays.values()):
        tensor = (stored[0] if isinstance(stored, tuple) else stored).parts[0].tensor
        order.append((ranks.setdefault(tensor.path, len(ranks)), tensor.start, number))
    keys = list(arrays)
    return [keys[number] for _, _, number in sorted(order)]
