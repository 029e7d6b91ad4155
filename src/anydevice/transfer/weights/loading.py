"""Loads weights from safetensors files straight onto a device, without a second full copy."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from anydevice.choose.scope import one_device
from anydevice.core.device import Device, not_driven
from anydevice.core.dtypes import DType, as_dtype
from anydevice.core.engine import Engine
from anydevice.core.files import expanded
from anydevice.core.progress import ProgressBar, in_notebook
from anydevice.engines import registry
from anydevice.errors import (
    ConfigurationError,
    TransferError,
    UnsupportedError,
)
from anydevice.memory.out_of_memory import refuse
from anydevice.transfer.staging import WORTH_STAGING, Piece, ring_of
from anydevice.transfer.weights.files import PlainFile
from anydevice.transfer.weights.safetensors import (
    Entry,
    Header,
    Placed,
    header_of,
    is_index,
    open_safetensors,
    read_index,
    source_of,
)

CHUNK = 8 * 2**20
"""Bytes that are read, and converted where a dtype is given, at a time."""
LARGE, SLOW = 100_000_000, 1.0
"""Bytes, and seconds, from which on a load shows its progress."""

Advance = Callable[[int], None]


def load_weights(
    path: str | os.PathLike[str],
    device: Device | str,
    dtype: object = None,
    *,
    progress: bool | None = None,
) -> dict[str, Any]:
    """The tensors of a safetensors model by name, on `device`, as arrays of its engine.

    `path` is one `.safetensors` file, a sharded model's index file, or a folder that holds either.
    The tensors come in the order in which the file, or the index, lists them. They are read one
    after another, so that beside the arrays themselves only one tensor is in host memory.

    With `dtype`, such as `"bfloat16"`, floating point tensors are converted to it; integers,
    booleans and complex numbers stay as they are. A number too large for the dtype is an error.

    A load of more than 100 MB or one second shows its progress on a terminal and in a
    notebook; `progress=False` never, `progress=True` from the start.

    Every header is checked before the first array is made: a damaged, incomplete or foreign file is
    a `TransferError` that names it, and so is a tensor that the engine cannot hold. A tensor for
    which there is no memory is an `OutOfMemoryError` that names it. No error keeps the arrays that
    were loaded before it. Pickles are never read.

    >>> import tempfile
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
    arrays: dict[str, Any] = dict.fromkeys(model)
    total = sum(each.entry.nbytes for each in model.values())
    with _loading(target, arrays, total, progress) as (engine, advance):
        for header, entries in _by_file(model):
            with PlainFile(header.path, header.stamp) as file:
                _load_entries(file, entries, wanted, engine, target, advance, arrays)
    return arrays


def load_file(
    file: PlainFile,
    header: Header,
    device: Device,
    dtype: DType | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """The tensors of an opened file, whose header was read from it, as `load_weights` has them.

    Raises `TransferError` if the file was changed since it was opened.
    """
    arrays: dict[str, Any] = dict.fromkeys(header.entries)
    entries = _in_file_order(header.entries.values())
    total = sum(entry.nbytes for entry in entries)
    with _loading(device, arrays, total, progress) as (engine, advance):
        _load_entries(file, entries, dtype, engine, device, advance, arrays)
    return arrays


@contextmanager
def _loading(
    device: Device, arrays: dict[str, Any], total: int, progress: bool | None
) -> Iterator[tuple[Engine, Advance]]:
    """The engine that makes the arrays, and the progress; an error leaves no array behind."""
    if device.engine is None:
        raise not_driven(device)
    try:
        with _progress(total, progress) as advance:
            yield registry.load(device.engine), advance
    except BaseException:
        arrays.clear()  # the error keeps the frames, and half a model is of use to nobody
        raise


def _load_entries(
    file: PlainFile,
    entries: Sequence[Entry],
    wanted: DType | None,
    engine: Engine,
    device: Device,
    advance: Advance,
    arrays: dict[str, Any],
) -> None:
    """Put these tensors of one file into `arrays`, on a device, and check the file once more."""
    for entry in entries:
        dtype = wanted if wanted and entry.dtype.kind == "float" else entry.dtype
        try:
            arrays[entry.name] = _place(file, entry, dtype, engine, device, advance)
        except TransferError:
            raise
        except Exception as error:  # each library refuses with errors of its own
            refuse(error, device, what=f"{file.path}: the tensor {entry.name!r}")
            raise _refused(file, entry, str(error)) from error
    file.confirm_unchanged()


def _place(
    file: PlainFile, entry: Entry, dtype: DType, engine: Engine, device: Device, advance: Advance
) -> Any:
    """One tensor of an opened file, whose header has been checked, as an array on a device."""
    if device.backend == "cuda" and dtype == entry.dtype and entry.dtype.kind != "bool":
        staged = _place_staged(file, entry, engine, device, advance)
        if staged is not None:
            return staged
    host = _read(file, entry, dtype, advance)
    # Nobody else has the memory it was read into, so NumPy needs no copy.
    return host if engine.name == "numpy" else engine.place(host, device)


def _place_staged(
    file: PlainFile, entry: Entry, engine: Engine, device: Device, advance: Advance
) -> Any:
    """A large tensor, read by several threads straight into pinned memory; else `None`."""
    ring = ring_of(device) if entry.nbytes >= WORTH_STAGING else None
    if ring is None:
        return None
    array = engine.empty(entry.shape, entry.dtype, device)
    address = engine.address(array)
    if address is None:
        return None

    def fill(buffer: int, piece: Piece) -> None:
        pinned = (ctypes.c_char * piece.size).from_address(buffer)
        file.read_into(memoryview(pinned).cast("B"), piece.host)
        advance(piece.size)

    ring.upload([Piece(entry.start, address, entry.nbytes)], fill)
    return array


def _read(file: PlainFile, entry: Entry, dtype: DType, advance: Advance) -> Any:
    """The tensor in host memory, read a chunk at a time into the array that is returned."""
    array = np.empty(entry.shape, dtype.numpy())
    flat = array.reshape(-1)
    width = entry.dtype.itemsize
    step = CHUNK // width
    as_stored = (
        None if dtype == entry.dtype else np.empty(min(step, flat.size), entry.dtype.numpy())
    )
    for first in range(0, flat.size, step):
        part = flat[first : first + step]
        stored = part if as_stored is None else as_stored[: part.size]
        file.read_into(stored.view(np.uint8).data, entry.start + first * width)
        if entry.dtype.kind == "bool" and stored.view(np.uint8).max() > 1:
            raise _refused(file, entry, "it is BOOL, and holds bytes that are neither 0 nor 1")
        if as_stored is not None and not _convert(stored, part):
            raise _refused(
                file, entry, f"it holds numbers that {dtype} cannot; load it as {entry.dtype}"
            )
        advance(stored.nbytes)
    return array


def _convert(source: Any, target: Any) -> bool:
    """Convert to the target's dtype; whether each number that was finite still is."""
    with np.errstate(all="ignore"):
        target[...] = source
    finite = np.isfinite(target)
    return bool(finite.all()) or not bool((np.isfinite(source) & ~finite).any())


def _by_file(model: Mapping[str, Placed]) -> Iterator[tuple[Header, list[Entry]]]:
    """The tensors of each file in their order, so that it is read from front to back."""
    headers = {placed.header.path: placed.header for placed in model.values()}
    entries: dict[Path, list[Entry]] = {path: [] for path in headers}
    for placed in model.values():
        entries[placed.header.path].append(placed.entry)
    for path, header in headers.items():
        yield header, _in_file_order(entries[path])


def _in_file_order(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.start)


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


def _refused(file: PlainFile, entry: Entry, problem: str) -> TransferError:
    return TransferError(f"{file.path}: the tensor {entry.name!r}: {problem}", entry.name)


@contextmanager
def _progress(total: int, wanted: bool | None) -> Iterator[Advance]:
    """A bar on a terminal or in a notebook; called with each number of new bytes.

    It appears at once for a large load and else after a while. `wanted` is true for a bar from the
    start, false for none.
    """
    shown = wanted is not False and sys.stderr is not None and sys.stderr.isatty()
    delay = 0.0 if wanted or total > LARGE else SLOW
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        bar.tell(done, total, "loading weights")

    stream, notebook = sys.stderr if shown else None, wanted is not False and in_notebook()
    with ProgressBar(stream, in_bytes=True, delay=delay, notebook=notebook) as bar:
        advance(0)
        yield advance
