"""Files of ours: where they are, and writing them whole or not at all."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

if os.name == "posix":
    import fcntl

FILE_NAME = "anydevice.toml"

_hidden: set[Path] = set()


def user_file() -> Path:
    """The user's settings; in `ANYDEVICE_HOME` where that is set."""
    return _home("user_config_dir") / FILE_NAME


def project_file(start: Path | None = None) -> Path | None:
    """The nearest `anydevice.toml` in the working directory or above it; `None` without one.

    A file that belongs to another user (but not to root) is passed over with a warning: anyone
    may put one into a shared folder such as `/tmp`.
    """
    try:
        folder = (start or Path.cwd()).resolve()
    except OSError:  # the working directory was deleted under us
        return None
    mine = user_file()
    for place in (folder, *folder.parents):
        candidate = place / FILE_NAME
        if candidate != mine and candidate not in _hidden and _is_ours(candidate):
            return candidate
    return None


@contextmanager
def hidden(path: Path | None) -> Iterator[None]:
    """A block in which there is no such project file, for tests; one that is made in it counts."""
    if path is None or path in _hidden:
        yield
        return
    _hidden.add(path)
    try:
        yield
    finally:
        _hidden.discard(path)


def _is_ours(path: Path) -> bool:
    try:
        owner = path.lstat().st_uid
    except OSError:  # there is none, or its folder may not be entered
        return False
    if os.name != "posix" or owner in (os.geteuid(), 0):
        return True
    warnings.warn(
        f"{path} belongs to another user and is not obeyed; to use it, make it yours",
        stacklevel=2,
    )
    return False


def verdicts_file() -> Path:
    """Where the verdicts of past checks are kept."""
    return _home("user_cache_dir") / "verdicts.json"


def compiled_folder(engine: str) -> Path:
    """Where an engine keeps compiled code for later processes."""
    return _home("user_cache_dir") / "compiled" / engine


def _home(kind: str) -> Path:
    own = os.environ.get("ANYDEVICE_HOME")
    if own:
        return Path(os.path.expanduser(own))
    import platformdirs

    return Path(getattr(platformdirs, kind)("anydevice", appauthor=False))


@contextmanager
def writing(path: Path) -> Iterator[Callable[[str], None]]:
    """A block that reads a file, changes it and writes it with the function that it is given.

    Only one thread of one process is in it, for each folder. Where the folder cannot be locked
    (Windows, NFS) the block runs all the same: of two writers the later one wins.

    Every reader, at any moment, sees the whole old file or the whole new one. A writer that is
    killed leaves a hidden file beside it, which the next one replaces wherever it has the lock.
    A link stays a link: the file that it points to is written.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.name != "posix":
        yield lambda text: _write_whole(target, text, _own_name(target))
        return
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            temporary = target.with_name(f".{target.name}.new")
        except OSError:
            temporary = _own_name(target)
        yield lambda text: _write_whole(target, text, temporary)
    finally:
        os.close(descriptor)


def _own_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.new")


def _write_whole(target: Path, text: str, temporary: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(temporary, flags, 0o666)
    try:
        # Without translation: a file of Windows comes with its own ends of lines.
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        if target.exists():
            os.chmod(temporary, target.stat().st_mode & 0o777)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
