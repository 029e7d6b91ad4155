"""Loads weights from safetensors files straight onto a device, without a second full copy."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from anydevice._core.device import Device, not_driven
from anydevice._core.dtypes import DType, as_dtype
from anydevice._core.files import expanded
from anydevice._core.progress import ProgressBar, in_notebook
from anydevice._formats.files import PlainFile
from anydevice._formats.join import (
    Advance,
    Joined,
    OpenFiles,
    SafeTensor,
    Segment,
    in_file_order,
    place,
)
from anydevice._formats.safetensors import (
    Entry,
    Header,
    header_of,
    is_index,
    open_safetensors,
    read_index,
    source_of,
)
from anydevice._machine.choose.scope import one_device
from anydevice._machine.engines import registry
from anydevice.errors import ConfigurationError, UnsupportedError

LARGE, SLOW = 100_000_000, 1.0
"""Bytes, and seconds, from which on a load shows its progress."""

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
    arrays = {name: _alone(*weight, wanted) for name, weight in model.items()}
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
    arrays = {name: _alone(header, entry, dtype) for name, entry in header.entries.items()}
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


def _alone(header: Header, entry: Entry, wanted: DType | None) -> Joined:
    """Return an array of one tensor."""
    dtype = wanted if wanted and entry.dtype.kind == "float" else entry.dtype
    return Joined(entry.shape, dtype, (Segment(SafeTensor(header, entry)),))


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
    notebook = wanted is not False and in_notebook()
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
