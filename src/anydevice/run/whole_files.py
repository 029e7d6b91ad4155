"""Files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from anydevice.errors import TransferError


def write_whole(path: Path, pieces: Iterable[Any]) -> None:
    """Write bytes-like pieces as one file, in place of the one that may be there.

    They go to a new file in the same folder, which takes the name only when it is on the disk. A
    process that is killed meanwhile leaves the old file as it was, and at most a hidden one, whose
    name begins with that of the file, beside it. Raises `TransferError` where it cannot be
    written.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder, "numbers"), [b"one ", b"two"])
    ...     Path(folder, "numbers").read_bytes()
    b'one two'
    """
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            _share_like_others(Path(name))
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        _settle(folder)
    except OSError as error:
        raise TransferError(f"{path} cannot be written: {error.strerror or error}") from error


def remove_leftovers(path: Path) -> None:
    """Delete what killed writers of this file left beside it; nobody may be writing it now."""
    for left in path.parent.glob(f".{path.name}.*.part"):
        left.unlink(missing_ok=True)


def _share_like_others(path: Path) -> None:
    """Give a temporary file, which is for its owner alone, the rights that new files have."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _settle(folder: Path) -> None:
    """Have the folder's new entry on the disk too, where the system can do that."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
