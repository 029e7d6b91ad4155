"""Files written whole or not at all, read by position, and small files read within limits.

A small file is a configuration, a cache or an index, from an untrusted writer. Usage:

    try:
        values = parse_json(read_small(path))
    except OSError as error:      # not there, not an ordinary file, too large, not to be trusted
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:   # not JSON, too deep, a number too long
        raise ConfigurationError(f"{path} is not JSON: {error}") from error

Nothing else is raised, whatever the file contains. `parse_toml` is used in the same way.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from anydevice._core.locks import FolderLock, ForkSafeLock
from anydevice._core.record import Record, replace
from anydevice.errors import ConfigurationError, TransferError

if os.name == "posix":
    import fcntl

_RANDOM_BYTES = 8
"""Part of the name of a file that is being written."""

SMALL = 2**20
"""Default limit on the bytes of a small file."""

_DEEPEST = 64
_MOST_DIGITS = 300
"""Limit on the digits of an integer in a file: `float` accepts every shorter one."""

_MOST_MEMORY = 160 * 2**20
"""Limit on the bytes of a parsed JSON text."""
_BRACKET, _KEY, _COMMA = 100, 60, 70
"""Approximate bytes of each parsed element."""

_PIECE = 2048
_SQUARE = bytes.maketrans(b"{}", b"[]")
_UNMARKED = bytes(set(range(256)) - set(b"[]{}:,"))
_POSITION_LOCK = ForkSafeLock()


def expanded(path: str | os.PathLike[str]) -> Path:
    """Expand a leading `~` of a path; `ConfigurationError` if there is no such folder.

    >>> expanded("model").name
    'model'
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigurationError(
            f"{path}: there is no such home folder; write the whole path", source="path"
        ) from None


def read_small(path: str | Path, *, limit: int = SMALL, trusted: bool = False) -> bytes:
    """Return the bytes of an ordinary file of at most `limit` bytes.

    Pipes, devices and folders are refused without waiting. With `trusted`, so is a file that
    somebody else could have written: see `distrust`. Raises `OSError`; its `strerror` says why.
    """
    descriptor = open_ordinary(path)
    try:
        status = os.fstat(descriptor)
        if trusted and (why := _distrust(status, "it") or _distrust_link(path)):
            raise PermissionError(errno.EPERM, why, str(path))
        pieces, left = [], limit + 1
        while left and (piece := os.read(descriptor, min(left, 2**16))):
            pieces.append(piece)
            left -= len(piece)
    finally:
        os.close(descriptor)
    if not left:
        raise _error(f"it has more than {limit} bytes", path)
    return b"".join(pieces)


def open_ordinary(path: str | Path) -> int:
    """Return the descriptor of an ordinary file; refuse pipes and devices without waiting."""
    try:
        _check_ordinary(os.stat(path), path)  # even opening a device may have effects
        flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0))
    except ValueError:
        raise _error("its name holds a null character", path) from None
    try:
        _check_ordinary(os.fstat(descriptor), path)  # it may have been replaced meanwhile
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Stamp(Record):
    """The state of a file at one time."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int
    links: int

    def is_of(self, content: Stamp) -> bool:
        """Whether the file has the same content as when `content` was taken."""
        if self.links == content.links:
            return self == content
        # The file lost its name or got another one, which sets its time of change.
        return self == replace(content, links=self.links, changed=self.changed)


class PlainFile:
    """An ordinary file, opened for reading by position; a context manager that closes it.

    Folders, pipes and devices are refused before they are opened, because opening or reading them
    may never end. With the `stamp` of an earlier opening, so is a file that has changed since.
    `number` is the file's descriptor. Every error is a `TransferError` with the path.
    """

    def __init__(self, path: Path, stamp: Stamp | None = None) -> None:
        self.path = path
        try:
            self.number = open_ordinary(path)
        except FileNotFoundError as error:
            raise TransferError(f"there is no file {path}") from error
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            self.stamp = self._stamp_now()
            self.size = self.stamp.size
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
        """Close the file; an error of the system does not matter, since nothing was written."""
        try:  # `suppress` would need memory, which may be the error that closes the file
            os.close(self.number)
        except OSError:
            pass

    def read_into(self, buffer: memoryview, position: int) -> None:
        """Fill the buffer with the bytes from `position` on; several threads may call it."""
        filled = 0
        while filled < len(buffer):
            try:
                count = _read_at(self.number, [buffer[filled:]], position + filled)
            except OSError as error:
                raise self._unreadable(error) from error
            if not count:
                raise TransferError(
                    f"{self.path} became shorter while it was being read: it had {self.size} bytes "
                    f"and now ends at byte {position + filled}; load it again once it is complete"
                )
            filled += count

    def read(self, size: int, position: int) -> bytearray:
        buffer = bytearray(size)
        self.read_into(memoryview(buffer), position)
        return buffer

    def confirm_unchanged(self) -> None:
        """Raise if the file was written to since it was opened; replacing it does not matter."""
        if not self._stamp_now().is_of(self.stamp):
            raise self._change_error()

    def _stamp_now(self) -> Stamp:
        try:
            status = os.fstat(self.number)
        except OSError as error:
            raise self._unreadable(error) from error
        times = status.st_mtime_ns, status.st_ctime_ns
        return Stamp(status.st_dev, status.st_ino, status.st_size, *times, status.st_nlink)

    def _change_error(self) -> TransferError:
        return TransferError(
            f"{self.path} was changed while it was being read; load it again once it is complete"
        )

    def _unreadable(self, error: OSError) -> TransferError:
        return TransferError(f"{self.path} cannot be read: {error.strerror or error}")


def _read_in_turns(file: int, buffers: list[memoryview], position: int) -> int:
    """Read as `os.preadv` does, on systems without it: one thread at a time moves the position."""
    with _POSITION_LOCK.native:
        os.lseek(file, position, os.SEEK_SET)
        chunk = os.read(file, min(len(buffers[0]), 2**20))
    buffers[0][: len(chunk)] = chunk
    return len(chunk)


_read_at: Callable[[int, list[memoryview], int], int] = getattr(os, "preadv", _read_in_turns)


def distrust(path: str | Path, name: str = "it") -> str | None:
    """Return why a file or folder may be another user's; `None` if it is ours or missing.

    It is ours if it belongs to this user or to root, and not everyone may write it. Links are
    followed. `name` is used in the sentence.
    """
    try:
        return _distrust(os.stat(path), name) or _distrust_link(path)
    except (OSError, ValueError):
        return None


def parse_json(data: bytes | bytearray, *, finite: bool = True, deepest: int = _DEEPEST) -> Any:
    """Parse a JSON text in UTF-8; with `finite`, NaN and infinity are refused.

    Raises `ValueError` for any error, including nesting deeper than 64 levels, integers of more
    than 300 digits, and texts that would take far too much memory.
    """
    import json  # most programs never need the parser

    count_json(data, deepest=deepest)
    text = data.decode("utf-8")  # its error is a ValueError
    float_of = _finite if finite else float
    constant_of = _no_constant if finite else float
    try:
        return json.loads(
            text, parse_int=_integer, parse_float=float_of, parse_constant=constant_of
        )
    except json.JSONDecodeError as error:
        raise ValueError(str(error)) from None  # the original error would keep the text alive
    except RecursionError:  # the caller is itself deep in calls
        raise ValueError(_too_deep(deepest)) from None


def count_json(text: bytes | bytearray, *, deepest: int = _DEEPEST) -> tuple[int, int]:
    """Count the containers and the keys of a JSON text before it is parsed.

    Raises `ValueError` for a text that is nested too deep or would take far too much memory. The
    text need not be valid.

    >>> count_json(b'{"a": [1, "[["], "b": []}')
    (3, 2)
    """
    # One wide character makes all characters of a text wide.
    plain = text.isascii() and b"\\u" not in text
    taken = len(text) * (1 if plain else 4)
    opened = keys = 0
    brackets, inside, escape = b"", False, b""
    for at in range(0, len(text), _PIECE):
        piece = (escape + text[at : at + _PIECE]).replace(b"\\\\", b"")
        escape = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        marks = b"".join(parts[inside::2]).translate(_SQUARE, _UNMARKED)
        inside ^= len(parts) % 2 == 0
        opened += marks.count(b"[")
        keys += marks.count(b":")
        taken += marks.count(b",") * _COMMA
        if taken + opened * _BRACKET + keys * _KEY > _MOST_MEMORY:
            raise ValueError("it holds too many values, or too long a text")
        brackets = _still_open(brackets + marks.translate(None, b":,"), deepest)
    return opened, keys


def _still_open(brackets: bytes, deepest: int) -> bytes:
    """Return the unmatched brackets; each round removes the innermost pairs."""
    for _ in range(deepest + 1):
        before, brackets = brackets, brackets.replace(b"[]", b"")
        if brackets == before:
            break
    else:
        raise ValueError(_too_deep(deepest))
    if len(brackets) > deepest:
        raise ValueError(_too_deep(deepest))
    return brackets


def parse_toml(data: bytes) -> dict[str, Any]:
    """Parse a TOML text in UTF-8; raise `ValueError` for any error, as `parse_json` does."""
    import tomllib

    try:
        table = tomllib.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError(_too_deep()) from None
    _check_tree(table)
    return table


def write_whole(path: Path, pieces: Iterable[Any]) -> None:
    """Write bytes-like pieces as one file, replacing an existing one.

    The pieces go to a new file in the same folder, which is renamed once it is on the disk. A
    process that is killed meanwhile leaves the old file unchanged, and at most a hidden file beside
    it. A replaced file keeps its permissions; a read-only file is not replaced. Symbolic links are
    followed, unless the link belongs to another user.

    Raises `TransferError` if the file cannot be written.
    """
    try:
        target = _target(path)
        _replace(target, _unused_name(target), pieces)
    except OSError as error:
        raise _refusal(path, error) from error


@contextmanager
def writing(
    path: Path, *, private: bool = False, wait: float = 10.0, rights: int = 0o644
) -> Iterator[Callable[[str], None]]:
    """Lock a text file in a block that reads and changes it; yields a function that writes it.

    Only one thread of one process is in the block, for each folder. If the folder cannot be locked
    (Windows, NFS), the block still runs, and the later of two writers wins. The file is written by
    `write_whole`; leftovers of a killed writer are replaced by the next one. With `private`, a new
    folder is for this user alone, and an untrusted one is refused. Raises `OSError` if the file
    cannot be written, and after `wait` seconds `TimeoutError`, which names the process that holds
    the lock.
    """
    target = _target(path, private=private)
    if private and (why := distrust(target.parent, "its folder")):
        raise PermissionError(errno.EPERM, why, str(path))
    with FolderLock(target.parent, wait) as locked:
        new = target.with_name(f".{target.name}.new") if locked else _unused_name(target)
        new.unlink(missing_ok=True)
        yield lambda text: _replace(target, new, [text.encode()], rights=rights)


def is_there(path: Path) -> bool:
    """Whether a path exists; `TransferError` if the system cannot tell.

    >>> is_there(Path("/no/such/file"))
    False
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        raise TransferError(f"{path} cannot be read: {error.strerror or error}") from error
    return True


def check_writable(path: Path) -> None:
    """Raise now if `write_whole` would fail later; makes the folder if it is missing."""
    try:
        target = _target(path)
        new = _unused_name(target)
        try:
            open(new, "xb").close()
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise _refusal(path, error) from error


def check_folder(path: Path) -> None:
    """Raise `TransferError` if the folder of a file to be written does not exist.

    >>> check_folder(Path("/no/such/file"))
    Traceback (most recent call last):
    anydevice.errors.TransferError: /no/such/file cannot be written: there is no folder /no/such
    """
    if not path.parent.is_dir():
        raise TransferError(f"{path} cannot be written: there is no folder {path.parent}")


def remove_leftovers(path: Path) -> None:
    """Delete the remains of killed writers of this file; files that are being written stay."""
    target = Path(os.path.realpath(path))
    left = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{{2 * _RANDOM_BYTES}}}\.part")
    with suppress(OSError):
        for file in target.parent.iterdir():
            if left.fullmatch(file.name):
                with suppress(OSError):
                    _remove_abandoned(file)


def _remove_abandoned(part: Path) -> None:
    if os.name != "posix":
        part.unlink()  # Windows refuses it for a file that is open
        return
    descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its writer holds this lock
        part.unlink()
    finally:
        os.close(descriptor)


def make_folder(path: Path, *, private: bool = False) -> None:
    """Make a folder and its parents, if `private` for this user alone; or raise `OSError`."""
    missing = [path, *path.parents]
    first = next((i for i, folder in enumerate(missing) if folder.exists()), len(missing))
    for folder in reversed(missing[:first]):
        folder.mkdir(0o700 if private else 0o777, exist_ok=True)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def _target(path: Path, *, private: bool = False) -> Path:
    """Resolve the path, make its folder, and raise `OSError` if it must not be replaced."""
    try:
        target = Path(os.path.realpath(path))
    except ValueError:
        raise _error("its name holds a null character", path) from None
    if os.path.islink(path) and (why := _distrust_link(path)):
        raise PermissionError(errno.EPERM, why, str(path))
    make_folder(target.parent, private=private)
    if target.exists():
        _check_ordinary(target.stat(), path)  # replacing a device would break the system
        if not _mode(target) & 0o222:  # root ignores it
            raise PermissionError(errno.EACCES, "it is read-only", str(path))
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return target


def _unused_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.urandom(_RANDOM_BYTES).hex()}.part")


def _replace(target: Path, new: Path, pieces: Iterable[Any], *, rights: int = 0o666) -> None:
    mode = _mode(target) if target.exists() else None
    descriptor = _create_file(new, rights if mode is None else mode)
    try:
        try:
            with open(descriptor, "wb", closefd=False) as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(descriptor)
        finally:
            os.close(descriptor)  # if `open` fails, it may or may not have closed it
        if mode is not None and mode != _mode(new):
            os.chmod(new, mode)
        os.replace(new, target)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            new.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _create_file(new: Path, rights: int) -> int:
    """Create a file, locked while it is open, so that no process takes it for an abandoned one."""
    # Never through a link or into an existing file; on Windows, no translation of line ends.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    while True:
        descriptor = os.open(new, flags, rights)
        if os.name != "posix":
            return descriptor
        try:
            with suppress(OSError):  # network drives may have no locks; nothing is abandoned there
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            is_named = os.fstat(descriptor).st_nlink > 0
        except BaseException:
            os.close(descriptor)
            raise
        if is_named:
            return descriptor
        os.close(descriptor)  # it was deleted before it was locked


def _sync_folder(folder: Path) -> None:
    """Flush the folder's new entry to the disk."""
    if os.name != "posix":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return  # a folder that may be written but not read
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # drives that do not support it
            raise
    finally:
        os.close(descriptor)


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def _refusal(path: Path, error: OSError) -> TransferError:
    return TransferError(f"{path} cannot be written: {error.strerror or error}")


def _too_deep(deepest: int = _DEEPEST) -> str:
    return f"it is nested more than {deepest} levels deep"


def _error(why: str, path: str | Path) -> OSError:
    return OSError(errno.EINVAL, why, str(path))


def _check_ordinary(status: os.stat_result, path: str | Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise _error("it is not an ordinary file", path)


def _distrust(status: os.stat_result, name: str) -> str | None:
    if os.name != "posix":
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"{name} belongs to another user"
    return f"{name} may be written by everyone" if status.st_mode & stat.S_IWOTH else None


def _distrust_link(path: str | Path) -> str | None:
    status = os.lstat(path)
    if os.name != "posix" or not stat.S_ISLNK(status.st_mode):
        return None
    # Only a link's owner counts: its permissions are ignored.
    return None if status.st_uid in (os.geteuid(), 0) else "the link belongs to another user"


def _check_tree(tree: Any) -> None:
    """Apply the limits of `count_json` and `_integer` to a parser without such hooks."""
    depth, level = 0, [tree]
    while level:
        if depth > _DEEPEST:
            raise ValueError(_too_deep())
        for value in level:
            if isinstance(value, int) and abs(value) >= 10**_MOST_DIGITS:
                raise ValueError(_TOO_LONG)
        inner = (
            v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)
        )
        depth, level = depth + 1, [child for several in inner for child in several]


_TOO_LONG = f"an integer has more than {_MOST_DIGITS} digits"


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(_TOO_LONG)
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is too large for a number")
    return number


def _no_constant(text: str) -> float:
    raise ValueError(f"JSON has no {text}")
