"""A file that several threads read by position, and that must not change meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from anydevice._core.files import open_ordinary
from anydevice._core.locks import ForkSafeLock
from anydevice._core.record import Record, replace
from anydevice.errors import TransferError

_LOCK = ForkSafeLock()


class Stamp(Record):
    """One state of a file, to be compared with another."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int
    links: int

    def is_of(self, content: Stamp) -> bool:
        """Whether the file still has the content that it had then."""
        if self.links == content.links:
            return self == content
        # Another file took its name, or it got one more: its time of change says nothing now.
        return self == replace(content, links=self.links, changed=self.changed)


class PlainFile:
    """An ordinary file, opened for reading by position; a context manager that closes it.

    Folders, pipes and devices are refused before they are opened, because opening or reading them
    may never end. Given the `stamp` of an earlier opening, a file that is no longer the same is
    refused, too. Every error is a `TransferError` with the file's path.
    """

    def __init__(self, path: Path, stamp: Stamp | None = None) -> None:
        self.path = path
        try:
            self._file = open_ordinary(path)
        except FileNotFoundError as error:
            raise TransferError(f"there is no file {path}") from error
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            self.stamp = self._stamp_now()
            if stamp is not None and not self.stamp.is_of(stamp):
                raise self._change_error()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was read from it is right, whatever the system says then."""
        try:  # without memory, too
            os.close(self._file)
        except OSError:
            pass

    @property
    def number(self) -> int:
        """The system's number of the opened file."""
        return self._file

    @property
    def size(self) -> int:
        """The file's bytes when it was opened."""
        return self.stamp.size

    def read_into(self, buffer: memoryview, position: int) -> None:
        """Fill the whole buffer with the bytes from `position` on. Threads may do so at once."""
        filled = 0
        while filled < len(buffer):
            try:
                got = _read(self._file, buffer[filled:], position + filled)
            except OSError as error:
                raise self._unreadable(error) from error
            if not got:
                raise TransferError(
                    f"{self.path} became shorter while it was being read: it had {self.size} bytes "
                    f"and now ends at byte {position + filled}; load it again once it is complete"
                )
            filled += got

    def read(self, size: int, position: int) -> bytearray:
        """`size` bytes from `position` on."""
        buffer = bytearray(size)
        self.read_into(memoryview(buffer), position)
        return buffer

    def confirm_unchanged(self) -> None:
        """Raise where the file was written to since it was opened.

        A file that was replaced by another one can still be read by those who have it open.
        """
        if not self._stamp_now().is_of(self.stamp):
            raise self._change_error()

    def _stamp_now(self) -> Stamp:
        try:
            status = os.fstat(self._file)
        except OSError as error:
            raise self._unreadable(error) from error
        return Stamp(
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_nlink,
        )

    def _change_error(self) -> TransferError:
        return TransferError(
            f"{self.path} was changed while it was being read; load it again once it is complete"
        )

    def _unreadable(self, error: OSError) -> TransferError:
        return TransferError(f"{self.path} cannot be read: {error.strerror or error}")


def _read_by_position(file: int, buffer: memoryview, position: int) -> int:
    return os.preadv(file, [buffer], position)


def _read_in_turns(file: int, buffer: memoryview, position: int) -> int:
    """Return the same on systems without `preadv`: one thread at a time moves the file position."""
    with _LOCK.native:
        os.lseek(file, position, os.SEEK_SET)
        chunk = os.read(file, min(len(buffer), 2**20))
    buffer[: len(chunk)] = chunk
    return len(chunk)


_read: Callable[[int, memoryview, int], int] = (
    _read_by_position if hasattr(os, "preadv") else _read_in_turns
)
