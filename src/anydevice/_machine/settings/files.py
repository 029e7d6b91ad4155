"""The paths of anydevice's files, and the readers that check whose a file is."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from anydevice._core.files import distrust, make_folder, parse_json, read_small, writing
from anydevice._core.text import printable, warn

FILE_NAME = "anydevice.toml"

LARGEST_SETTINGS = 2**16
LARGEST_CACHE = 2**24
"""Bytes; a full `measurements.json` has some hundred thousand."""

NO_HOME = Path(os.devnull) / "anydevice"
"""The home of a user who has none: nothing is there, and nothing can be saved."""

fake: tuple[Path | None, frozenset[Path]] = (None, frozenset())
"""In a `fake_project` block: the project's folder, and the files that it hides."""

_said_no_home = False


def described(path: Path) -> str:
    """Return a path for a message; without a home, the file's name and why it is nowhere."""
    if NO_HOME in path.parents:
        return f"{path.name} (without a home folder: set ANYDEVICE_HOME to one)"
    return printable(path)


def user_file() -> Path:
    """Return the user's settings; in `ANYDEVICE_HOME` where that is set."""
    return _home("user_config_dir") / FILE_NAME


def project_file() -> Path | None:
    """Return the nearest `anydevice.toml` in the working directory or above it; `None` without one.

    One that belongs to another user (but not to root), or that everyone may write, is passed over
    with a warning: anyone may put one into a shared folder such as `/tmp`.
    """
    return next(filter(_is_ours, project_files()), None)


def read_project(path: Path) -> bytes:
    """Return the bytes of a project's file; `OSError` if it is unreadable or untrusted."""
    return read_small(path, limit=LARGEST_SETTINGS, trusted=True)


def read_home(path: Path, most: int = LARGEST_SETTINGS) -> bytes:
    """Return the bytes of a file in the user's home; `OSError` also if its folder is untrusted."""
    folder = path.parent
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise OSError(errno.EINVAL, f"{folder} is not a folder", str(path))
    if why := distrust(folder, "its folder"):
        raise PermissionError(errno.EPERM, why, str(path))
    return read_small(path, limit=most, trusted=True)


def read_cache(path: Path) -> dict[str, Any]:
    """Return the JSON object in a cache file; empty if missing, or with a warning if damaged."""
    try:
        values = parse_json(read_home(path, LARGEST_CACHE))
        if isinstance(values, dict):
            return values
        why = "it holds no JSON object"
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        why = error.strerror or str(error)
    except ValueError as error:
        why = f"it is not JSON: {error}"
    warn(
        f"{printable(path)} is not used ({why}); delete it, or set ANYDEVICE_HOME to a folder of "
        "your own"
    )
    return {}


def write_cache(path: Path, name: str, make: Callable[[], object]) -> str | None:
    """Write what `make` returns to a cache file, locked; return a sentence if that fails."""
    import json  # only needed to write

    try:
        with writing(path, private=True) as write:
            write(json.dumps(make(), indent=1, sort_keys=True) + "\n")
    except OSError as error:
        return f"{name} could not be kept in {described(path)}: {error.strerror}"
    return None


def new_project_file() -> Path:
    """Return the project's file or its place here; `OSError` if the directory was deleted."""
    return project_file() or (fake[0] or Path.cwd().resolve()) / FILE_NAME


def measurements_file() -> Path:
    """Return the file of the measurements of `anydevice bench --save`."""
    return _home("user_cache_dir") / "measurements.json"


def verdicts_file() -> Path:
    return _home("user_cache_dir") / "verdicts.json"


def compiled_folder(engine: str) -> Path | None:
    """Return an engine's private folder of compiled code; `None`, with a warning, if unsafe."""
    home = _home("user_cache_dir")
    folder = home / "compiled" / engine
    if home == NO_HOME:
        return None
    try:
        make_folder(folder, private=True)
        why = next(filter(None, map(distrust, (home, folder.parent, folder))), None)
        # A user who may rename a folder above can replace it while the code is used.
        for above in home.resolve().parents if os.name == "posix" else ():
            if above.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
                why = why or f"{above} may be written by everyone"
    except OSError as error:
        why = error.strerror or str(error)
    if why is None:
        return folder
    warn(
        f"compiled code is not kept in {printable(folder)} ({why}); "
        "set ANYDEVICE_HOME to a folder that only you may write"
    )
    return None


@contextmanager
def fake_project(folder: Path) -> Iterator[None]:
    """Hide the project's file in a block of a test; one made there, or in `folder`, counts."""
    global fake
    before, path = fake, project_file()
    fake = (folder, before[1] | ({path} if path else set()))
    try:
        yield
    finally:
        fake = before


def project_files() -> Iterator[Path]:
    """Yield every place of a project's file, the nearest first."""
    folders = [] if fake[0] is None else [fake[0]]
    with suppress(OSError):  # the working directory was deleted
        here = Path.cwd().resolve()
        folders += [here, *here.parents]
    mine = user_file()
    for folder in folders:
        candidate = folder / FILE_NAME
        if candidate != mine and candidate not in fake[1]:
            yield candidate


def _is_ours(path: Path) -> bool:
    try:
        path.lstat()
    except OSError:  # there is none, or its folder may not be entered
        return False
    why = distrust(path)
    if why:
        warn(
            f"{printable(path)} is not obeyed: {why}; to use it, make it a file that belongs to "
            "you and that only you may write",
        )
    return not why


def _home(kind: str) -> Path:
    global _said_no_home
    own = os.environ.get("ANYDEVICE_HOME")
    if own:
        # A "~" that remains is not the name of a folder: anyone could make that here.
        home = Path(os.path.expanduser(own))
        is_known = not str(home).startswith("~")
    else:
        import platformdirs

        try:
            home = Path(getattr(platformdirs, kind)("anydevice", appauthor=False))
        except RuntimeError:  # neither a variable nor the system's list of users names one
            home = Path()
        is_known = home.is_absolute()
    if is_known:
        return home
    if not _said_no_home:
        _said_no_home = True
        warn(
            "this user has no home folder, so no settings are read and nothing is saved; "
            "set ANYDEVICE_HOME to a folder to change that"
        )
    return NO_HOME
