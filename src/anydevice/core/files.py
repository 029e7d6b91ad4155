"""Atomic file writes."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anydevice.errors import TransferError

if os.name == "posix":
    import fcntl

_RANDOM_BYTES = 8
"""In the name of a file that is being written."""


def write_whole(path: Path, pieces: Iterable[Any]) -> None:
    """Write bytes-like pieces as one file, in place of the one that may be there.

    They go to a new file in the same folder, which takes the name once it is on the disk. A process
    that is killed meanwhile leaves the old file as it was, and at most a hidden file beside it. A
    file that is replaced keeps its permissions. Of a symbolic link, the target is replaced.

    Raises `TransferError` if the file cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder, "numbers"), [b"one ", b"two"])
    ...     Path(folder, "numbers").read_bytes()
    b'one two'
    """
    try:
        target = _target(path)
        _replace(target, _unused_name(target), pieces)
    except OSError as error:
        raise _refusal(path, error) from error


@contextmanager
def writing(path: Path) -> Iterator[Callable[[str], None]]:
    """A block that reads a text file, changes it, and writes it with the function it is given.

    Only one thread of one process is in it, for each folder. Where the folder cannot be locked
    (Windows, NFS) the block runs all the same, and of two writers the later one wins. The file is
    written as by `write_whole`; what a killed writer left is replaced by the next one. Raises
    `OSError` if the file cannot be written.
    """
    target = _target(path)
    if os.name != "posix":
        yield lambda text: _replace(target, _unused_name(target), [text.encode()])
        return
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            new = target.with_name(f".{target.name}.new")
        except OSError:
            new = _unused_name(target)
        yield lambda text: _replace(target, new, [text.encode()])
    finally:
        os.close(descriptor)


def check_writable(path: Path) -> None:
    """Raise the `TransferError` of `write_whole` now, where the file could not be written later.

    Makes the folder where there is none.
    """
    try:
        target = _target(path)
        new = _unused_name(target)
        try:
            open(new, "xb").close()
        finally:
            new.unlink(missing_ok=True)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise _refusal(path, error) from error


def remove_leftovers(path: Path) -> None:
    """Delete what killed writers of this file left beside it; nobody may be writing it now."""
    target = Path(os.path.realpath(path))
    left = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{{2 * _RANDOM_BYTES}}}\.part")
    if target.parent.is_dir():
        for each in target.parent.iterdir():
            if left.fullmatch(each.name):
                each.unlink(missing_ok=True)


def _target(path: Path) -> Path:
    """The file that a path leads to, in a folder that is made where there is none."""
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
    return target


def _unused_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.urandom(_RANDOM_BYTES).hex()}.part")


def _replace(target: Path, new: Path, pieces: Iterable[Any]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    # Not through a link that somebody put there; and on Windows no translation of line ends.
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(new, flags, 0o666), "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if target.exists() and (mode := _mode(target)) != _mode(new):
            os.chmod(new, mode)
        os.replace(new, target)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the folder's new entry, too, is on the disk
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def _refusal(path: Path, error: OSError) -> TransferError:
    return TransferError(f"{path} cannot be written: {error.strerror or error}")
