"""Files of ours: where they are, and writing them whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if os.name == "posix":
    import fcntl

FILE_NAME = "anydevice.toml"


def user_file() -> Path:
    """The user's settings; in `ANYDEVICE_HOME` where that is set."""
    return _home("user_config_dir") / FILE_NAME


def project_file(start: Path | None = None) -> Path | None:
    """The nearest `anydevice.toml` in the working directory or above it; `None` without one.

    A file that belongs to another user (but not to root) is not ours to obey: anyone may put one
    into a shared folder such as `/tmp`.
    """
    try:
        folder = (start or Path.cwd()).resolve()
    except OSError:  # the working directory was deleted under us
        return None
    mine = user_file()
    for place in (folder, *folder.parents):
        candidate = place / FILE_NAME
        if candidate != mine and os.path.lexists(candidate) and _is_ours(candidate):
            return candidate
    return None


def _is_ours(path: Path) -> bool:
    if os.name != "posix":
        return True
    return path.lstat().st_uid in (os.geteuid(), 0)


def verdicts_file() -> Path:
    """Where the verdicts of past checks are kept."""
    return _home("user_cache_dir") / "verdicts.json"


def _home(kind: str) -> Path:
    own = os.environ.get("ANYDEVICE_HOME")
    if own:
        return Path(own).expanduser()
    import platformdirs

    return Path(getattr(platformdirs, kind)("anydevice", appauthor=False))


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """A block that only one thread of one process is in, for each folder.

    Where the folder cannot be locked (Windows, some network file systems) the block runs all the
    same: a file is then still whole, and of two writers the later one wins.
    """
    if os.name != "posix":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Put `text` at `path` so that every reader, at any moment, sees the old or the new file.

    A writer that is killed leaves at most one hidden file beside it, which the next one replaces.
    A link stays a link: the file that it points to is written.
    """
    target = Path(os.path.realpath(path))
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
    fixed = target.with_name(f".{target.name}.new")
    if os.name == "posix":  # alone_in() holds the folder: one name is enough
        temporary = fixed
        descriptor = os.open(fixed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    else:
        import tempfile

        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
