"""The paths of anydevice's files, and whether one has changed since it was read."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from anydevice.core.warn import warn

FILE_NAME = "anydevice.toml"

_UNSETTLED = 2_000_000_000
"""Nanoseconds in which a file may change twice without another time stamp, on any file system."""

_hidden: frozenset[Path] = frozenset()
_fake_project: Path | None = None
_watched: tuple[object, tuple[str, ...]] = (None, ())


def user_file() -> Path:
    """The user's settings; in `ANYDEVICE_HOME` where that is set."""
    return _home("user_config_dir") / FILE_NAME


def project_file() -> Path | None:
    """The nearest `anydevice.toml` in the working directory or above it; `None` without one.

    A file that belongs to another user (but not to root) is passed over with a warning: anyone
    may put one into a shared folder such as `/tmp`.
    """
    return next(filter(_is_ours, _project_files()), None)


def new_project_file() -> Path:
    """The project's file; where there is none yet, its place in the working directory.

    Raises `OSError` if the working directory was deleted.
    """
    return project_file() or (_fake_project or Path.cwd().resolve()) / FILE_NAME


def measurements_file() -> Path:
    """Where `anydevice bench --save` keeps its measurements."""
    return _home("user_cache_dir") / "measurements.json"


def verdicts_file() -> Path:
    """Where the verdicts of past checks are kept."""
    return _home("user_cache_dir") / "verdicts.json"


def compiled_folder(engine: str) -> Path:
    """Where an engine keeps compiled code for later processes."""
    return _home("user_cache_dir") / "compiled" / engine


@contextmanager
def fake_project(folder: Path) -> Iterator[None]:
    """A block without the project's file, for tests: a new one is made in `folder`.

    One that is made in the block anywhere else counts too.
    """
    global _hidden, _fake_project
    before, path = (_hidden, _fake_project), project_file()
    _hidden |= {path} if path else set()
    _fake_project = folder
    try:
        yield
    finally:
        _hidden, _fake_project = before


def variables(names: Sequence[str]) -> Callable[[], tuple[object, ...]]:
    """A function that reads these environment variables quickly; its result is for comparing.

    >>> read = variables(["SOME_SWITCH"])
    >>> before = read()
    >>> os.environ["SOME_SWITCH"] = "1"
    >>> read() == before
    False
    >>> del os.environ["SOME_SWITCH"]
    >>> read() == before
    True
    """
    keys = tuple(map(os.environ.encodekey, names))

    def read() -> tuple[object, ...]:
        # Through its methods every variable takes a microsecond.
        data = getattr(os.environ, "_data", None)
        return tuple(map(os.environ.get, names) if data is None else map(data.get, keys))

    return read


_places = variables(("ANYDEVICE_HOME", "HOME", "USERPROFILE", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"))


def state() -> tuple[object, ...]:
    """A value that is another one as soon as a file of settings or measurements has changed.

    That includes files that appear or go, the working directory, and variables that say where the
    files are. Files are compared by their time stamps, size and identity; those that were changed
    just now by their content too.
    """
    global _watched
    try:
        key = (os.getcwd(), _places(), _hidden, _fake_project)
    except OSError:  # the working directory was deleted
        key = ("", _places(), _hidden, _fake_project)
    if _watched[0] != key:
        files = (*_project_files(), user_file(), measurements_file())
        _watched = (key, tuple(map(str, files)))
    return key, [stamp(path) for path in _watched[1] if os.path.lexists(path)]


def stamp(path: str | Path) -> object:
    """A value that is another one as soon as the file has changed."""
    try:
        of_link = status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            status = os.stat(path)
        changed = max(status.st_mtime_ns, status.st_ctime_ns)
        stamp = (path, *_identity(of_link), *_identity(status))
        if time.time_ns() - changed > _UNSETTLED:
            return stamp
        with open(path, "rb") as file:
            return (*stamp, file.read())
    except OSError as error:
        return (path, error.errno)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    times = status.st_mtime_ns, status.st_ctime_ns
    return (*times, status.st_size, status.st_ino, status.st_dev, status.st_uid, status.st_mode)


def _project_files() -> Iterator[Path]:
    """Every place of a project's file, the nearest first."""
    folders = [] if _fake_project is None else [_fake_project]
    with suppress(OSError):  # the working directory was deleted
        here = Path.cwd().resolve()
        folders += [here, *here.parents]
    mine = user_file()
    for folder in folders:
        candidate = folder / FILE_NAME
        if candidate != mine and candidate not in _hidden:
            yield candidate


def _is_ours(path: Path) -> bool:
    try:
        owner = path.lstat().st_uid
    except OSError:  # there is none, or its folder may not be entered
        return False
    if os.name != "posix" or owner in (os.geteuid(), 0):
        return True
    warn(
        f"{path} belongs to another user and is not obeyed; to use it, make it yours",
    )
    return False


def _home(kind: str) -> Path:
    own = os.environ.get("ANYDEVICE_HOME")
    if own:
        return Path(os.path.expanduser(own))
    import platformdirs

    return Path(getattr(platformdirs, kind)("anydevice", appauthor=False))
