"""Files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from anydevice.errors import TransferError

_RANDOM_BYTES = 8
"""Of the name that a file has until it is whole."""


def write_whole(path: Path, pieces: Iterable[Any]) -> None:
    """Write bytes-like pieces as one file, in place of the one that may be there.

    They go to a new file in the same folder, which takes the name only when it is on the disk. A
    process that is killed meanwhile leaves the old file as it was, and at most a hidden one, whose
    name begins with that of the file, beside it. Where the path is a symbolic link, the file that
    it leads to is replaced. Raises `TransferError` where it cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder, "numbers"), [b"one ", b"two"])
    ...     Path(folder, "numbers").read_bytes()
    b'one two'
    """
    target = _followed(path)
    try:
        new = _beside(target)
        try:
            with open(new, "xb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, target)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        _settle(target.parent)
    except OSError as error:
        raise _refusal(path, error) from error


def check_writable(path: Path) -> None:
    """Raise the `TransferError` of `write_whole` now, where the file could not be written later.

    It makes the folder where it is not there, and a file beside that one, which goes again.
    """
    target = _followed(path)
    try:
        new = _beside(target)
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
    target = _followed(path)
    left = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{{2 * _RANDOM_BYTES}}}\.part")
    if target.parent.is_dir():
        for each in target.parent.iterdir():
            if left.fullmatch(each.name):
                each.unlink(missing_ok=True)


def _followed(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _beside(target: Path) -> Path:
    """A name in the folder of a file that nobody has yet; the folder is made where it is not there.

    Files under it are opened as any others are, so that they get the rights of new files.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
    return target.parent / f".{target.name}.{secrets.token_hex(_RANDOM_BYTES)}.part"


def _refusal(path: Path, error: OSError) -> TransferError:
    return TransferError(f"{path} cannot be written: {error.strerror or error}")


def _settle(folder: Path) -> None:
    """Have the folder's new entry on the disk too, where the system can do that."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
