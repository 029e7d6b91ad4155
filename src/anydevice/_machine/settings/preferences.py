"""The settings files: read with errors that name the line, and written by `prefer`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from anydevice._core.backends import AUTO, BACKENDS, KINDS
from anydevice._core.device import Device, parse_place
from anydevice._core.files import parse_toml, writing
from anydevice._core.record import Record
from anydevice._core.text import joined, printable, shortened, warn
from anydevice._machine.engines.library_settings import harmless
from anydevice._machine.engines.registry import engine_names, unknown_engine
from anydevice._machine.settings.files import (
    new_project_file,
    project_file,
    read_home,
    read_project,
    state,
    user_file,
)
from anydevice.errors import ConfigurationError, OutOfMemoryError

SETTINGS = ("order", "memory", "x64", "jit", "mixed_precision", "time_limit", "env")
_KEYS = ("device", "engine", *SETTINGS)
_NAMES_SHOWN = 5
"""Limit on the names in one message."""

Origin = Literal["user file", "project file"]


class FileSettings(Record):
    """The contents of one settings file. `wishes` are device names, first choice first.

    `settings` are the other keys, each with its value and with its file and line. Of the variables
    in a project's file, they have those that a project may set.
    """

    origin: Origin
    path: Path
    wishes: tuple[str, ...] = ()
    engine: str | None = None
    settings: tuple[tuple[str, Any, str], ...] = ()


def prefer(
    device: str | Device | Sequence[str | Device] | None = None,
    *,
    engine: str | None = None,
    project: bool = False,
) -> Path | None:
    """Save the preferred device and engine for this and every later run.

    Writes the project's `anydevice.toml` if there is one at or above the working directory, else
    the user's, and returns the file; with `project=True`, where a project has none yet, one is made
    in the working directory. Comments and other settings in it are kept. A list is tried in
    order: `prefer(["cuda", "metal"])`. `prefer(None)` or `prefer("")` deletes the preference. An
    unknown backend is a `ConfigurationError` that lists the valid names. A device that is not
    usable now can be preferred; it is skipped until it is.

    Raises `ConfigurationError` if the file cannot be read or written; it is then unchanged.
    """
    several = () if device is None else (device,) if isinstance(device, str | Device) else device
    wishes = [wish for one in several for wish in split_wishes(str(one))]
    for wish in wishes:
        check_wish(wish, "prefer")
    if engine is not None:
        check_engine(engine, "prefer")
    path = _project_s() if project else project_file() or user_file()
    changes: dict[str, str | list[str] | None] = {
        "device": wishes if len(wishes) > 1 else next(iter(wishes), None),
        "engine": engine,
    }
    if not os.path.exists(path) and not any(changes.values()):
        return None
    _change(path, changes)
    return path


def _project_s() -> Path:
    try:
        return new_project_file()
    except OSError as error:
        raise ConfigurationError(
            "the project's file cannot be made: the working directory no longer exists "
            f"({error.strerror}); change to another one first",
            "prefer",
        ) from error


_read: tuple[object, tuple[FileSettings, ...]] | None = None


def read_files() -> tuple[FileSettings, ...]:
    """Return the existing settings files, the user's before the project's.

    They are read once, and again when one has changed. Raises `ConfigurationError` with the file
    and the line if a value is invalid. A file that cannot be opened is skipped with a warning.
    """
    global _read
    now, cache = state(), _read  # another thread may forget what was read
    if cache is None or cache[0] != now:
        read = (_read_file("user file", user_file()), _read_file("project file", project_file()))
        _read = cache = (now, tuple(file for file in read if file is not None))
    return cache[1]


def forget_files() -> None:
    """Read the files again on next use, and repeat their warnings."""
    global _read
    _read = None


def _read_file(origin: Origin, path: Path | None) -> FileSettings | None:
    if path is None:
        return None
    try:
        text = read_home(path) if origin == "user file" else read_project(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        warn(f"{printable(path)} cannot be read ({error.strerror}); going on without it")
        return None
    return _interpret(origin, path, text)


def check_wish(wish: str, source: str) -> None:
    """Raise `ConfigurationError`, with the valid names, if this cannot name a device."""
    if wish in KINDS or wish == AUTO:
        return
    try:
        parse_place(wish)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}", source) from None


def check_engine(engine: str, source: str) -> None:
    """Raise `ConfigurationError`, with the valid names, for an unknown engine."""
    if engine not in engine_names():
        raise ConfigurationError(f"{source}: {unknown_engine(engine)}", source)


def split_wishes(text: str) -> tuple[str, ...]:
    """Return the names in a list such as `"cuda, cpu"`."""
    return tuple(part.strip().lower() for part in text.split(",") if part.strip())


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except UnicodeDecodeError as error:
        line = text[: error.start].count(b"\n") + 1
        source = f"{printable(path)}, line {line}"
        raise ConfigurationError(f"{source}: this is not UTF-8 text", source) from None
    except ValueError as error:
        match = re.search(r"at line (\d+)", str(error))
        line = int(match[1]) if match else text.count(b"\n") + 1
        source = f"{printable(path)}, line {line}"
        raise ConfigurationError(
            f"{source}: this is not TOML ({error}); fix the line or delete the file", source
        ) from None


def _interpret(origin: Origin, path: Path, text: bytes) -> FileSettings:
    settings: list[tuple[str, Any, str]] = []
    wishes: tuple[str, ...] = ()
    engine: str | None = None
    read = _parse(path, text)
    unknown = [key for key in read if key not in _KEYS]
    if unknown:
        names = joined(repr(shortened(key)) for key in unknown[:_NAMES_SHOWN])
        more = (
            f", nor the {len(unknown) - _NAMES_SHOWN} more" if len(unknown) > _NAMES_SHOWN else ""
        )
        warn(
            f"{printable(path)}, line {_line_of(unknown[0], text)}: there is no setting "
            f"{names}{more}; the settings are {', '.join(_KEYS)}",
        )
    for key in _KEYS:
        if key not in read:
            continue
        value = read[key]
        source = f"{printable(path)}, line {_line_of(key, text)}"
        if key == "device":
            wishes = _wishes(value, source)
        elif key == "engine":
            engine = _text(key, value, source)
            check_engine(engine, source)
        elif key == "env" and origin == "project file" and isinstance(value, Mapping):
            if allowed := _harmless(value, source):
                settings.append((key, allowed, source))
        else:
            settings.append((key, value, source))
    return FileSettings(origin, path, wishes, engine, tuple(settings))


def _harmless(variables: Mapping[str, Any], source: str) -> dict[str, Any]:
    allowed, refused = harmless(variables)
    if refused:
        names = joined(map(shortened, refused[:_NAMES_SHOWN]))
        more = f" and {len(refused) - _NAMES_SHOWN} more" if len(refused) > _NAMES_SHOWN else ""
        warn(
            f"{source}: a project's file may not set {names}{more}, but only what is known to be "
            "harmless; if you want it, put it into your own file, "
            f"{printable(user_file())}"
        )
    return allowed


def _wishes(value: object, source: str) -> tuple[str, ...]:
    names = value if isinstance(value, list) else [value]
    wishes = tuple(wish for name in names for wish in split_wishes(_text("device", name, source)))
    for wish in wishes:
        check_wish(wish, source)
    return wishes


def _text(key: str, value: object, source: str) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(
            f"{source}: {key} must be a text such as "
            f"{'numpy' if key == 'engine' else next(iter(BACKENDS))!r}, not {value!r}",
            source,
        )
    return value.strip().lower()


def _line_of(key: str, text: bytes) -> int:
    pattern = re.compile(rf"\s*(\[+\s*)?[\"']?{re.escape(key)}[\"']?\s*[=\].]")
    lines = text.decode("utf-8").splitlines()
    return next((number for number, line in enumerate(lines, 1) if pattern.match(line)), 1)


def _change(path: Path, changes: Mapping[str, str | list[str] | None]) -> None:
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        is_user_s = path == user_file()
        with writing(path, private=is_user_s) as write:
            read = read_home if is_user_s else read_project
            old = read(path) if path.exists() else b""
            _parse(path, old)
            document = tomlkit.parse(old.decode("utf-8"))
            for key, value in changes.items():
                if value is None:
                    document.pop(key, None)
                else:
                    document[key] = value
            write(tomlkit.dumps(document))
    except MemoryError as error:
        raise OutOfMemoryError(f"{path} cannot be changed: no memory is left") from error
    except (TOMLKitError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} cannot be changed ({error}); nothing was changed. Change it by hand",
            str(path),
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written ({error.strerror}); nothing was changed. "
            "Set ANYDEVICE_DEVICE instead, or ANYDEVICE_HOME to a folder that can be written",
            str(path),
        ) from error
